"""The learner as the driver sees it: a group of rank actors that act as one.

Every call has a deadline. A rank that dies or falls silent ends the group: the others are killed
too, since they cannot go on without it, and the caller gets `LearnerDied`.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from ray.exceptions import RayActorError, RayTaskError

from learner.batch import StepRequest, StepResult
from learner.messages import LearnerSpec, LearnerState, ProbeRequest, Publication

_LOOPBACK = "127.0.0.1"
_LOST_COLLECTIVE = ("gloo", "nccl", "connection", "another learner rank")
_WATCH_PERIOD_S = 2.0
_GRACE_S = 5.0
"""How long after a first failure the other ranks get to report theirs, to find the culprit."""


class LearnerDied(RuntimeError):
    """Rank `rank` died or did not answer; the whole group is gone. `cause` says how."""

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(rank, cause)
        self.rank = rank
        self.cause = cause

    def __str__(self) -> str:
        return f"learner rank {self.rank} died: {self.cause}"


@dataclass(frozen=True)
class RankInfo:
    """The process that a rank is."""

    rank: int
    pid: int
    node_id: str
    node_ip: str


class _RankActor:
    """A rank whose references are Ray's. The driver never imports what a rank imports."""

    def __init__(
        self, spec: LearnerSpec, rank: int, world: int, redirect: Callable[[str], None] | None
    ) -> None:
        if redirect is not None and spec.logs is not None and Path(spec.logs).is_dir():
            redirect(f"{spec.logs}/learner-{rank}.log")
        from learner.rank import LearnerRank

        self._place = rank
        self._rank = LearnerRank(spec, rank, world, fetch=lambda refs: ray.get(list(refs)))

    def info(self) -> RankInfo:
        node = ray.get_runtime_context().get_node_id()
        ip = ray.util.get_node_ip_address()
        return RankInfo(self._place, os.getpid(), node, ip)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._rank, name)(*args, **kwargs)

    @ray.method(num_returns="streaming")
    def publish(
        self, label: str, probe: ProbeRequest | None, version: int | None
    ) -> Iterator[np.ndarray | Publication]:
        yield from self._rank.publish(label, probe, version)


