"""Fleets: creating, watching, replacing and closing the workers of one role.

A fleet knows how to spawn an actor and how to start it, both given from outside; it does not
know what the workers do. Work in flight belongs to whoever dispatched it: when a worker is lost
its calls raise, and the dispatcher gives the work back.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from orchestrator.calls import DeadlineExceeded, plain, within
from orchestrator.errors import RunError
from orchestrator.signal import Signal

logger = logging.getLogger(__name__)

PING_PERIOD_S = 2.0
PING_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 5.0


class WorkerState(StrEnum):
    """Lifecycle of one worker as its fleet sees it."""

    STARTING = "starting"
    READY = "ready"
    QUARANTINED = "quarantined"
    DEAD = "dead"


@dataclass(eq=False, slots=True)
class Worker:
    """One actor process of a role; `info` is what its start call returned."""

    name: str
    actor: Any
    state: WorkerState = WorkerState.STARTING
    info: Any = None
    in_flight: int = 0
    """Groups dispatched to it and not yet returned."""
    progress: Any = None
    """Last answer of its `progress` call."""
    progress_changed_at: float = field(default_factory=time.monotonic)


class RestartBudget:
    """Exponential back-off and an hourly limit on replacements; pure, clock given by the caller."""

    def __init__(
        self, per_hour: int, first_delay_s: float = 1.0, max_delay_s: float = 60.0
    ) -> None:
        self._per_hour = per_hour
        self._first_delay_s = first_delay_s
        self._max_delay_s = max_delay_s
        self._recent: deque[float] = deque()

    def next_delay_s(self, now_s: float) -> float | None:
        """Seconds to wait before the next replacement; None when the hour's budget is spent."""
        while self._recent and now_s - self._recent[0] > 3600.0:
            self._recent.popleft()
        if len(self._recent) >= self._per_hour:
            return None
        delay = min(self._first_delay_s * 2 ** len(self._recent), self._max_delay_s)
        self._recent.append(now_s)
        return delay


class Fleet:
    """The workers of one role.

    `spawn(name)` creates the actor; `start(actor)` awaits until it can work and returns its info;
    `release(name)` frees what spawning reserved beyond the actor itself.
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
        restarts_per_hour: int,
        progress_timeout_s: float,
    ) -> None:
        self.role = role
        self._spawn = spawn
        self._start = start
        self._changed = changed
        self._tell = tell
        self._release = release
        self._budget = RestartBudget(restarts_per_hour)
        self._progress_timeout_s = progress_timeout_s
        self._lost: asyncio.Queue[tuple[Worker, str]] = asyncio.Queue()
        self._next_index = 0
        self.workers: dict[str, Worker] = {}
        self.restarts = 0
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
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._launch_one())

    async def _launch_one(self) -> Worker:
        name = f"{self.role}-{self._next_index}"
        self._next_index += 1
        worker = Worker(name, self._spawn(name))
        self.workers[name] = worker
        try:
            worker.info = await self._start(worker.actor)
        except (RayError, RunError) as error:
            self._forget(worker)
            raise RunError(f"{name} did not start: {root_cause(error)}") from error
        worker.state = WorkerState.READY
        self._say(f"{name} is ready{_process(worker.info)}")
        worker.progress_changed_at = time.monotonic()
        self.on_ready(worker)
        self._changed.notify()
        return worker

    def report_lost(self, worker: Worker, cause: str) -> None:
        """Called by whoever sees a worker fail; idempotent, returns at once."""
        if worker.state is WorkerState.DEAD:
            return
        self._say(f"{worker.name} is lost: {cause}")
        self._forget(worker)
        self._lost.put_nowait((worker, cause))
        self._changed.notify()

    def quarantine(self, worker: Worker, cause: str) -> None:
        """Take a worker out of dispatch for good; ends the run when no other is left."""
        self._say(f"{worker.name} is quarantined: {cause}")
        worker.state = WorkerState.QUARANTINED
        if not self.count(WorkerState.READY) and not self.count(WorkerState.STARTING):
            raise RunError(
                f"{worker.name} was the last {self.role} worker and is quarantined: {cause}"
            )
        self._changed.notify()

    async def supervise(self) -> None:
        """Loop: ping every worker, replace the lost ones. Ends by RunError when that fails."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ping_all(), name=f"{self.role} pings")
            while True:
                worker, cause = await self._lost.get()
                delay_s = self._budget.next_delay_s(time.monotonic())
                if delay_s is None:
                    raise RunError(
                        f"{worker.name} died ({cause}) and the hourly budget of {self.role} "
                        "restarts is spent. See its log in the run's logs folder; raise "
                        "supervision.restarts_per_hour only if the deaths are expected."
                    )
                group.create_task(self._replace(worker, delay_s), name=f"replace {worker.name}")

    async def _replace(self, worker: Worker, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        self.restarts += 1
        try:
            await self._launch_one()
        except RunError as error:
            self._lost.put_nowait((worker, str(error)))

    async def _ping_all(self) -> None:
        while True:
            await asyncio.sleep(PING_PERIOD_S)
            await asyncio.gather(*(self._ping(worker) for worker in self.ready()))

    async def _ping(self, worker: Worker) -> None:
        try:
            progress = await within(
                worker.actor.progress.remote(), PING_TIMEOUT_S, f"{worker.name} (health check)"
            )
        except (RayError, DeadlineExceeded) as error:
            self.report_lost(worker, root_cause(error))
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
            ray.kill(worker.actor)
        self._release(worker.name)

    async def close(self) -> None:
        """Let every worker close itself, then kill what did not."""
        workers = list(self.workers.values())
        await asyncio.gather(*(self._close(worker) for worker in workers))

    async def _close(self, worker: Worker) -> None:
        with contextlib.suppress(RayError, DeadlineExceeded):
            await within(worker.actor.close.remote(), CLOSE_TIMEOUT_S, f"{worker.name} (close)")
        self._forget(worker)


def _process(info: Any) -> str:
    pid = getattr(info, "pid", None)
    return f" (pid {pid})" if pid else ""


def root_cause(error: BaseException) -> str:
    """One or two sentences that say why a remote call failed, without Ray's wrapping."""
    inner = error.cause if isinstance(error, RayTaskError) else error
    text = plain(str(inner))
    if isinstance(inner, RunError | RayActorError) and text:
        return text
    return f"{type(inner).__name__}: {text}"
