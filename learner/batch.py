"""What the driver and the learner ranks say to each other about one batch step. No torch, no Ray.

A request carries scalars and references; token data is fetched by the rank that trains on it.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GroupEntry:
    """One group of a batch: where its rows are, and per sample what planning and advantages need.

    The tuples are in the row order of the batch behind `ref`. A sample that is not `ok` has no
    reward; `outcomes` are before shaping, None where the verifier has none.
    """

    group_id: int
    ref: Any
    sample_ids: tuple[str, ...]
    prompt_tokens: int
    response_tokens: tuple[int, ...]
    rewards: tuple[float | None, ...]
    outcomes: tuple[float | None, ...]
    ok: tuple[bool, ...]
    truncated: tuple[bool, ...]


@dataclass(frozen=True)
class StepRequest:
    """Train on these groups; `version` is the learner's before the step.

    `max_staleness` is the bound that holds for it, `total_steps` what the learning-rate schedule
    counts towards: both may differ from one step to the next.
    """

    step: int
    version: int
    max_staleness: int
    total_steps: int
    groups: tuple[GroupEntry, ...]


@dataclass(frozen=True)
class SampleFate:
    """What became of a sample's response tokens; they add up to its length.

    Reasons in `masked`: `unscored` (no ok verdict), `lone` (no second scored sample in its group),
    `truncated`, `tool` (loss mask), `stale`, `veto`, `keep_low`, `keep_high`, `skipped` (its
    optimizer step was).
    """

    sample_id: str
    trained_tokens: int
    masked: dict[str, int]


@dataclass(frozen=True)
class StepResult:
    """`changed` says whether the weights changed, and so whether `version` was raised.

    `skipped` is "" or why nothing changed: "non-finite" loss or gradient, or "empty" (no token to
    train on, or nothing but zero advantages). `metrics` are of the whole batch, on every rank;
    `fates` are of the samples of one rank, or of all after the group has merged the ranks.
    """

    changed: bool
    version: int
    skipped: str
    metrics: dict[str, float]
    fates: tuple[SampleFate, ...]
