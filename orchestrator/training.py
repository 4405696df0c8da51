"""The training loop, the run's only finite clock: batch, step, publish, report, save.

Control flow only: choosing groups is the flow's, the update is the learner's, keeping workers
current is the weight sync's, and telling people is the reporter's.
"""

from collections.abc import Awaitable, Callable

from learner.batch import StepRequest
from learner.group import LearnerGroup
from orchestrator.bottleneck import Phase
from orchestrator.flow import Flow
from orchestrator.reporting import PhaseTimer, Reporter
from orchestrator.weight_sync import WeightSync


class Training:
    """Consumes batches until `steps` are done or it is told to stop."""

    def __init__(
        self,
        flow: Flow,
        learner: LearnerGroup,
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
        self._stopping = False

    def stop(self) -> None:
        """End after the step in progress; a wait for groups ends at once."""
        self._stopping = True
        self._flow.changed.notify()

    async def run(self) -> None:
        """Train from the flow's current step to the last one."""
        flow = self._flow
        timer = PhaseTimer()
        while flow.step < self._steps:
            with timer(Phase.WAIT_FOR_GROUPS):
                groups = await flow.next_batch(until=lambda: self._stopping)
            if groups is None:
                return
            entries = tuple(group.entry for group in groups)
            with timer(Phase.TRAIN):
                result = await self._learner.step(StepRequest(flow.step, flow.version, entries))
            timer.move(Phase.TRAIN, Phase.SCORE, result.metrics["score_s"])
            flow.trained(groups, result)
            with timer(Phase.PUBLISH):
                if result.changed:
                    await self._sync.publish(flow.label)
            self._reporter.step(flow, groups, result, timer.seconds)
            timer = PhaseTimer()
            await self._after_step(flow.step, timer)
