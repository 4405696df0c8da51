"""What crosses between the driver and the learner ranks besides batches. No torch, no Ray."""

from dataclasses import dataclass

import numpy as np

from learner.config import LearnerConfig, ObjectiveConfig


class ModelError(ValueError):
    """The model folder cannot be used; the message says what was wrong."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read; the message says what was expected."""


class NotWritten(ValueError):
    """A checkpoint cannot be written; those before it are as they were."""


@dataclass(frozen=True)
class LearnerSpec:
    """What all ranks of a learner are built from.

    `model` is a folder or hub name; `objective` has the run's bounds filled in; `rollout_dtype` (a
    torch name) is that of published and exported weights. Where a rank's node has the folder
    `logs`, what the rank prints goes to a file there.
    """

    model: str
    config: LearnerConfig
    objective: ObjectiveConfig
    max_response_tokens: int
    rollout_dtype: str
    seed: int
    logs: str | None = None


@dataclass(frozen=True)
class LearnerState:
    """`version` of the weights, and batch steps done, skipped ones too."""

    version: int
    batches: int


@dataclass(frozen=True)
class ProbeRequest:
    """Score the `top_k` likeliest tokens after each prefix, at `temperature` and at 1."""

    prefixes: tuple[tuple[int, ...], ...]
    top_k: int
    temperature: float


@dataclass(frozen=True, eq=False)
class ProbeScores:
    """What the learner expects after each of P probe prefixes: the likeliest tokens int32 [P, K],
    their log-probabilities at the sampling temperature and at temperature 1, float32 [P, K]."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray


@dataclass(frozen=True, eq=False)
class Publication:
    """Describes the chunks of one set of weights, in their order; `label` is the caller's."""

    label: str
    dtype: str
    names: tuple[tuple[str, ...], ...]
    nbytes: tuple[int, ...]
    crc32: tuple[int, ...]
    probe: ProbeScores | None

    @property
    def total_bytes(self) -> int:
        return sum(self.nbytes)
