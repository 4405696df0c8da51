"""The staleness contract: who may start generating, and what is too old to train.

One knob, `max_staleness` (η, in versions), and B groups per batch. A group's id is its place in
the admission order. A worker that serves version u may start a group while

    ahead < (1 + η - (v - u)) · B

with v the learner's version and `ahead` the groups before it in admission order that have not
left. Groups leave when a batch that raised the version consumed them, when they are dropped, and
when they failed for good. Whole batches consumed in admission order then never hold a token older
than η: at most ahead / B batches raise the version before the group's own turn. What is consumed
in another order, or was admitted under a higher η, is judged once more at consumption.

Knows no worker, no queue and no task: the limit of requests in flight is the dispatcher's, the
bound on bytes the queue's.
"""

from collections.abc import Collection, Iterable
from enum import StrEnum

import numpy as np
from sortedcontainers import SortedSet


class AdmissionError(RuntimeError):
    """A call that the admission order does not allow; always a fault of the caller."""


class StalePolicy(StrEnum):
    """What happens to tokens that are too old when their group is consumed."""

    MASK = "mask"
    """Consume in ready order; too old tokens (or samples) do not train."""
    DROP = "drop"
    """Consume in ready order; a group with a too old token is dropped before it."""
    WAIT = "wait"
    """Consume in admission order, where only a lowered η makes anything too old (then masked)."""

    @property
    def in_admission_order(self) -> bool:
        """Whether batches are composed in admission order instead of ready order."""
        return self is StalePolicy.WAIT


class Admission:
    """The admission order and the learner's version. Every call is O(log live groups).

    A live group is started (given to a worker, generated, ready or being consumed) or waiting
    (its attempt was lost; it keeps its place until it is started again or leaves).
    """

    def __init__(
        self,
        batch_groups: int,
        max_staleness: int,
        *,
        version: int = 0,
        next_group: int = 0,
        live: Iterable[int] = (),
    ) -> None:
        """`live` are the started groups of a run that is taken up again, all below `next_group`."""
        if batch_groups < 1:
            raise ValueError(f"batch_groups is {batch_groups}; a batch has at least one group")
        self._batch_groups = batch_groups
        self._version = version
        self._next_group = next_group
        self._live = SortedSet(live)
        self._waiting = SortedSet()
        self.set_max_staleness(max_staleness)
        if self._live and self._live[-1] >= next_group:
            raise ValueError(f"live group {self._live[-1]} is not below next_group {next_group}")

    @property
    def batch_groups(self) -> int:
        """B, the groups of one batch."""
        return self._batch_groups

    @property
    def max_staleness(self) -> int:
        """η, in versions."""
        return self._max_staleness

    @property
    def version(self) -> int:
        """v, the learner's version."""
        return self._version

    @property
    def next_group(self) -> int:
        """The id that the next admitted group will have."""
        return self._next_group

    @property
    def live(self) -> int:
        """Admitted groups that have not left."""
        return len(self._live)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Groups whose attempt was lost and that no worker has started again, in order."""
        return tuple(self._waiting)

    def set_max_staleness(self, max_staleness: int) -> None:
        """Change η; it governs every start from now on, and consumption of what has started."""
        if max_staleness < 0:
            raise ValueError(f"max_staleness is {max_staleness}; it cannot be negative")
        self._max_staleness = max_staleness

    def limit(self, worker_version: int) -> int:
        """Groups ahead below which a worker serving this version may start one.

        Not positive for a worker that lags too far. Zero for a version that the learner has not
        reached: such a worker serves weights of a history that was given up.
        """
        if worker_version > self._version:
            return 0
        lag = self._version - worker_version
        return (1 + self._max_staleness - lag) * self._batch_groups

    def headroom(self, worker_version: int) -> int:
        """New groups that could be admitted now for a worker serving this version."""
        return max(0, self.limit(worker_version) - len(self._live))

    def may_start(self, group_id: int, worker_version: int) -> bool:
        """Whether a worker serving this version may start this live group."""
        self._require_live(group_id)
        return self._live.bisect_left(group_id) < self.limit(worker_version)

    def admit(self, worker_version: int) -> int | None:
        """Admit a group at the end of the order and start it; None while it has to wait."""
        if not self.headroom(worker_version):
            return None
        group_id = self._next_group
        self._next_group += 1
        self._live.add(group_id)
        return group_id

    def restart(self, worker_version: int) -> int | None:
        """Start the first waiting group; None if there is none or this worker may not start it."""
        if not self._waiting or not self.may_start(self._waiting[0], worker_version):
            return None
        return self._waiting.pop(0)

    def retry(self, group_id: int) -> None:
        """The attempt of a started group was lost: it waits, at its place in the order."""
        self._require_started(group_id)
        self._waiting.add(group_id)

    def leave(self, group_id: int) -> None:
        """A group was dropped (a skipped batch drops its groups) or failed for good."""
        self._require_live(group_id)
        self._live.discard(group_id)
        self._waiting.discard(group_id)

    def consumed(self, group_ids: Collection[int]) -> int:
        """A batch raised the version: its groups leave in the same instant. Returns the version.

        Groups consumed with every token masked leave this way too. Raises AdmissionError for
        fewer groups than B, since the bound counts whole batches.
        """
        if len(set(group_ids)) != len(group_ids) or len(group_ids) < self._batch_groups:
            raise AdmissionError(
                f"a batch of {len(set(group_ids))} different groups cannot raise the version: "
                f"the staleness bound counts batches of {self._batch_groups}"
            )
        for group_id in group_ids:
            self._require_started(group_id)
        self._live.difference_update(group_ids)
        self._version += 1
        return self._version

    def _require_live(self, group_id: int) -> None:
        if group_id not in self._live:
            known = "has left" if 0 <= group_id < self._next_group else "was never admitted"
            raise AdmissionError(f"group {group_id} {known}")

    def _require_started(self, group_id: int) -> None:
        self._require_live(group_id)
        if group_id in self._waiting:
            raise AdmissionError(f"group {group_id} waits to be started again")


def is_fresh(token_version: int, learner_version: int, max_staleness: int) -> bool:
    """Whether a token sampled at `token_version` may train now: v - version(token) ≤ η."""
    return learner_version - token_version <= max_staleness


def drops_group(
    policy: StalePolicy, oldest_version: int, learner_version: int, max_staleness: int
) -> bool:
    """Whether a group whose oldest token has this version is dropped instead of consumed."""
    stale = not is_fresh(oldest_version, learner_version, max_staleness)
    return policy is StalePolicy.DROP and stale


def fresh_tokens(
    token_versions: np.ndarray,
    offsets: np.ndarray,
    learner_version: int,
    max_staleness: int,
    *,
    whole_samples: bool,
) -> np.ndarray:
    """bool[tokens]: which response tokens are young enough to train.

    token_versions: int64[tokens], flat over samples; offsets: int64[samples + 1]. With
    `whole_samples`, for objectives whose unit or statistics are per sequence, one too old token
    takes its whole sample with it.
    """
    fresh = learner_version - token_versions <= max_staleness
    if whole_samples:
        stale_before = np.concatenate(([0], np.cumsum(~fresh)))
        clean = stale_before[offsets[1:]] == stale_before[offsets[:-1]]
        fresh = np.repeat(clean, np.diff(offsets))
    return fresh
