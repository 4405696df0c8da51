"""The training loop, the run's only finite clock: batch, step, publish, report, save.

Control flow only: choosing groups is the flow's, the update is the learner's, keeping workers
current is the weight sync's, and telling people is the reporter's.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from orchestrator.bottleneck import Phase
from orchestrator.calls import waiting
from orchestrator.flow import Flow
from orchestrator.reporting import PhaseTimer, Reporter
from orchestrator.steering import NotNow
from orchestrator.store import ReadyGroup
from orchestrator.supervised_learner import SupervisedLearner
from orchestrator.weight_sync import WeightSync


class Training:
    """Consumes batches until `steps` are done or it is told to stop."""

    def __init__(
        self,
        flow: Flow,
        learner: SupervisedLearner,
        sync: WeightSync,
        reporter: Reporter,
        *,
        steps: int,
        after_step: Callable[[int, PhaseTimer], Awaitable[None]],
    ) -> None:
        self._flow = flow
        self._learner = learner
        self._sync = sync
        self._reporter = reporter
        self._steps = steps
        self._after_step = after_step
        self._running = False
        self._stopping = False
        self._asked: deque[tuple[Phase, Callable[[], Awaitable[Any]], asyncio.Future]] = deque()
        self.paused = False
        self.waiting = False
        """Whether it waits for groups at this moment."""
        self.between = False
        """Whether it does something between two steps, such as saving."""

    def stop(self) -> None:
        """End after the step in progress; a wait for groups ends at once."""
        self._stopping = True
        self._flow.changed.notify()

    def pause(self, paused: bool) -> None:
        """Take no new batch while `paused`; the step in progress ends normally."""
        self.paused = paused
        self._flow.changed.notify()

    async def between_steps(self, phase: Phase, work: Callable[[], Awaitable[Any]]) -> Any:
        """Result of `work`, done before the next batch is taken; its time counts as `phase`.

        Raises NotNow when no step follows, and whatever `work` raises. It is done even if whoever
        asked no longer waits.
        """
        if not self._running:
            raise NotNow("the run is not training now; ask again once it is.")
        done = asyncio.get_running_loop().create_future()
        self._asked.append((phase, work, done))
        self._flow.changed.notify()
        return await done

    async def run(self) -> None:
        """Train from the flow's current step to the last one."""
        self._running = True
        timer = PhaseTimer()
        try:
            while self._flow.step < self._steps and not self._stopping:
                await self._serve(timer)
                groups = await self._next_batch(timer)
                if groups is not None:
                    timer = await self._train(groups, timer)
            await self._serve(timer)
        finally:
            self._running = False
            for _, _, done in self._asked:
                _refuse(done)

    async def _next_batch(self, timer: PhaseTimer) -> list[ReadyGroup] | None:
        """The next batch; None as soon as there is something else to do."""
        with timer(Phase.PAUSED):
            while self.paused and not self._stopping and not self._asked:
                await self._flow.changed.wait()
        self.waiting = True
        try:
            with timer(Phase.WAIT_FOR_GROUPS), waiting("groups to train on"):
                return await self._flow.next_batch(
                    until=lambda: self._stopping or self.paused or bool(self._asked)
                )
        finally:
            self.waiting = False

    async def _train(self, groups: list[ReadyGroup], timer: PhaseTimer) -> PhaseTimer:
        """One batch step; the timer of the next one."""
        flow = self._flow
        with timer(Phase.TRAIN):
            result = await self._learner.step(flow.request(groups))
        timer.move(Phase.TRAIN, Phase.SCORE, result.metrics["score_s"])
        flow.trained(groups, result)
        await flow.flush()
        with timer(Phase.PUBLISH):
            if result.changed:
                await self._sync.publish(flow.label)
        self._reporter.step(flow, groups, result, timer.seconds)
        timer = PhaseTimer()
        with self._between():
            await self._after_step(flow.step, timer)
        return timer

    @contextmanager
    def _between(self) -> Iterator[None]:
        self.between = True
        try:
            yield
        finally:
            self.between = False

    async def _serve(self, timer: PhaseTimer) -> None:
        """Do what was asked for between two steps. A failure is the asker's, unless it is one of
        the run itself, which then ends it at the next step."""
        while self._asked:
            phase, work, done = self._asked.popleft()
            if self._stopping:
                _refuse(done)  # the end saves by itself, and must not wait
                continue
            with timer(phase), self._between():
                try:
                    result = await work()
                except asyncio.CancelledError:
                    _refuse(done)
                    raise
                except Exception as error:
                    if not done.done():
                        done.set_exception(error)
                else:
                    if not done.done():
                        done.set_result(result)


def _refuse(done: asyncio.Future) -> None:
    if not done.done():
        done.set_exception(NotNow("the run ends, or has ended, its training; it saves then."))
