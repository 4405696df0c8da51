"""The ledger: every group and every sample is accounted for exactly once.

    admitted → generated → verified → ready → consumed | dropped(reason)
       ↑___________|__________|_________|  retried(reason): the attempt's samples are superseded

and from any of the four states failed(reason). Batch steps are events too, so that a ledger made
of a journal's events knows where the learner stood.

A pure state machine over typed transitions. Groups that ended are forgotten but for the counts,
so a ledger is as large as what is in flight; what ended is in the journal. Over completed samples
and over their tokens, generated = trained + masked + dropped + superseded + pending after every
transition; failed tasks are counted apart.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, assert_never

from orchestrator.history.ledger_counts import Counts, Fate, Totals
from orchestrator.history.transitions import (
    Admitted,
    Consumed,
    Dropped,
    Failed,
    Generated,
    GroupKey,
    GroupState,
    GroupTransition,
    Journal,
    LedgerError,
    Ready,
    Retried,
    Stepped,
    Transition,
    Verified,
)

_REASON = re.compile(r"[a-z][a-z0-9_]{0,39}")


@dataclass(slots=True)
class LiveGroup:
    """A group that has not ended."""

    task_id: str
    samples: int
    attempt: int = 0
    pardoned: int = 0
    """Of the attempts before this one, those that do not count."""
    state: GroupState = GroupState.ADMITTED
    response_tokens: tuple[int, ...] = ()
    """Lengths of the current attempt's samples; empty until they are generated."""


@dataclass(frozen=True)
class LedgerReport:
    """The balance at one moment."""

    samples: Totals
    tokens: Totals
    admitted_tasks: int
    consumed_tasks: int
    dropped_tasks: int
    failed_by_reason: Mapping[str, int]
    in_flight_by_state: Mapping[str, int]
    lengths: Mapping[str, Mapping[str, int]]
    """`generated` and each fate: samples by upper bound of their length bucket in tokens."""

    @property
    def failed_tasks(self) -> int:
        """Tasks given up after their attempts."""
        return sum(self.failed_by_reason.values())

    @property
    def balanced(self) -> bool:
        """Samples, tokens and tasks all add up."""
        ended = self.consumed_tasks + self.dropped_tasks + self.failed_tasks
        tasks = self.admitted_tasks == ended + sum(self.in_flight_by_state.values())
        return tasks and self.samples.balanced and self.tokens.balanced

    def as_dict(self) -> dict[str, Any]:
        """JSON form: the sample counts on top, the same for `tokens`, and the verdict."""
        return {
            **self.samples.as_dict(),
            "failed_tasks": self.failed_tasks,
            "failed_by_reason": dict(self.failed_by_reason),
            "tokens": self.tokens.as_dict(),
            "tasks": {
                "admitted": self.admitted_tasks,
                "consumed": self.consumed_tasks,
                "dropped": self.dropped_tasks,
                "in_flight": dict(self.in_flight_by_state),
            },
            "lengths": {name: dict(buckets) for name, buckets in self.lengths.items()},
            "balanced": self.balanced,
        }


