"""Child processes that score completions and can be killed.

The parent holds the deadline of each completion and enforces it with SIGKILL on the child's
process group; a child that overruns or dies costs the completion it was at, is replaced, and the
rest of its batch goes on in the replacement. Children are started with a clean interpreter
(no fork of the caller's threads), so a pool is safe inside a Ray actor.

A child bounds time and memory. It is no sandbox: verifier code in it can do what its user can.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from verifiers.process import ChildLost, ChildProcess
from verifiers.registry import Verifier
from verifiers.scoring import overrun
from verifiers.verdict import Question, Verdict, VerdictStatus
from verifiers.wire import decode_verdict

logger = logging.getLogger(__name__)


class PoolClosed(RuntimeError):
    """The pool was closed, or never started, while verdicts were wanted of it."""


class _Job:
    """Completions of one question, scored in order by one child at a time."""

    def __init__(self, verifier: Verifier, question: Question, completions: Sequence[str]) -> None:
        self.verifier = verifier
        self.question = question
        self.completions = list(completions)
        self.verdicts: list[Verdict] = []
        self.second_try = False
        self.done: asyncio.Future[list[Verdict]] = asyncio.get_running_loop().create_future()

    @property
    def rest(self) -> list[str]:
        return self.completions[len(self.verdicts) :]

    def blame_next(self, status: VerdictStatus, detail: str, seconds: float) -> None:
        """Give the completion that was being scored, or the whole group, this failure."""
        count = len(self.rest) if self.verifier.per_group else 1
        self.verdicts += [Verdict.failed(status, detail, seconds / count)] * count

    def blame_rest(self, status: VerdictStatus, detail: str) -> None:
        self.verdicts += [Verdict.failed(status, detail)] * len(self.rest)


class KillablePool:
    """Scores batches in child processes; a hang or a crash becomes a status, never an exception.

    `deadline_s` is wall time per completion (a per-group call gets that much for each of its
    completions), `memory_limit_bytes` the address space that a child may add to what it holds at
    its start, `start_timeout_s` bounds both a child's start and the loading of a verifier in it.
    The event loop that starts the pool has to live in a thread that outlives it: Linux kills the
    children when that thread ends.
    """

    def __init__(
        self,
        processes: int,
        deadline_s: float,
        memory_limit_bytes: int,
        start_timeout_s: float = 120.0,
    ) -> None:
        self._processes = processes
        self._deadline_s = deadline_s
        self._memory_limit_bytes = memory_limit_bytes
        self._start_timeout_s = start_timeout_s
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._open: set[_Job] = set()
        self._children: list[ChildProcess | None] = [None] * processes
        self._slots: list[asyncio.Task[None]] = []

    @property
    def pids(self) -> list[int]:
        """Process ids of the children alive now."""
        return [child.pid for child in self._children if child is not None and child.alive]

    async def start(self) -> None:
        """Start all children at once. Raises ChildLost if one does not come up."""
        try:
            async with asyncio.TaskGroup() as starting:
                for slot in range(self._processes):
                    starting.create_task(self._replace(slot))
        except* ChildLost as group:
            await self.close()
            raise group.exceptions[0] from None
        self._slots = [
            asyncio.create_task(self._serve(slot), name=f"verifier-slot-{slot}")
            for slot in range(self._processes)
        ]

    async def score(
        self, verifier: Verifier, question: Question, completions: Sequence[str]
    ) -> list[Verdict]:
        """One verdict for each completion, in order. Raises PoolClosed."""
        if not self._slots:
            raise PoolClosed("the verifier pool is not running")
        share = len(completions) if verifier.per_group else -(-len(completions) // self._processes)
        jobs = [
            _Job(verifier, question, completions[first : first + share])
            for first in range(0, len(completions), max(share, 1))
        ]
        self._open.update(jobs)
        try:
            for job in jobs:
                self._jobs.put_nowait(job)
            scored = await asyncio.gather(*(job.done for job in jobs))
        finally:
            self._open.difference_update(jobs)
        return [verdict for verdicts in scored for verdict in verdicts]

    async def close(self) -> None:
        """Kill and reap all children; verdicts still wanted end in PoolClosed."""
        slots, self._slots = self._slots, []
        for slot in slots:
            slot.cancel()
        await asyncio.gather(*slots, return_exceptions=True)
        for job in self._open:
            if not job.done.done():
                job.done.set_exception(PoolClosed("the verifier pool was closed"))
        children = [child for child in self._children if child is not None]
        self._children = [None] * self._processes
        await asyncio.gather(*(child.kill() for child in children))

    async def _replace(self, slot: int) -> None:
        self._children[slot] = None
        self._children[slot] = await ChildProcess.start(
            self._memory_limit_bytes, self._start_timeout_s
        )

    async def _serve(self, slot: int) -> None:
        while True:
            job = await self._jobs.get()
            try:
                while job.rest and not job.done.done():
                    await self._advance(slot, job)
                if not job.done.done():
                    job.done.set_result(job.verdicts)
            except Exception as error:
                logger.exception("verifier slot %d failed", slot)
                # What it still answers to this job the next one would take for its own.
                if (child := self._children[slot]) is not None:
                    await child.kill()
                if not job.done.done():
                    job.done.set_exception(error)
            await self._keep_alive(slot)

    async def _keep_alive(self, slot: int) -> None:
        """Replace a lost child ahead of the next job; that job tries again if this fails."""
        child = self._children[slot]
        if child is None or not child.alive:
            try:
                await self._replace(slot)
            except ChildLost as lost:
                logger.warning("%s", lost)

    async def _advance(self, slot: int, job: _Job) -> None:
        """Score what is left of `job`, up to its end or to the loss of the child."""
        child = self._children[slot]
        if child is None or not child.alive:
            try:
                await self._replace(slot)
            except ChildLost as lost:
                job.blame_rest(VerdictStatus.ERROR, f"no process to score in: {lost}")
                return
            child = self._children[slot]
        assert child is not None
        if not await self._load(child, job):
            return
        deadline_s = self._deadline_s * (len(job.rest) if job.verifier.per_group else 1)
        loop = asyncio.get_running_loop()
        while job.rest:
            start = loop.time()
            try:
                verdicts = _verdicts(await child.receive(deadline_s), job)
            except ChildLost as lost:
                detail = f"verifier {job.verifier.name!r}: {lost}"
                status = VerdictStatus.ERROR
                if lost.late:
                    status, detail = VerdictStatus.TIMEOUT, overrun(job.verifier, deadline_s)
                logger.warning("task %s: %s; process replaced", job.question.task_id, detail)
                await child.kill()
                job.blame_next(status, detail, loop.time() - start)
                return
            job.verdicts += verdicts

    async def _load(self, child: ChildProcess, job: _Job) -> bool:
        """Hand `job` to the child and wait until it is about to score."""
        request = (job.verifier.path, job.question, job.rest)
        try:
            answer = await child.request(request, self._start_timeout_s)
        except ChildLost as lost:
            await child.kill()
            if job.second_try or lost.late:
                status = VerdictStatus.TIMEOUT if lost.late else VerdictStatus.ERROR
                job.blame_rest(status, f"verifier {job.verifier.name!r} did not load: {lost}")
            job.second_try = True
            return False
        if not answer.get("loaded"):
            detail = f"verifier {job.verifier.name!r} did not load: {answer.get('detail')}"
            job.blame_rest(VerdictStatus.ERROR, detail)
            return False
        return True


def _verdicts(message: dict[str, Any], job: _Job) -> list[Verdict]:
    try:
        verdicts = [decode_verdict(fields) for fields in message["verdicts"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ChildLost(f"the process sent an unreadable message: {error}") from error
    expected = len(job.rest) if job.verifier.per_group else 1
    if len(verdicts) != expected:
        raise ChildLost(f"the process sent {len(verdicts)} verdicts for {expected}")
    return verdicts
