"""The flow of groups from task to training: admission, ledger and queue moved as one.

Every event of a group's life passes through here, so that the three never disagree. Knows
neither Ray nor who generates, scores or trains; the loops ask it for leases and for batches, tell
it what happened, and wait for its signal.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from actors.trajectory import WeightLabel
from actors.worker import GroupReceipt
from learner.batch import StepResult
from learner.rewards import zero_variance
from orchestrator.admission import Admission, StalePolicy, drops_group
from orchestrator.config import RunConfig
from orchestrator.cursor import TaskCursor
from orchestrator.errors import RunError
from orchestrator.ledger import Ledger
from orchestrator.queue import QueueStats, ReadyQueue
from orchestrator.signal import Signal
from orchestrator.steering import Limits
from orchestrator.store import ReadyGroup
from orchestrator.tasks import Task
from orchestrator.transitions import (
    Admitted,
    Dropped,
    Failed,
    Generated,
    Ready,
    Retried,
    Verified,
    consumed_batch,
)

logger = logging.getLogger(__name__)

SEED_STRIDE = 1 << 32


@dataclass(frozen=True, slots=True)
class Lease:
    """The right and duty to generate one attempt of a group."""

    group_id: int
    """Also the group's place in the admission order."""
    attempt: int
    task: Task
    samples: int
    seed: int | None
    """The same for every attempt, so that a retry draws the same samples."""
    pardoned: int = 0
    """Of the attempts before this one, those that do not count against the limit."""