class Ledger:
    """Applies transitions, refuses illegal ones, counts."""

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = journal
        self._live: dict[int, LiveGroup] = {}
        self._next_group = 0
        self._version = 0
        self._counts = Counts()
        self._step = 0
        self._tasks = {"admitted": 0, "consumed": 0, "dropped": 0}
        self._failed: dict[str, int] = {}

    @classmethod
    def replayed(
        cls,
        history: Iterable[Transition],
        journal: Journal | None = None,
        also: Callable[[Transition], None] = lambda transition: None,
    ) -> Self:
        """The ledger that `history` leads to; what comes later goes to `journal`. `also` is told
        each transition too.

        Raises LedgerError at the first transition that cannot follow those before it.
        """
        ledger = cls()
        for transition in history:
            ledger._apply(transition)
            also(transition)
        ledger._journal = journal
        ledger.check()
        return ledger

    @property
    def step(self) -> int:
        """Batch steps done."""
        return self._step

    @property
    def version(self) -> int:
        """The learner's version after them."""
        return self._version

    @property
    def admitted(self) -> int:
        """Tasks admitted so far."""
        return self._tasks["admitted"]

    @property
    def next_group(self) -> int:
        """Above every id admitted so far."""
        return self._next_group

    @property
    def in_flight(self) -> int:
        """Groups that have not ended."""
        return len(self._live)

    def group(self, group_id: int) -> LiveGroup | None:
        """A group that has not ended, to read; None otherwise."""
        return self._live.get(group_id)

    def ready(self) -> list[GroupKey]:
        """Group and attempt of those that wait for the learner, in admission order."""
        found = self._live.items()
        return sorted((g, live.attempt) for g, live in found if live.state is GroupState.READY)

    def unfinished(self) -> list[int]:
        """Groups that have not ended, in admission order."""
        return sorted(self._live)

    def apply(self, *transitions: Transition) -> None:
        """Apply in order and keep in the journal.

        Raises LedgerError at the first illegal one, which changes nothing; those before it stand,
        here and in the journal.
        """
        applied: list[Transition] = []
        try:
            for transition in transitions:
                self._apply(transition)
                applied.append(transition)
        finally:
            if self._journal is not None and applied:
                self._journal.append(applied)

    def report(self) -> LedgerReport:
        """Counts now; what is pending is counted from the groups in flight. O(in flight)."""
        by_state = dict.fromkeys(GroupState, 0)
        samples = tokens = 0
        for group in self._live.values():
            by_state[group.state] += 1
            samples += len(group.response_tokens)
            tokens += sum(group.response_tokens)
        counts = self._counts
        lengths = {fate.value: h.as_dict() for fate, h in counts.ended_lengths.items()}
        return LedgerReport(
            samples=counts.samples.totals(samples),
            tokens=counts.tokens.totals(tokens),
            admitted_tasks=self._tasks["admitted"],
            consumed_tasks=self._tasks["consumed"],
            dropped_tasks=self._tasks["dropped"],
            failed_by_reason=dict(self._failed),
            in_flight_by_state={state.value: count for state, count in by_state.items()},
            lengths={"generated": counts.generated_lengths.as_dict(), **lengths},
        )

    def check(self) -> LedgerReport:
        """The report. Raises LedgerError with the figures when it does not balance."""
        report = self.report()
        if not report.balanced:
            raise LedgerError(f"the ledger does not balance: {report.as_dict()}")
        return report

    def _apply(self, transition: Transition) -> None:
        match transition:
            case Admitted():
                self._admit(transition)
            case Generated():
                self._generate(transition)
            case Verified():
                self._advance(transition, GroupState.GENERATED, GroupState.VERIFIED)
            case Ready():
                self._advance(transition, GroupState.VERIFIED, GroupState.READY)
            case Retried():
                group = self._take_samples(transition, Fate.SUPERSEDED)
                group.attempt += 1
                group.pardoned += transition.pardoned
                group.state = GroupState.ADMITTED
            case Consumed():
                self._consume(transition)
            case Dropped():
                if self._require(transition.group_id).state is GroupState.ADMITTED:
                    raise _illegal(transition, "it has no samples to drop; fail or return it")
                self._end(transition, Fate.DROPPED, "dropped")
            case Failed():
                self._end(transition, Fate.DROPPED, None)
                self._failed[transition.reason] = self._failed.get(transition.reason, 0) + 1
            case Stepped():
                self._finish_step(transition)
            case _:
                assert_never(transition)

    def _finish_step(self, transition: Stepped) -> None:
        if transition.step != self._step + 1 or transition.version != self._version:
            raise LedgerError(
                f"step {transition.step} to version {transition.version} cannot follow step "
                f"{self._step} at version {self._version}"
            )
        self._step = transition.step

    def _admit(self, transition: Admitted) -> None:
        if transition.group_id < self._next_group:
            raise _illegal(transition, f"ids below {self._next_group} are in use")
        if transition.samples < 1:
            raise _illegal(transition, "a group has at least one sample")
        self._next_group = transition.group_id + 1
        self._tasks["admitted"] += 1
        self._live[transition.group_id] = LiveGroup(transition.task_id, transition.samples)

    def _generate(self, transition: Generated) -> None:
        group = self._require(transition.group_id)
        lengths = tuple(transition.response_tokens)
        if len(lengths) != group.samples or min(lengths) < 0:
            raise _illegal(transition, f"expected {group.samples} lengths")
        self._advance(transition, GroupState.ADMITTED, GroupState.GENERATED)
        group.response_tokens = lengths
        for tokens in lengths:
            self._counts.generated(tokens)

    def _advance(
        self, transition: Generated | Verified | Ready, before: GroupState, after: GroupState
    ) -> None:
        group = self._at(transition, before)
        group.state = after

    def _consume(self, transition: Consumed) -> None:
        group = self._at(transition, GroupState.READY)
        if transition.version < self._version:
            raise _illegal(transition, f"version {self._version} has consumed groups already")
        if not len(transition.trained_tokens) == len(transition.masked) == group.samples:
            raise _illegal(transition, f"expected the fates of {group.samples} samples")
        fates = list(
            zip(group.response_tokens, transition.trained_tokens, transition.masked, strict=True)
        )
        for index, (length, trained, masked) in enumerate(fates):
            if min(trained, *masked.values(), 0) < 0 or trained + sum(masked.values()) != length:
                raise _illegal(
                    transition,
                    f"sample {index} has {length} tokens, but {trained} trained and "
                    f"{dict(masked)} masked",
                )
            for reason in masked:
                _require_code(transition, reason)
        for _, trained, masked in fates:
            self._counts.consumed(trained, masked)
        self._version = transition.version
        self._tasks["consumed"] += 1
        del self._live[transition.group_id]

    def _end(self, transition: Dropped | Failed, fate: Fate, counter: str | None) -> None:
        self._take_samples(transition, fate)
        del self._live[transition.group_id]
        if counter:
            self._tasks[counter] += 1

    def _take_samples(self, transition: Retried | Dropped | Failed, fate: Fate) -> LiveGroup:
        """Count the attempt's samples under this fate and take them off the group."""
        group = self._require(transition.group_id)
        _require_code(transition, transition.reason)
        for tokens in group.response_tokens:
            self._counts.left(fate, transition.reason, tokens)
        group.response_tokens = ()
        return group

    def _at(
        self, transition: Generated | Verified | Ready | Consumed, state: GroupState
    ) -> LiveGroup:
        group = self._require(transition.group_id)
        if transition.attempt != group.attempt:
            raise _illegal(transition, f"the group is at attempt {group.attempt}")
        if group.state is not state:
            raise _illegal(transition, f"the group is {group.state}, expected {state}")
        return group

    def _require(self, group_id: int) -> LiveGroup:
        group = self._live.get(group_id)
        if group is None:
            known = "has ended already" if 0 <= group_id < self._next_group else "was not admitted"
            raise LedgerError(f"group {group_id} {known}")
        return group


def _illegal(transition: GroupTransition, why: str) -> LedgerError:
    return LedgerError(f"{type(transition).__name__} of group {transition.group_id}: {why}")


def _require_code(transition: GroupTransition, reason: str) -> None:
    if not _REASON.fullmatch(reason):
        raise _illegal(transition, f"the reason {reason!r} is no short code such as `worker_lost`")
