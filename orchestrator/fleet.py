"""Fleets: creating, watching, replacing, scaling and closing the workers of one role.

A fleet knows how to spawn an actor and how to start it, both given from outside; it does not
know what the workers do. Work in flight belongs to whoever dispatched it: when a worker is lost
its calls raise, and the dispatcher gives the work back.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.exceptions import RayError

from orchestrator.calls import DeadlineExceeded, root_cause, within
from orchestrator.errors import RunError
from orchestrator.restarts import RestartBudget
from orchestrator.signal import Signal
from orchestrator.workers import LossReason, Worker, WorkerState

logger = logging.getLogger(__name__)

PING_PERIOD_S = 2.0
PING_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 5.0
UNLIMITED = 1 << 30


class StartFailed(RunError):
    """A worker did not come up."""

    def __init__(self, worker: Worker, message: str) -> None:
        super().__init__(message, culprit=worker.name)
        self.worker = worker


class Fleet:
    """The workers of one role: as many as `target` says.

    `spawn(name)` creates the actor; `start(actor)` awaits until it can work and returns its info;
    `release(name)` frees what spawning reserved beyond the actor itself. Of the workers that a
    live fleet lacks, `starts_at_once()` may be starting at one time.
    """

    def __init__(
        self,
        role: str,
        spawn: Callable[[str], Any],
        start: Callable[[Any], Awaitable[Any]],
        *,
        changed: Signal,
        tell: Callable[[str], None],
        release: Callable[[str], None] = lambda name: None,
        kill: Callable[[Any], None] = ray.kill,
        budget: RestartBudget,
        progress_timeout_s: float,
        drain_timeout_s: float,
        starts_at_once: Callable[[], int] = lambda: UNLIMITED,
    ) -> None:
        self.role = role
        self._spawn = spawn
        self._start = start
        self._changed = changed
        self._tell = tell
        self._release = release
        self._kill = kill
        self._budget = budget
        self._progress_timeout_s = progress_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._starts_at_once = starts_at_once
        self._losses: deque[tuple[Worker, str]] = deque()
        self._delayed: set[asyncio.Task] = set()
        self._starting: dict[str, asyncio.Task] = {}
        self._uneven = asyncio.Event()
        self._launched = False
        self._next_index = 0
        self.target = 0
        self.workers: dict[str, Worker] = {}
        self.restarts: Counter[LossReason] = Counter()
        """Replacements by what had happened."""
        self.on_ready: Callable[[Worker], None] = lambda worker: None

    def ready(self) -> list[Worker]:
        """Workers that take work, least loaded first."""
        able = [w for w in self.workers.values() if w.state is WorkerState.READY]
        return sorted(able, key=lambda w: w.in_flight)

    def count(self, state: WorkerState) -> int:
        """Number of workers in `state`."""
        return sum(w.state is state for w in self.workers.values())

    async def launch(self, count: int) -> None:
        """Start `count` workers at once; raises the first failure, which ends a run that begins."""
        self.target = count
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._launch_one())
        self._launched = True
        self._uneven.set()

    def set_target(self, target: int) -> None:
        """Have `target` workers from now on: new ones start at once, superfluous ones finish what
        they have and end. Returns at once."""
        self.target = target
        self._uneven.set()
        self._changed.notify()

    def report_lost(self, worker: Worker, reason: LossReason, cause: str) -> None:
        """Called by whoever sees a worker fail; idempotent, returns at once."""
        if worker.state is WorkerState.DEAD:
            return
        if worker.state is not WorkerState.DRAINING:
            self._losses.append((worker, f"{worker.name} died ({cause})"))
            self.restarts[reason] += 1
        self._say(f"{worker.name} is lost: {cause}")
        self._forget(worker)
        self._uneven.set()
        self._changed.notify()

    def quarantine(self, worker: Worker, cause: str) -> None:
        """Take a worker out of dispatch for good; ends the run when no other is left or coming. One
        that is leaving anyway is left to that."""
        if worker.state is not WorkerState.READY:
            return
        self._say(f"{worker.name} is quarantined: {cause}")
        worker.state = WorkerState.QUARANTINED
        if not self._any_left():
            raise RunError(
                f"{worker.name} was the last {self.role} worker and is quarantined: {cause}",
                culprit=worker.name,
            )
        self._changed.notify()

    def _any_left(self) -> bool:
        """Whether a worker can work, or one is coming."""
        able = (WorkerState.READY, WorkerState.STARTING)
        return bool(self._delayed) or any(w.state in able for w in self.workers.values())

    async def supervise(self) -> None:
        """Loop: ping every worker, replace lost ones, follow the target. Ends by RunError when no
        worker is left and none may be started."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ping_all(), name=f"{self.role} pings")
            while True:
                await self._uneven.wait()
                self._uneven.clear()
                self._even_out(group)

    def _even_out(self, group: asyncio.TaskGroup) -> None:
        """Bring workers that are there or coming to the target."""
        if not self._launched:
            return
        missing = self.target - self._here() - len(self._delayed)
        for _ in range(missing):
            delay_s = self._replacement_delay_s() if self._losses else 0.0
            task = group.create_task(self._launch_later(delay_s), name=f"{self.role} start")
            self._delayed.add(task)
            task.add_done_callback(self._delayed.discard)
        if missing > 0:
            return
        self._losses.clear()
        surplus = -missing
        for task in list(self._delayed)[:surplus]:
            self._delayed.discard(task)
            task.cancel()
            surplus -= 1
        for worker in self._dispensable()[:surplus]:
            group.create_task(self._drain(worker), name=f"drain {worker.name}")

    def _here(self) -> int:
        # A quarantined worker keeps its place: a replacement would read the same weights.
        leaving = (WorkerState.DRAINING, WorkerState.DEAD)
        staying = (w for w in self.workers.values() if not w.given_up)
        return sum(worker.state not in leaving for worker in staying)

    def _dispensable(self) -> list[Worker]:
        """Workers in the order in which they are given up: those that cannot work, those that do
        not work yet, the least loaded; of equals the newest."""
        order = (WorkerState.QUARANTINED, WorkerState.STARTING, WorkerState.READY)
        there = (w for w in reversed(self.workers.values()) if not w.given_up)
        able = [w for w in there if w.state in order]
        return sorted(able, key=lambda w: (order.index(w.state), w.in_flight))

    def _replacement_delay_s(self) -> float:
        worker, loss = self._losses.popleft()
        delay_s = self._budget.next_delay_s(time.monotonic())
        if delay_s is not None:
            return delay_s
        if not self._any_left():
            raise RunError(
                f"{loss} and the hourly budget of {self.role} restarts is spent. See its log in "
                "the run's logs folder; raise supervision.restarts_per_hour only if the deaths "
                "are expected.",
                culprit=worker.name,
            )
        delay_s = self._budget.reserve_s(time.monotonic())
        self._say(
            f"{loss} and the hourly budget of {self.role} restarts is spent: the run goes on with "
            f"{self._here()} of {self.target}, the next start is in {delay_s / 60:.0f} minutes"
        )
        return delay_s

    async def _launch_later(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        limit = self._starts_at_once()
        while self.count(WorkerState.STARTING) >= limit:
            await self._changed.wait()
        # From here on the worker itself counts as coming.
        self._delayed.discard(asyncio.current_task())
        try:
            await self._launch_one()
        except StartFailed as error:
            self._say(str(error))
            self.restarts[LossReason.START_FAILED] += 1
            self._losses.append((error.worker, str(error)))
            self._uneven.set()

    async def _launch_one(self) -> Worker:
        name = f"{self.role}-{self._next_index}"
        self._next_index += 1
        worker = Worker(name, self._spawn(name))
        self.workers[name] = worker
        start = self._starting[name] = asyncio.ensure_future(self._start(worker.actor))
        try:
            worker.info = await start
        except (RayError, RunError) as error:
            self._forget(worker)
            raise StartFailed(worker, f"{name} did not start: {root_cause(error)}") from error
        except asyncio.CancelledError:
            self._forget(worker)
            if worker.given_up:
                return worker
            raise
        finally:
            del self._starting[name]
            self._changed.notify()  # others may be waiting for their turn to start
        if worker.given_up:  # it came up in the very moment in which it was given up
            self._forget(worker)
            return worker
        worker.state = WorkerState.READY
        self._say(f"{name} is ready{_process(worker.info)}")
        worker.progress_changed_at = time.monotonic()
        self.on_ready(worker)
        self._changed.notify()
        return worker

    async def _drain(self, worker: Worker) -> None:
        """Let a worker finish what it has, then end it; past the limit its work goes back."""
        if start := self._starting.get(worker.name):
            worker.given_up = True
            start.cancel()
            self._say(f"{worker.name} is given up before it was ready")
            return
        worker.state = WorkerState.DRAINING
        self._say(f"{worker.name} is draining: {worker.in_flight} groups in flight")
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                while worker.in_flight and worker.state is WorkerState.DRAINING:
                    await self._changed.wait()
        except TimeoutError:
            worker.given_up = True
            self._say(
                f"{worker.name} did not finish {worker.in_flight} groups within "
                f"{self._drain_timeout_s:g} s: they are generated elsewhere"
            )
        if worker.state is WorkerState.DRAINING:
            await self._close(worker)
            self._say(f"{worker.name} has ended")
            self._changed.notify()

    async def _ping_all(self) -> None:
        while True:
            await asyncio.sleep(PING_PERIOD_S)
            working = (WorkerState.READY, WorkerState.DRAINING)
            watched = [w for w in self.workers.values() if w.state in working]
            await asyncio.gather(*(self._ping(worker) for worker in watched))

    async def _ping(self, worker: Worker) -> None:
        try:
            progress = await within(
                worker.actor.progress.remote(), PING_TIMEOUT_S, f"{worker.name} (health check)"
            )
        except DeadlineExceeded as error:
            self.report_lost(worker, LossReason.UNRESPONSIVE, root_cause(error))
            return
        except RayError as error:
            self.report_lost(worker, LossReason.DIED, root_cause(error))
            return
        now = time.monotonic()
        paused = getattr(progress, "paused", False)
        if progress != worker.progress and worker.in_flight:
            self._changed.notify()
        if progress != worker.progress or not worker.in_flight or paused:
            worker.progress, worker.progress_changed_at = progress, now
        elif now - worker.progress_changed_at > self._progress_timeout_s:
            self.report_lost(
                worker,
                LossReason.NO_PROGRESS,
                f"{worker.in_flight} groups in flight and no progress "
                f"for {self._progress_timeout_s:.0f} s",
            )

    def _say(self, text: str) -> None:
        logger.info(text)
        self._tell(text)

    def _forget(self, worker: Worker) -> None:
        worker.state = WorkerState.DEAD
        self.workers.pop(worker.name, None)
        with contextlib.suppress(RayError):
            self._kill(worker.actor)
        self._release(worker.name)

    async def close(self) -> None:
        """Let every worker close itself, then kill what did not."""
        workers = list(self.workers.values())
        await asyncio.gather(*(self._close(worker) for worker in workers))

    async def _close(self, worker: Worker) -> None:
        with contextlib.suppress(RayError, DeadlineExceeded):
            await within(worker.actor.close.remote(), CLOSE_TIMEOUT_S, f"{worker.name} (close)")
        if worker.state is not WorkerState.DEAD:
            self._forget(worker)


def _process(info: Any) -> str:
    pid = getattr(info, "pid", None)
    return f" (pid {pid})" if pid else ""