class Flow:
    """What is under way, and the learner's place in it."""

    def __init__(self, config: RunConfig, tasks: Sequence[Task], changed: Signal) -> None:
        self._config = config
        self._tasks = tasks
        self._by_id = {task.task_id: task for task in tasks}
        self._policy = StalePolicy(config.queue.policy)
        self._cursor = TaskCursor(len(tasks), config.seed)
        self._admission = Admission(config.groups_per_batch, config.max_staleness)
        self._queue: ReadyQueue[ReadyGroup] = self._new_queue()
        self.ledger = Ledger()
        self._leases: dict[int, Lease] = {}
        self._readmit: deque[Task] = deque()
        self._left_untrained = 0
        self.changed = changed
        self.step = 0
        self.lineage = 0

    @property
    def version(self) -> int:
        """The learner's version."""
        return self._admission.version

    @property
    def label(self) -> WeightLabel:
        """Label of the learner's current weights."""
        return WeightLabel(self.lineage, self.version)

    # Generation

    def next_lease(self, worker_version: int) -> Lease | None:
        """The next group that a worker serving this version may start; None while it must wait."""
        group_id = self._admission.restart(worker_version)
        if group_id is not None:
            return self._leases[group_id]
        if self._enough_admitted() or self._queue.full() is not None:
            return None
        group_id = self._admission.admit(worker_version)
        if group_id is None:
            return None
        task = self._readmit.popleft() if self._readmit else self._tasks[self._cursor.next()]
        self._queue.reserve(group_id)
        rollout = self._config.rollout
        seed = None
        if rollout.seeded:
            # Sample i of a group draws from seed + i: groups must not share seeds.
            seed = self._config.seed * SEED_STRIDE + group_id * rollout.samples_per_group
        lease = Lease(group_id, 0, task, rollout.samples_per_group, seed)
        self._leases[group_id] = lease
        self.ledger.apply(Admitted(group_id, task.task_id, lease.samples))
        self.changed.notify()
        return lease

    def _enough_admitted(self) -> bool:
        """Whether the remaining steps can consume all that is under way."""
        return self._admission.live >= (self._config.steps - self.step) * self._batch_groups

    def generated(self, lease: Lease, receipt: GroupReceipt) -> None:
        """A worker completed the lease's samples."""
        self.ledger.apply(Generated(lease.group_id, lease.attempt, receipt.response_tokens))
        self.changed.notify()

    def attempt_failed(
        self, lease: Lease, reason: str, detail: str, *, pardoned: bool = False
    ) -> None:
        """The attempt is lost: the group waits for another one, or fails after its last.

        `reason` is a short code such as `worker_lost`, `detail` free text. A pardoned attempt was
        ended on purpose and does not count.
        """
        limit = self._config.supervision.attempts
        pardons = lease.pardoned + pardoned
        if lease.attempt + 1 - pardons < limit:
            self.ledger.apply(Retried(lease.group_id, reason, detail))
            self._admission.retry(lease.group_id)
            self._leases[lease.group_id] = Lease(
                lease.group_id, lease.attempt + 1, lease.task, lease.samples, lease.seed, pardons
            )
            logger.info("group %d is tried again: %s (%s)", lease.group_id, reason, detail)
        else:
            self.ledger.apply(Failed(lease.group_id, reason, detail))
            self._leave(lease.group_id)
            logger.warning(
                "task %s failed after %d attempts: %s", lease.task.task_id, limit, detail
            )
            self._count_untrained(f"task {lease.task.task_id} failed: {detail}")
        self.changed.notify()

    # Verification

    def verified(self, lease: Lease) -> None:
        """Every sample of the lease has a verdict."""
        self.ledger.apply(Verified(lease.group_id, lease.attempt))
        self.changed.notify()

    def ready(self, lease: Lease, group: ReadyGroup) -> None:
        """The store owns the group; it queues up unless it has nothing to teach."""
        self.ledger.apply(Ready(lease.group_id, lease.attempt))
        reason = self._uninformative(group)
        if reason:
            self._drop(lease.group_id, reason)
        else:
            self._queue.put(lease.group_id, group, group.nbytes, time.monotonic())
        self.changed.notify()

    def _uninformative(self, group: ReadyGroup) -> str:
        """Why the group cannot contribute to a step; empty if it can."""
        objective = self._config.learner.objective
        entry = group.entry
        needed = 2 if objective.advantage.per_group else 1
        if sum(entry.ok) < needed:
            return "unscored"
        if objective.dynamic_sampling and zero_variance(entry.outcomes, entry.rewards):
            return "zero_variance"
        return ""

    # Training

    async def next_batch(self, until: Callable[[], bool]) -> list[ReadyGroup] | None:
        """The groups of the next step as soon as there are enough; None once `until()` holds.

        Raises RunError when groups keep leaving and none of them can be trained.
        """
        while not until():
            if self._drop_stale():
                self.changed.notify()  # their places are free: generation has to know
                continue
            if entries := self._queue.take():
                return [entry.item for entry in entries]
            await self.changed.wait()
        return None

    def trained(self, groups: Sequence[ReadyGroup], result: StepResult) -> None:
        """The learner has consumed the batch; without new weights its groups leave as dropped."""
        attempts = {group.entry.group_id: group.attempt for group in groups}
        if result.changed:
            self.ledger.apply(*consumed_batch(self.version + 1, attempts, result.fates))
            self._admission.consumed(attempts)
            self._left_untrained = 0
            for group_id in attempts:
                self._release(group_id)
        else:
            for group_id in attempts:
                self._drop(group_id, "skipped_batch")
        self.step += 1
        self.ledger.check()
        self.changed.notify()

    def _drop_stale(self) -> bool:
        """Drop ready groups that the policy refuses; whether there were any."""
        dropped = False
        for entry in self._queue.ready():
            if drops_group(
                self._policy,
                entry.item.oldest_version,
                self.version,
                self._admission.max_staleness,
            ):
                self._drop(entry.group_id, "stale")
                dropped = True
        return dropped

    # Bounds

    @property
    def limits(self) -> Limits:
        """The bounds that hold now."""
        return Limits(
            max_staleness=self._admission.max_staleness, max_groups=self._queue.max_groups
        )

    def set_limits(self, *, max_staleness: int | None, max_groups: int | None) -> Limits:
        """Change bounds for what is admitted and consumed from now on; None leaves one as it is.

        A bound on groups that was what the staleness bound can use follows it. Raises ValueError.
        """
        before = self.limits
        if max_staleness is None:
            max_staleness = before.max_staleness
        if max_groups is None:
            implied = before.max_groups == (1 + before.max_staleness) * self._batch_groups
            max_groups = (1 + max_staleness) * self._batch_groups if implied else before.max_groups
        self._queue.set_max_groups(max_groups)
        self._admission.set_max_staleness(max_staleness)
        self.changed.notify()
        return self.limits

    # Leaving

    def _drop(self, group_id: int, reason: str) -> None:
        self.ledger.apply(Dropped(group_id, reason))
        self._leave(group_id)
        # What a lowered bound makes too old says nothing about the tasks.
        if reason != "stale":
            self._count_untrained(f"the last group left as {reason}")

    def _leave(self, group_id: int) -> None:
        self._admission.leave(group_id)
        self._release(group_id)

    def _release(self, group_id: int) -> None:
        self._queue.release(group_id)
        del self._leases[group_id]

    def _count_untrained(self, last: str) -> None:
        self._left_untrained += 1
        limit = self._config.supervision.max_untrained_batches * self._batch_groups
        if self._left_untrained >= limit:
            raise RunError(
                f"{limit} groups in a row left without training anything; {last}. "
                "With dynamic sampling this means that the model solves all or none of the "
                "tasks: choose easier or harder ones. The ledger's counts: "
                f"{self.ledger.report().samples.as_dict()}"
            )

    # Views and state

    @property
    def _batch_groups(self) -> int:
        return self._config.groups_per_batch

    @property
    def under_way(self) -> int:
        """Groups that were admitted and have not left."""
        return self._admission.live

    @property
    def waiting(self) -> int:
        """Groups under way whose attempt was lost and that no worker has started again."""
        return len(self._admission.waiting)

    def queue_stats(self) -> QueueStats:
        """Depth, bytes and bounds of the queue now."""
        return self._queue.stats(time.monotonic())

    def admission_blocked(self, worker_version: int) -> bool:
        """Whether the staleness bound or the queue keeps a worker of this version from starting a
        new group."""
        full = self._queue.full() is not None
        return not self._enough_admitted() and (
            full or not self._admission.headroom(worker_version)
        )

    def describe(self) -> str:
        """Where groups are, in one line."""
        stats = self.queue_stats()
        return (
            f"step {self.step}, version {self.version}, {stats.ready_groups} groups ready of "
            f"{self._batch_groups} for a batch, {self._admission.live} under way, "
            f"{len(self._admission.waiting)} waiting to be tried again"
        )

    def state(self) -> dict[str, Any]:
        """JSON form for a checkpoint."""
        return {
            "step": self.step,
            "version": self.version,
            "cursor": self._cursor.state(),
            "ledger": self.ledger.snapshot(),
            "readmit": [task.task_id for task in self._readmit],
        }

    def restore(self, state: dict[str, Any], *, lineage: int) -> None:
        """Continue from `state` as `lineage`; tasks that were under way are admitted anew.

        Raises RunError when the data no longer holds a task that was under way.
        """
        self.ledger = Ledger.restore(state["ledger"])
        under_way = self.ledger.give_back(self.ledger.unfinished(), "resumed")
        try:
            self._readmit = deque(self._by_id[t] for t in [*under_way, *state["readmit"]])
            self._cursor = TaskCursor.from_state(state["cursor"], len(self._tasks))
        except (KeyError, ValueError) as error:
            raise RunError(
                f"the data is not the checkpoint's: {error}. Resume with the same data."
            ) from error
        self._admission = Admission(
            self._batch_groups,
            self._config.max_staleness,
            version=state["version"],
            next_group=self.ledger.next_group,
        )
        self._queue = self._new_queue()
        self._leases = {}
        self.step = state["step"]
        self.lineage = lineage
        self.changed.notify()

    def _new_queue(self) -> ReadyQueue[ReadyGroup]:
        queue = self._config.queue
        longest = max(len(task.prompt_ids) for task in self._tasks)
        return ReadyQueue(
            self._batch_groups,
            max_groups=queue.max_groups or self._batch_groups,
            max_bytes=queue.max_bytes,
            group_bytes=self._config.worst_group_bytes(longest),
            in_admission_order=self._policy.in_admission_order,
        )
