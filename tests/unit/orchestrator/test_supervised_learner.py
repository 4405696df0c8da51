"""A learner group that dies is replaced, and whoever was waiting for it gets an answer."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from learner.batch import StepRequest, StepResult
from learner.group import LearnerDied, LearnerGroup
from orchestrator.errors import RunError
from orchestrator.restarts import RestartBudget
from orchestrator.supervised_learner import LearnerReplaced, SupervisedLearner

REQUEST = StepRequest(0, 0, 2, 10, ())
RESULT = StepResult(True, 1, "", {}, ())


class GroupDouble(LearnerGroup):
    """A group whose calls die as often as it is told; it counts what it is asked."""

    def __init__(self, *deaths: str) -> None:
        self.deaths = list(deaths)
        self.calls: list[str] = []
        self.ended = asyncio.Event()

    async def _answer(self, name: str) -> None:
        self.calls.append(name)
        await asyncio.sleep(0)
        if name in self.deaths:
            self.ended.set()
            raise LearnerDied(0, f"killed in {name}")

    async def start(self) -> None:
        await self._answer("start")

    async def step(self, request: StepRequest) -> StepResult:
        await self._answer("step")
        return RESULT

    async def publish(
        self, label: str, probe: Any = None, version: int | None = None
    ) -> tuple[Any, list[Any]]:
        await self._answer("publish")
        return label, []

    async def watch(self) -> None:
        await self.ended.wait()
        raise LearnerDied(0, "gone")

    async def close(self) -> None:
        self.calls.append("close")


class Scene:
    """A supervised learner over these groups, one after the other."""

    def __init__(self, *groups: GroupDouble, per_hour: int = 5) -> None:
        self.groups = list(groups)
        self.notes: list[str] = []
        self.restored: list[GroupDouble] = []
        self.published = 0
        waiting = iter(groups)
        self.learner = SupervisedLearner(
            lambda: next(waiting),
            self._restore,
            budget=RestartBudget(per_hour, first_delay_s=0.0),
            note=self.notes.append,
        )
        self.learner.on_replaced = self._publish

    async def _restore(self, group: LearnerGroup) -> None:
        assert isinstance(group, GroupDouble)
        self.restored.append(group)
        await group._answer("restore")

    async def _publish(self) -> None:
        self.published += 1
        await self.learner.publish("1.0", None, 0)


def test_the_step_that_died_is_done_by_another_group() -> None:
    async def main() -> None:
        first, second = GroupDouble("step"), GroupDouble()
        scene = Scene(first, second)
        await scene.learner.start()
        assert await scene.learner.step(REQUEST) == RESULT
        assert first.calls == ["start", "restore", "step", "close"]
        assert second.calls == ["start", "restore", "publish", "step"]
        assert (scene.learner.restarts.total(), scene.published) == (1, 1)
        assert "learner rank 0 died: killed in step; the learner is started again" in scene.notes

    asyncio.run(main())


def test_a_publication_that_died_is_not_made_again_by_the_caller() -> None:
    async def main() -> None:
        scene = Scene(GroupDouble("publish"), GroupDouble())
        await scene.learner.start()
        with pytest.raises(LearnerReplaced):
            await scene.learner.publish("0.3", None, 3)
        assert scene.groups[1].calls == ["start", "restore", "publish"], "in the new lineage"

    asyncio.run(main())


def test_what_cannot_start_is_not_tried_again() -> None:
    async def main() -> None:
        scene = Scene(GroupDouble("start"), GroupDouble())
        with pytest.raises(LearnerDied, match="killed in start"):
            await scene.learner.start()
        assert scene.groups[1].calls == []

    asyncio.run(main())


@pytest.mark.parametrize("moment", ["start", "restore"])
def test_one_that_dies_before_it_stands_is_replaced_too(moment: str) -> None:
    async def main() -> None:
        scene = Scene(GroupDouble("step"), GroupDouble(moment), GroupDouble())
        await scene.learner.start()
        assert await scene.learner.step(REQUEST) == RESULT
        assert scene.restored[-1] is scene.groups[2]
        assert (scene.learner.restarts.total(), scene.published) == (1, 1)

    asyncio.run(main())


def test_a_death_that_nobody_waits_for_is_noticed() -> None:
    async def main() -> None:
        first, second = GroupDouble(), GroupDouble()
        scene = Scene(first, second)
        await scene.learner.start()
        watching = asyncio.create_task(scene.learner.watch())
        first.ended.set()
        while "publish" not in second.calls:
            await asyncio.sleep(0)
        assert await scene.learner.step(REQUEST) == RESULT
        assert first.calls == ["start", "restore", "close"]
        watching.cancel()

    asyncio.run(main())


def test_watch_and_step_replace_one_group_once() -> None:
    async def main() -> None:
        scene = Scene(GroupDouble("step"), GroupDouble())
        await scene.learner.start()
        watching = asyncio.create_task(scene.learner.watch())
        assert await scene.learner.step(REQUEST) == RESULT
        assert scene.learner.restarts.total() == 1
        watching.cancel()

    asyncio.run(main())


def test_a_spent_budget_ends_the_run_and_names_the_rank() -> None:
    async def main() -> None:
        scene = Scene(GroupDouble("step"), GroupDouble("step"), per_hour=1)
        await scene.learner.start()
        with pytest.raises(RunError, match="learner rank 0 died: killed in step") as caught:
            await scene.learner.step(REQUEST)
        assert caught.value.culprit == "learner-0"

    asyncio.run(main())


def test_an_error_of_the_batch_is_the_callers() -> None:
    class Refuses(GroupDouble):
        async def score(self, refs: Sequence[Any], version: int | None = None) -> Any:
            raise ValueError("row 3 contradicts the request")

    async def main() -> None:
        scene = Scene(Refuses())
        with pytest.raises(ValueError, match="row 3"):
            await scene.learner.score([], 0)
        assert scene.learner.restarts.total() == 0

    asyncio.run(main())
