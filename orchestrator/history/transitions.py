"""The events of a run's groups and steps, as the ledger takes them and a journal keeps them.

Plain data: which event may follow which is decided in `ledger`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

GroupKey = tuple[int, int]
"""Group and attempt."""


class LedgerError(RuntimeError):
    """A transition that the lifecycle does not allow, or a balance that does not hold."""


class GroupState(StrEnum):
    """States of a group that has not ended."""

    ADMITTED = "admitted"
    GENERATED = "generated"
    VERIFIED = "verified"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Admitted:
    """A task got its place in the admission order. Ids grow from one admission to the next."""

    group_id: int
    task_id: str
    samples: int


@dataclass(frozen=True, slots=True)
class Generated:
    """An attempt completed all of its samples."""

    group_id: int
    attempt: int
    response_tokens: tuple[int, ...]
    """One length per sample."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Every sample has its verdict."""

    group_id: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The trajectory store owns the group."""

    group_id: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Retried:
    """The attempt was lost; the group is admitted again at its place, under the next attempt."""

    group_id: int
    reason: str
    """A short code, as everywhere in the ledger; free text belongs into `detail`."""
    detail: str = ""
    pardoned: bool = False
    """Whether the attempt was ended on purpose, and so is none of the task's."""


@dataclass(frozen=True, slots=True)
class Consumed:
    """A batch that raised the version consumed the group."""

    group_id: int
    attempt: int
    version: int
    """The version that the batch made."""
    trained_tokens: tuple[int, ...]
    """One number per sample."""
    masked: tuple[Mapping[str, int], ...]
    """Per sample, tokens kept out of the loss by reason."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group with completed samples left without being consumed."""

    group_id: int
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The task failed for good after its attempts; samples of the last attempt are dropped."""

    group_id: int
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Stepped:
    """A batch step is done. Holds what it takes to do it again from the trajectory log."""

    step: int
    """Steps done, this one included."""
    version: int
    """The learner's after the step: raised if the batch changed the weights."""
    max_staleness: int
    """The bound that held for it."""
    total_steps: int
    """Steps of the run at that time, which the learning-rate schedule depends on."""
    groups: tuple[GroupKey, ...]
    """In the order in which the learner got them."""


GroupTransition = Admitted | Generated | Verified | Ready | Retried | Consumed | Dropped | Failed
Transition = GroupTransition | Stepped


class Journal(Protocol):
    """Where transitions are kept. What one call gets is kept whole or not at all."""

    def append(self, transitions: Sequence[Transition]) -> None:
        """Keep transitions that the ledger has accepted, in this order."""

    async def flush(self, *, durably: bool = False) -> None:
        """Return once everything appended so far would survive the end of this process; `durably`,
        that of the machine too."""


class SampleOutcome(Protocol):
    """What the learner reports about one sample."""

    @property
    def sample_id(self) -> str: ...
    @property
    def trained_tokens(self) -> int: ...
    @property
    def masked(self) -> Mapping[str, int]: ...


def consumed_batch(
    version: int, attempts: Mapping[int, int], outcomes: Iterable[SampleOutcome]
) -> list[Consumed]:
    """The transitions of one consumed batch, from what the learner says about each sample.

    attempts: the batch's groups and the attempt consumed of each; their order is kept. Sample ids
    are `group-attempt-index`. Raises LedgerError for a sample that is missing, reported twice or
    not of the batch.
    """
    by_group: dict[int, dict[int, SampleOutcome]] = {group_id: {} for group_id in attempts}
    for outcome in outcomes:
        group_id, attempt, index = (int(part) for part in outcome.sample_id.rsplit("-", 2))
        if attempts.get(group_id) != attempt:
            raise LedgerError(f"sample {outcome.sample_id} is not of the consumed batch")
        if index in by_group[group_id]:
            raise LedgerError(f"sample {outcome.sample_id} was reported twice")
        by_group[group_id][index] = outcome
    for group_id, samples in by_group.items():
        if sorted(samples) != list(range(len(samples))) or not samples:
            raise LedgerError(f"group {group_id}: fates of samples {sorted(samples)} only")
    return [
        Consumed(
            group_id,
            attempts[group_id],
            version,
            tuple(samples[index].trained_tokens for index in range(len(samples))),
            tuple(dict(samples[index].masked) for index in range(len(samples))),
        )
        for group_id, samples in by_group.items()
    ]
