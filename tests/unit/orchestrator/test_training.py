"""The training loop: what is asked for between steps, pauses, and how asking ends."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from flows import LENGTH, complete, leases, make_flow

from learner.batch import SampleFate, StepRequest, StepResult
from orchestrator.bottleneck import Phase
from orchestrator.flow import Flow
from orchestrator.steering import NotNow
from orchestrator.training import Training


class Learner:
    """Trains on whatever it gets, at once."""

    def __init__(self) -> None:
        self.requests: list[StepRequest] = []

    async def step(self, request: StepRequest) -> StepResult:
        self.requests.append(request)
        fates = tuple(SampleFate(s, LENGTH, {}) for g in request.groups for s in g.sample_ids)
        return StepResult(True, request.version + 1, "", {"score_s": 0.0}, fates)


class Sync:
    async def publish(self, label: object) -> None: ...


class Reporter:
    def __init__(self) -> None:
        self.phases: list[dict[Phase, float]] = []

    def step(self, flow: Flow, groups: Any, result: Any, seconds: dict[Phase, float]) -> None:
        self.phases.append(dict(seconds))


class Run:
    """A training loop with real flow and queue, fed by `feed`."""

    def __init__(self, steps: int) -> None:
        self.flow = make_flow(steps=steps)
        self.learner, self.reporter = Learner(), Reporter()
        self.training = Training(
            self.flow,
            self.learner,  # type: ignore[arg-type]
            Sync(),  # type: ignore[arg-type]
            self.reporter,  # type: ignore[arg-type]
            steps=steps,
            after_step=self._after_step,
        )

    async def _after_step(self, step: int, timer: Any) -> None: ...

    def feed(self) -> None:
        """Complete every group that may start now."""
        for lease in leases(self.flow, self.flow.version):
            complete(self.flow, lease)

    def play(self, script: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            loop = asyncio.create_task(self.training.run())
            try:
                async with asyncio.timeout(20):
                    await asyncio.sleep(0)
                    await script()
            finally:
                self.training.stop()
                await loop

        asyncio.run(main())

    async def steps(self, count: int) -> None:
        while self.flow.step < count:
            self.feed()
            await asyncio.sleep(0)


async def breathe() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def test_what_is_asked_for_is_done_while_the_loop_waits_for_groups() -> None:
    run = Run(steps=3)

    async def script() -> None:
        async def work() -> str:
            return f"done at {run.flow.step}"

        assert await run.training.between_steps(Phase.CHECKPOINT, work) == "done at 0"
        await run.steps(1)
        assert Phase.CHECKPOINT in run.reporter.phases[0], "its time is the step's"

    run.play(script)


def test_a_pause_takes_no_batch_and_still_does_what_is_asked() -> None:
    run = Run(steps=9)

    async def script() -> None:
        await run.steps(1)
        run.training.pause(True)
        await breathe()  # the step in progress ends normally
        held = run.flow.step
        run.feed()
        await breathe()
        assert run.flow.step == held

        async def work() -> int:
            return run.flow.step

        assert await run.training.between_steps(Phase.EVALUATE, work) == held
        assert run.flow.step == held
        run.training.pause(False)
        await run.steps(held + 1)
        assert run.reporter.phases[held][Phase.PAUSED] > 0

    run.play(script)


def test_a_failure_is_the_asker_s_and_the_run_goes_on() -> None:
    run = Run(steps=3)

    async def script() -> None:
        async def work() -> None:
            raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            await run.training.between_steps(Phase.CHECKPOINT, work)
        await run.steps(2)

    run.play(script)


def test_what_is_asked_for_is_done_although_the_asker_left() -> None:
    run = Run(steps=3)
    done = []

    async def script() -> None:
        async def work() -> None:
            done.append(run.flow.step)

        asker = asyncio.create_task(run.training.between_steps(Phase.CHECKPOINT, work))
        await asyncio.sleep(0)
        asker.cancel()
        await breathe()
        assert done == [0]

    run.play(script)


def test_nothing_is_done_before_and_after_training() -> None:
    run = Run(steps=1)

    async def work() -> None: ...

    async def early() -> None:
        with pytest.raises(NotNow):
            await run.training.between_steps(Phase.CHECKPOINT, work)

    asyncio.run(early())

    async def script() -> None:
        await run.steps(1)
        await breathe()
        with pytest.raises(NotNow):
            await run.training.between_steps(Phase.CHECKPOINT, work)

    run.play(script)


def test_each_step_carries_the_staleness_bound_of_its_moment() -> None:
    run = Run(steps=9)

    async def script() -> None:
        await run.steps(1)
        await breathe()  # a step may have begun under the old bound
        under_way = len(run.learner.requests)
        run.flow.set_limits(max_staleness=4, max_groups=None)
        await run.steps(under_way + 1)
        bounds = [request.max_staleness for request in run.learner.requests]
        assert bounds[:under_way] == [1] * under_way
        assert bounds[under_way] == 4

    run.play(script)


def test_a_run_that_is_told_to_stop_does_not_first_do_what_was_asked() -> None:
    run = Run(steps=9)
    done = []

    async def script() -> None:
        async def work() -> None:
            done.append(run.flow.step)

        asking = [
            asyncio.ensure_future(run.training.between_steps(Phase.EVALUATE, work))
            for _ in range(3)
        ]
        run.training.stop()
        refused = await asyncio.gather(*asking, return_exceptions=True)
        assert all(isinstance(answer, NotNow) for answer in refused)
        assert done == []

    run.play(script)
