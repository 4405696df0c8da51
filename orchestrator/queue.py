"""The queue of groups on their way to the learner, bounded in groups and in bytes.

The bounds act at admission only: each admitted group reserves its worst case and settles to its
real size once that is known. Nothing admitted is ever refused and nothing is dropped to make
room, so retries and late groups always fit. Entries are opaque; the caller passes the time.
"""

from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Generic, TypeVar

from sortedcontainers import SortedDict

T = TypeVar("T")


class QueueError(RuntimeError):
    """A call that a group's state in the queue does not allow; a fault of the caller."""


class Bound(StrEnum):
    """What keeps a full queue from admitting."""

    GROUPS = "groups"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class QueueEntry(Generic[T]):
    """A ready group."""

    group_id: int
    item: T
    nbytes: int
    ready_at: float
    """Seconds, on the caller's clock."""


@dataclass(frozen=True, slots=True)
class QueueStats:
    """A moment's view, for metrics and the console."""

    ready_groups: int
    """Waiting to be taken."""
    ready_bytes: int
    admitted_groups: int
    """All that count against the bound: in generation, ready, or taken and not released."""
    admitted_bytes: int
    """The same in bytes: real sizes where known, else the worst case."""
    oldest_age_s: float
    """How long the longest waiting ready group has waited; 0 if there is none."""
    full: Bound | None
    """The bound that keeps new groups out."""
    starved: bool
    """Whether the next batch cannot be taken yet."""


class ReadyQueue(Generic[T]):
    """Reservations from admission to release, and the ready groups among them."""

    def __init__(
        self,
        batch_groups: int,
        *,
        max_groups: int,
        max_bytes: int,
        group_bytes: int,
        in_admission_order: bool,
    ) -> None:
        """`group_bytes` is the worst case of one group. Raises ValueError below one batch."""
        if max_bytes < batch_groups * group_bytes:
            raise ValueError(
                f"a queue of {max_bytes} bytes may never hold a batch: {batch_groups} groups of "
                f"up to {group_bytes} bytes need {batch_groups * group_bytes}"
            )
        self._batch_groups = batch_groups
        self.set_max_groups(max_groups)
        self._max_bytes = max_bytes
        self._group_bytes = group_bytes
        self._in_admission_order = in_admission_order
        self._bytes: dict[int, int] = {}
        self._total_bytes = 0
        self._untaken: SortedDict[int, None] = SortedDict()
        self._ready: dict[int, QueueEntry[T]] = {}

    @property
    def max_groups(self) -> int:
        """The bound on groups."""
        return self._max_groups

    def set_max_groups(self, max_groups: int) -> None:
        """Change the bound on groups: it holds for admissions from now on, nothing is dropped.

        Raises ValueError below one batch.
        """
        if max_groups < self._batch_groups:
            raise ValueError(
                f"a queue of {max_groups} groups can never hold a batch of {self._batch_groups}"
            )
        self._max_groups = max_groups

    def __len__(self) -> int:
        return len(self._ready)

    def full(self) -> Bound | None:
        """The bound that keeps another group out, or None if there is room.

        The first batch always fits, so that groups above their worst case cannot stop a run.
        """
        admitted = len(self._bytes)
        if admitted < self._batch_groups:
            return None
        if admitted >= self._max_groups:
            return Bound.GROUPS
        return Bound.BYTES if self._total_bytes + self._group_bytes > self._max_bytes else None

    def reserve(self, group_id: int) -> None:
        """Reserve the worst case for a group that is being admitted. Raises QueueError if full."""
        if bound := self.full():
            raise QueueError(f"group {group_id} cannot be admitted: the queue is full in {bound}")
        self.take_back(group_id)

    def take_back(self, group_id: int) -> None:
        """Reserve the worst case for a group that was admitted before a restart: it always fits."""
        if group_id in self._bytes:
            raise QueueError(f"group {group_id} has a reservation already")
        self._untaken[group_id] = None
        self._set_bytes(group_id, self._group_bytes)

    def put(self, group_id: int, item: T, nbytes: int, now: float) -> None:
        """An admitted group is ready; its reservation settles to `nbytes`, whatever they are."""
        if group_id not in self._untaken:
            raise QueueError(f"group {group_id} is not expected: {self._where(group_id)}")
        if group_id in self._ready:
            raise QueueError(f"group {group_id} is ready already")
        self._set_bytes(group_id, nbytes)
        self._ready[group_id] = QueueEntry(group_id, item, nbytes, now)

    def withdraw(self, group_id: int) -> T:
        """A ready group's content is lost: it keeps its place, at its worst case again."""
        if group_id not in self._ready:
            raise QueueError(f"group {group_id} is not ready: {self._where(group_id)}")
        self._set_bytes(group_id, self._group_bytes)
        return self._ready.pop(group_id).item

    def release(self, group_id: int) -> None:
        """A group left (trained, dropped or failed): its bytes are free."""
        if group_id not in self._bytes:
            raise QueueError(f"group {group_id} has no reservation to release")
        self._ready.pop(group_id, None)
        self._untaken.pop(group_id, None)
        self._total_bytes -= self._bytes.pop(group_id)

    def ready(self) -> tuple[QueueEntry[T], ...]:
        """Ready groups, in the order in which they became ready."""
        return tuple(self._ready.values())

    def can_take(self) -> bool:
        """Whether a batch can be taken now."""
        if not self._in_admission_order:
            return len(self._ready) >= self._batch_groups
        first = list(islice(self._untaken, self._batch_groups))
        return len(first) == self._batch_groups and all(g in self._ready for g in first)

    def take(self) -> list[QueueEntry[T]]:
        """The next batch, or nothing. In admission order it waits for the first groups of it.

        Taken groups count against the bounds until they are released.
        """
        if not self.can_take():
            return []
        source = self._untaken if self._in_admission_order else self._ready
        batch = [self._ready.pop(g) for g in list(islice(source, self._batch_groups))]
        for entry in batch:
            del self._untaken[entry.group_id]
        return batch

    def stats(self, now: float) -> QueueStats:
        """Depth, bytes, age and what holds the queue up. `now` as in `put`; O(ready groups)."""
        oldest = next(iter(self._ready.values()), None)
        return QueueStats(
            ready_groups=len(self._ready),
            ready_bytes=sum(entry.nbytes for entry in self._ready.values()),
            admitted_groups=len(self._bytes),
            admitted_bytes=self._total_bytes,
            oldest_age_s=now - oldest.ready_at if oldest else 0.0,
            full=self.full(),
            starved=not self.can_take(),
        )

    def _set_bytes(self, group_id: int, nbytes: int) -> None:
        self._total_bytes += nbytes - self._bytes.get(group_id, 0)
        self._bytes[group_id] = nbytes

    def _where(self, group_id: int) -> str:
        if group_id in self._ready:
            return "it is ready"
        if group_id in self._untaken:
            return "it is still being generated"
        return "it was taken" if group_id in self._bytes else "it was never admitted or has left"