class LearnerGroup:
    """The ranks of one learner. Not for concurrent calls: each waits for the one before it."""

    def __init__(self, spec: LearnerSpec, redirect: Callable[[str], None] | None = None) -> None:
        """`redirect(path)` sends what the calling process prints to a file; see `spec.logs`."""
        self._spec = spec
        self._redirect = redirect
        self._config = spec.config
        self._actors: list[Any] = []
        self._infos: list[RankInfo] = []
        self._node_id = ""
        self._failure: LearnerDied | None = None
        self._turn = asyncio.Lock()

    @property
    def infos(self) -> Sequence[RankInfo]:
        """The rank processes; empty before `start`."""
        return self._infos

    async def start(self) -> None:
        """Create the ranks and load the model. ModelError when it does not load, LearnerDied when
        a rank does not come up in time."""
        try:
            await self._start()
        except BaseException:
            self._kill()
            raise

    async def _start(self) -> None:
        config = self._config
        options = {
            "num_cpus": config.cpus,
            "num_gpus": config.gpus,
            "resources": config.resources,
            "max_restarts": 0,
        }
        actor = ray.remote(_RankActor).options(**options)
        world = config.ranks
        self._actors = [
            actor.remote(self._spec, rank, world, self._redirect) for rank in range(world)
        ]
        timeout_s = config.start_timeout_s
        infos = [_result(actor.info.remote()) for actor in self._actors]
        self._infos = await self._settle("info", infos, timeout_s)
        self._node_id = ray.get_runtime_context().get_node_id()
        alone = len({info.node_id for info in self._infos}) == 1
        ips = [_LOOPBACK if alone else info.node_ip for info in self._infos]
        first = self._actors[0]
        [address] = await self._settle(
            "open_meeting", [_result(first.call.remote("open_meeting", ips[0]))], timeout_s
        )
        pending = [
            _result(actor.call.remote("start", address, ip))
            for actor, ip in zip(self._actors, ips, strict=True)
        ]
        await self._settle("start", pending, timeout_s)

    async def step(self, request: StepRequest) -> StepResult:
        """One batch step, with the fates of all samples. TrajectoryError or ValueError on rows
        that cannot be used, after which the group is as it was before."""
        results = await self._call("step", request, timeout_s=self._config.step_timeout_s)
        fates = tuple(fate for result in results for fate in result.fates)
        return replace(results[0], fates=fates)

    async def publish(
        self, label: str, probe: ProbeRequest | None = None, version: int | None = None
    ) -> tuple[Publication, list[ray.ObjectRef]]:
        """The weights of `version`, by default the current ones: their description, and one
        reference per chunk (uint8 array), owned by the calling process."""
        async with self._turn:
            pending = [
                _collect(actor.publish.remote(label, probe, version)) for actor in self._actors
            ]
            collected = await self._settle("publish", pending, self._config.step_timeout_s)
        *chunks, last = collected[0]
        return await last, chunks

    async def score(
        self, refs: Sequence[Any], version: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `LearnerRank.score`."""
        timeout_s = self._config.step_timeout_s
        results = await self._call("score", list(refs), version, timeout_s=timeout_s)
        return results[0]

    async def save(self, folder: str, *, keep: int, export: bool = True) -> None:
        """Write and commit checkpoint `folder` (named step_N, visible to all ranks), keep the
        `keep` newest beside it. NotWritten where that fails."""
        await self._call(
            "save", folder, keep=keep, export=export, timeout_s=self._config.save_timeout_s
        )

    async def load(self, folder: str) -> LearnerState:
        """Continue from a complete checkpoint; CheckpointError if it is none."""
        states = await self._call("load", folder, timeout_s=self._config.step_timeout_s)
        return states[0]

    async def export(self, folder: str) -> None:
        """Write the current weights as a Hugging Face folder; it must not exist."""
        await self._call("export", folder, timeout_s=self._config.step_timeout_s)

    async def watch(self) -> None:
        """Loop until the group has ended or a rank process on this node is gone, then raise
        LearnerDied: a rank may die while nobody waits for it. Ranks on other nodes are noticed at
        the next call."""
        while True:
            await asyncio.sleep(_WATCH_PERIOD_S)
            if self._failure is not None:
                raise self._failure
            for info in self._infos:
                if info.node_id == self._node_id and not _runs(info.pid):
                    raise self._ended(info.rank, f"its process {info.pid} is gone")

    async def close(self) -> None:
        """End the rank processes; Ray's own way first, which it does not report as a death."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        processes = []
        for pid in self._local_pids():
            with contextlib.suppress(psutil.NoSuchProcess):
                processes.append(psutil.Process(pid))
        await asyncio.to_thread(psutil.wait_procs, processes, _GRACE_S)
        self._kill()

    async def _call(self, name: str, *args: Any, timeout_s: float, **kwargs: Any) -> list[Any]:
        async with self._turn:
            pending = [_result(actor.call.remote(name, *args, **kwargs)) for actor in self._actors]
            return await self._settle(name, pending, timeout_s)

    async def _settle(
        self, name: str, pending: Sequence[Awaitable[Any]], timeout_s: float
    ) -> list[Any]:
        """Results by rank, or the error that explains why there are none."""
        tasks = [asyncio.ensure_future(awaitable) for awaitable in pending]
        try:
            if self._failure is not None:
                raise self._failure
            if not tasks:
                raise RuntimeError("the learner group is not running")
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.done() and task.exception() for task in tasks):
                await asyncio.wait(tasks, timeout=_GRACE_S)
            elif silent := [rank for rank, task in enumerate(tasks) if not task.done()]:
                raise self._ended(silent[0], f"no answer to {name!r} within {timeout_s:g} s")
            self._raise_cause(tasks)
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _raise_cause(self, tasks: Sequence[asyncio.Future[Any]]) -> None:
        """Raise what explains failed tasks best: a death, an error of a rank's own, a rank that is
        silent, and only then a failed collective. A ValueError with all ranks answering leaves
        them in step, so it does not end the group."""
        errors = {
            rank: error
            for rank, task in enumerate(tasks)
            if task.done() and (error := task.exception()) is not None
        }
        if not errors:
            return
        for rank, error in errors.items():
            if isinstance(error, RayActorError):
                raise self._ended(rank, str(error).strip()) from error
        causes = {rank: _cause(error) for rank, error in errors.items()}
        stuck = [rank for rank, task in enumerate(tasks) if not task.done()]
        culprits = [rank for rank in errors if not _is_lost_collective(causes[rank])]
        if culprits and not stuck and isinstance(causes[culprits[0]], ValueError):
            raise causes[culprits[0]] from errors[culprits[0]]
        rank = (culprits or stuck or list(errors))[0]
        witness = rank if rank in errors else next(iter(errors))
        cause = f"{type(causes[witness]).__name__}: {causes[witness]}"
        if witness != rank:
            cause = f"it stopped answering, and rank {witness} saw {cause}"
        raise self._ended(rank, cause) from errors[witness]

    def _ended(self, rank: int, cause: str) -> LearnerDied:
        self._failure = LearnerDied(rank, cause)
        self._kill()
        return self._failure

    def _kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        for pid in self._local_pids():
            # Ray's own kill leaves a stopped process alive.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._actors, self._infos = [], []

    def _local_pids(self) -> list[int]:
        # A host name is no proof: containers on several machines may share one.
        return [info.pid for info in self._infos if info.node_id == self._node_id]


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _cause(error: BaseException) -> BaseException:
    return error.cause if isinstance(error, RayTaskError) else error


def _is_lost_collective(cause: BaseException) -> bool:
    """Whether this is what a rank reports when another one has left it alone."""
    text = f"{type(cause).__name__} {cause}".lower()
    return isinstance(cause, RuntimeError) and any(sign in text for sign in _LOST_COLLECTIVE)


async def _result(ref: ray.ObjectRef) -> Any:
    return await ref


async def _collect(generator: Any) -> list[ray.ObjectRef]:
    refs = [ref async for ref in generator]
    await generator.completed()
    return refs
