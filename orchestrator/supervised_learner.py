"""The learner as the run's loops use it: a group of ranks that is replaced when one of them dies.

A new group is brought to where the old one was, by redo, and its weights are published in a new
lineage; the call that was under way is made again. Rollout workers go on meanwhile. Knows neither
queue nor batches.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from learner.batch import StepRequest, StepResult
from learner.group import LearnerDied, LearnerGroup, RankInfo
from learner.messages import ProbeRequest, Publication
from orchestrator.calls import plain, waiting
from orchestrator.errors import RunError
from orchestrator.restarts import RestartBudget
from orchestrator.workers import LossReason

T = TypeVar("T")


class LearnerReplaced(Exception):
    """The learner died and another one has published its weights since."""


class SupervisedLearner:
    """One learner group at a time."""

    role = "learner"

    def __init__(
        self,
        create: Callable[[], LearnerGroup],
        restore: Callable[[LearnerGroup], Awaitable[None]],
        *,
        budget: RestartBudget,
        note: Callable[[str], None],
    ) -> None:
        """`create` makes a group, and `restore` brings one that has started to where the run is."""
        self._create = create
        self._restore = restore
        self._budget = budget
        self._note = note
        self._group = create()
        self._replacing = asyncio.Lock()
        self.on_replaced: Callable[[], Awaitable[None]] | None = None
        """Called whenever another group has taken over: publishes its weights."""
        self.restarts: Counter[LossReason] = Counter()
        """Replacements by what had happened."""

    @property
    def infos(self) -> Sequence[RankInfo]:
        """The rank processes; empty while there are none."""
        return self._group.infos

    async def start(self) -> None:
        """Start the ranks and bring them to where the run is. Raises ModelError when the model does
        not load, LearnerDied when they do not come up: that is not tried again."""
        await self._bring_up(self._group)

    async def step(self, request: StepRequest) -> StepResult:
        """See `LearnerGroup.step`."""
        return await self._call("its step", lambda group: group.step(request))

    async def score(self, refs: Sequence[Any], version: int) -> tuple[np.ndarray, np.ndarray]:
        """See `LearnerGroup.score`."""
        return await self._call("log-probabilities", lambda group: group.score(refs, version))

    async def save(self, folder: str, *, keep: int, export: bool) -> None:
        """See `LearnerGroup.save`."""
        await self._call("a checkpoint", lambda group: group.save(folder, keep=keep, export=export))

    async def publish(
        self, label: str, probe: ProbeRequest | None, version: int
    ) -> tuple[Publication, list[Any]]:
        """See `LearnerGroup.publish`. Raises LearnerReplaced where that has made it pointless."""
        group = self._group
        try:
            with waiting("the learner (its weights)"):
                return await group.publish(label, probe, version)
        except LearnerDied as error:
            await self._replace(group, error)
            raise LearnerReplaced from error

    async def watch(self) -> None:
        """Loop: notice a rank that dies while nobody waits for it. Ended by cancellation, or by
        RunError when too many have died."""
        while True:
            group = self._group
            try:
                await group.watch()
            except LearnerDied as error:
                await self._replace(group, error)

    async def close(self) -> None:
        """End the rank processes."""
        await self._group.close()

    async def _call(self, what: str, call: Callable[[LearnerGroup], Awaitable[T]]) -> T:
        while True:
            group = self._group
            try:
                with waiting(f"the learner ({what})"):
                    return await call(group)
            except LearnerDied as error:
                await self._replace(group, error)

    async def _replace(self, dead: LearnerGroup, error: LearnerDied) -> None:
        """Put another group in the place of `dead`, unless somebody has done so."""
        async with self._replacing:
            if self._group is not dead:
                return
            while self._group is dead:
                await dead.close()
                await self._wait_before_restart(error)
                group = self._create()
                try:
                    await self._bring_up(group)
                except LearnerDied as again:
                    error = again
                else:
                    self._group = group
        self.restarts[LossReason.DIED] += 1
        if self.on_replaced is not None:
            await self.on_replaced()

    async def _wait_before_restart(self, error: LearnerDied) -> None:
        delay_s = self._budget.next_delay_s(time.monotonic())
        if delay_s is None:
            raise explained(error)
        self._note(f"{plain(str(error))}; the learner is started again")
        await asyncio.sleep(delay_s)

    async def _bring_up(self, group: LearnerGroup) -> None:
        try:
            await group.start()
            await self._restore(group)
        except BaseException:
            await group.close()
            raise


def explained(error: LearnerDied | ValueError) -> RunError:
    """The learner's error as the run's, with the log to look at."""
    culprit = f"learner-{error.rank}" if isinstance(error, LearnerDied) else ""
    return RunError(plain(str(error)), culprit=culprit)
