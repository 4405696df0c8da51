"""The training loop, the run's only finite clock: batch, step, publish, report, save.

Control flow only: choosing groups is the flow's, the update is the learner's, keeping workers
current is the weight sync's, and telling people is the reporter's.
"""

import time
from collections.abc import Awaitable, Callable

from learner.batch import StepRequest
from learner.group import LearnerGroup
from orchestrator.flow import Flow
from orchestrator.reporting import Reporter
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
        after_step: Callable[[int], Awaitable[None]],
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
        while self._flow.step < self._steps:
            timer = PhaseTimer()
            with timer("wait"):
                groups = await self._flow.next_batch(until=lambda: self._stopping)
            if groups is None:
                return
            request = StepRequest(
                step=self._flow.step,
                version=self._flow.version,
                groups=tuple(group.entry for group in groups),
            )
            with timer("step"):
                result = await self._learner.step(request)
            self._flow.trained(groups, result)
            with timer("publish"):
                if result.changed:
                    await self._sync.publish(self._flow.label)
            self._reporter.step(self._flow, groups, result, timer.seconds)
            await self._after_step(self._flow.step)


class PhaseTimer:
    """Seconds per named phase of one step: `with timer("wait"): …`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._phase = ""
        self._started = 0.0

    def __call__(self, phase: str) -> "PhaseTimer":
        """Name the phase that the following `with` block times."""
        self._phase = phase
        return self

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        spent = time.monotonic() - self._started
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + spent
