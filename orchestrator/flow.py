"""The flow of groups from task to training: admission, ledger and queue moved as one.

Every event of a group's life passes through here, so that the three never disagree. Knows
neither Ray nor who generates, scores or trains; the loops ask it for leases and for batches, tell
it what happened, and wait for its signal.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from actors.trajectory import WeightLabel
from actors.worker import GroupReceipt
from learner.batch import StepRequest, StepResult
from learner.rewards import uninformative
from orchestrator.admission import Admission, StalePolicy, drops_group
from orchestrator.config import RunConfig
from orchestrator.cursor import TaskCursor
from orchestrator.errors import RunError
from orchestrator.history.ledger import Ledger, LiveGroup
from orchestrator.history.retention import Retention
from orchestrator.history.transitions import (
    Admitted,
    Dropped,
    Failed,
    Generated,
    GroupKey,
    GroupState,
    Journal,
    Ready,
    Retried,
    Stepped,
    Transition,
    Verified,
    consumed_batch,
)
from orchestrator.leases import Lease, new_lease
from orchestrator.patience import Patience
from orchestrator.queue import QueueStats, ReadyQueue
from orchestrator.schedule import Waves
from orchestrator.signal import Signal
from orchestrator.steering import Limits
from orchestrator.store import ReadyGroup
from orchestrator.tasks import Task

logger = logging.getLogger(__name__)


class Flow:
    """What is under way, and the learner's place in it."""

    def __init__(
        self,
        config: RunConfig,
        tasks: Sequence[Task],
        changed: Signal,
        journal: Journal | None = None,
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._journal = journal
        self._by_id = {task.task_id: task for task in tasks}
        self._policy = StalePolicy(config.queue.policy)
        self._cursor = TaskCursor(len(tasks), config.seed)
        self._admission = Admission(config.groups_per_batch, config.max_staleness)
        self._queue: ReadyQueue[ReadyGroup] = self._new_queue()
        self._retention = Retention()
        self._waves = self._new_waves()
        self.ledger = Ledger(journal)
        self._leases: dict[int, Lease] = {}
        self._patience = Patience(config.supervision.max_untrained_batches * self._batch_groups)
        self.changed = changed
        self.lineage = 0

    @property
    def step(self) -> int:
        """Batch steps done."""
        return self.ledger.step

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
        if self._waves is not None and worker_version != self._waves.version():
            return None
        group_id = self._admission.restart(worker_version)
        if group_id is not None:
            return self._leases[group_id]
        if self._enough_admitted() or self._queue.full() is not None:
            return None
        group_id = self._admission.admit(worker_version)
        if group_id is None:
            return None
        task = self._tasks[self._cursor.next()]
        self._queue.reserve(group_id)
        lease = self._leases[group_id] = new_lease(self._config, group_id, task)
        self._apply(Admitted(group_id, task.task_id, lease.samples))
        self.changed.notify()
        return lease

    @property
    def scheduled_version(self) -> int | None:
        """The version that workers have to serve now; None where they serve the newest."""
        return None if self._waves is None else self._waves.version()

    def _apply(self, *transitions: Transition) -> None:
        self.ledger.apply(*transitions)
        if self._waves is not None:
            for transition in transitions:
                self._waves.apply(transition)

    def _enough_admitted(self) -> bool:
        """Whether the remaining steps can consume all that is under way."""
        if self._waves is not None:
            return not self._waves.admits()
        return self._admission.live >= (self._config.steps - self.step) * self._batch_groups

    def generated(self, lease: Lease, receipt: GroupReceipt) -> None:
        """A worker completed the lease's samples."""
        self._apply(Generated(lease.group_id, lease.attempt, receipt.response_tokens))
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
            self._apply(Retried(lease.group_id, reason, detail, pardoned))
            self._admission.retry(lease.group_id)
            self._leases[lease.group_id] = replace(
                lease, attempt=lease.attempt + 1, pardoned=pardons
            )
            logger.info("group %d is tried again: %s (%s)", lease.group_id, reason, detail)
        else:
            self._apply(Failed(lease.group_id, reason, detail))
            self._leave(lease.group_id)
            logger.warning(
                "task %s failed after %d attempts: %s", lease.task.task_id, limit, detail
            )
            self._patience.left_untrained(f"task {lease.task.task_id} failed: {detail}")
        self.changed.notify()

    # Verification

    def verified(self, lease: Lease) -> None:
        """Every sample of the lease has a verdict."""
        self._apply(Verified(lease.group_id, lease.attempt))
        self.changed.notify()

    def ready(self, lease: Lease, group: ReadyGroup) -> None:
        """The store owns the group; it queues up unless it has nothing to teach."""
        self._retention.kept(lease.group_id, group.segment)
        if reason := uninformative(self._config.learner.objective, group.entry):
            self._drop(lease.group_id, reason)
        else:
            self._apply(Ready(lease.group_id, lease.attempt))
            self._queue.put(lease.group_id, group, group.nbytes, time.monotonic())
        self.changed.notify()

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

    def request(self, groups: Sequence[ReadyGroup]) -> StepRequest:
        """What the learner is asked to do with a batch."""
        return StepRequest(
            self.step,
            self.version,
            self._admission.max_staleness,
            self._config.steps,
            tuple(group.entry for group in groups),
        )

    def trained(self, groups: Sequence[ReadyGroup], result: StepResult) -> None:
        """The learner has consumed the batch; without new weights its groups leave as dropped."""
        attempts = {group.entry.group_id: group.attempt for group in groups}
        fates: Sequence[Transition]
        if result.changed:
            fates = consumed_batch(self.version + 1, attempts, result.fates)
        else:
            fates = [Dropped(group_id, "skipped_batch") for group_id in attempts]
        done = Stepped(
            self.step + 1,
            self.version + result.changed,
            self._admission.max_staleness,
            self._config.steps,
            tuple(attempts.items()),
        )
        self._apply(*fates, done)
        if result.changed:
            self._admission.consumed(attempts)
            self._patience.trained()
        for group_id in attempts:
            self._retention.left(group_id, self.step)
            if not result.changed:
                self._admission.leave(group_id)
            self._release(group_id)
        self.ledger.check()
        self.changed.notify()
        if not result.changed:
            self._patience.left_untrained("the last batch changed nothing", len(attempts))

    async def flush(self, *, durably: bool = False) -> None:
        """Return once all that happened so far would survive the end of this process; `durably`,
        that of the machine too."""
        if self._journal is not None:
            await self._journal.flush(durably=durably)

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
        self._apply(Dropped(group_id, reason))
        self._leave(group_id)
        # What a lowered bound makes too old says nothing about the tasks.
        if reason != "stale":
            self._patience.left_untrained(f"the last group left as {reason}")

    def _leave(self, group_id: int) -> None:
        self._admission.leave(group_id)
        self._retention.left(group_id, None)
        self._release(group_id)

    def _release(self, group_id: int) -> None:
        self._queue.release(group_id)
        del self._leases[group_id]

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

    def unneeded_segments(self, oldest_checkpoint: int) -> list[int]:
        """Segments of the trajectory log that only steps before this checkpoint used."""
        return self._retention.release(oldest_checkpoint)

    def replay(self, history: Iterable[Transition]) -> Ledger:
        """The ledger that a history leads to; `restore` takes it up. Slow for a long history."""
        self._waves, self._retention = self._new_waves(), Retention()

        def follow(transition: Transition) -> None:
            if self._waves is not None:
                self._waves.apply(transition)
            self._retention.apply(transition)

        return Ledger.replayed(history, self._journal, follow)

    def restore(
        self,
        ledger: Ledger,
        ready: Mapping[GroupKey, ReadyGroup],
        segments: Mapping[GroupKey, int],
        *,
        lineage: int,
    ) -> None:
        """Continue from a ledger that was replayed, as `lineage`. `ready` has the content of its
        ready groups, `segments` where the trajectory log has what it has; a ready group without
        content keeps its place and is generated once more.

        Raises RunError when the data no longer holds a task that was under way, and when content is
        missing that a schedule would have to generate with older weights.
        """
        self.ledger, self.lineage = ledger, lineage
        self._cursor = TaskCursor(len(self._tasks), self._config.seed, drawn=ledger.admitted)
        under_way = ledger.unfinished()
        self._admission = Admission(
            self._batch_groups,
            self._admission.max_staleness,
            version=ledger.version,
            next_group=ledger.next_group,
            live=under_way,
        )
        self._retention.found(segments)
        self._queue, self._leases = self._new_queue(), {}
        for group_id in under_way:
            group = ledger.group(group_id)
            assert group is not None
            self._take_back(group_id, group, ready.get((group_id, group.attempt)))
        self.changed.notify()

    def _take_back(self, group_id: int, group: LiveGroup, content: ReadyGroup | None) -> None:
        self._queue.take_back(group_id)
        task = self._task(group.task_id)
        lease = new_lease(self._config, group_id, task, group.attempt, group.pardoned)
        self._leases[group_id] = lease
        if content is not None:
            self._retention.kept(group_id, content.segment)
            self._queue.put(group_id, content, content.nbytes, time.monotonic())
            return
        if group.state is GroupState.READY and self._waves is not None:
            raise RunError(
                f"group {group_id} was ready and is not in the trajectory log any more. A "
                "deterministic run cannot generate it again with the weights it had then."
            )
        detail = f"its {group.state} content did not survive"
        self.attempt_failed(lease, "resumed", detail, pardoned=True)

    def _task(self, task_id: str) -> Task:
        try:
            return self._by_id[task_id]
        except KeyError:
            raise RunError(
                f"task {task_id!r} was under way and is no longer in the data. Resume with the "
                "same data."
            ) from None

    def _new_waves(self) -> Waves | None:
        config = self._config
        if not config.deterministic:
            return None
        return Waves(self._batch_groups, config.max_staleness, config.steps)

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
