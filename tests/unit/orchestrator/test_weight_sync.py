"""Weight sync: who is brought to which label, and what a failed probe means for the others."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from actors.config import RolloutConfig
from actors.parity import ParityReport
from actors.trajectory import WeightLabel
from actors.weights import WeightManifest
from actors.worker import SyncReport, WorkerInfo
from learner.messages import ProbeRequest, ProbeScores, Publication
from orchestrator.errors import RunError
from orchestrator.fleet import Fleet
from orchestrator.restarts import RestartBudget
from orchestrator.signal import Signal
from orchestrator.weight_sync import WeightSync
from orchestrator.workers import LossReason, Worker, WorkerState


class Learner:
    """Publishes one chunk of nothing under each label."""

    async def publish(
        self, label: str, probe: ProbeRequest, version: int
    ) -> tuple[Publication, list[Any]]:
        scores = np.zeros((1, 1), np.float32)
        probe_scores = ProbeScores(scores.astype(np.int32), scores, scores)
        return Publication(label, "float32", (("w",),), (4,), (0,), probe_scores), [None]


class Remote:
    """A method of an actor: `.remote(...)` gives something to await."""

    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self.remote = function


class Actor:
    """A rollout worker that loads what it is told; its probes differ by `difference` nats."""

    def __init__(self, difference: float) -> None:
        self.difference = difference
        self.tolerances: list[float | None] = []
        self.sync = Remote(self._sync)
        self.start = Remote(self._start)
        self.engine_runs = asyncio.Event()

    async def _start(self) -> WorkerInfo:
        await self.engine_runs.wait()
        return WorkerInfo("late", "", 1, (), 4, WeightLabel(0, 0), "float32")

    async def _sync(self, manifest: WeightManifest, at_step_0: float | None) -> SyncReport:
        self.tolerances.append(at_step_0)
        passed = self.difference < 1e-3
        parity = ParityReport(
            self.difference, self.difference, 1e-3, passed, "" if passed else "stale"
        )
        return SyncReport(manifest.label, parity=parity)


class Reporter:
    """Takes figures and drops them."""

    def published(self, seconds: float, nbytes: int) -> None: ...
    def synced(self, report: SyncReport) -> None: ...
    def sync_failed(self) -> None: ...


def make(*differences: float) -> tuple[WeightSync, Fleet]:
    changed = Signal()
    fleet = Fleet(
        "rollout",
        spawn=lambda name: None,
        start=lambda actor: asyncio.sleep(0),
        changed=changed,
        tell=lambda text: None,
        kill=lambda actor: None,
        budget=RestartBudget(0),
        progress_timeout_s=60,
        drain_timeout_s=60,
    )
    for number, difference in enumerate(differences):
        name = f"rollout-{number}"
        fleet.workers[name] = Worker(name, Actor(difference), WorkerState.READY)
    sync = WeightSync(
        Learner(),  # type: ignore[arg-type]
        fleet,
        RolloutConfig(),
        probe_prefixes=((1,),),
        learner_dtype="float32",
        changed=changed,
        reporter=Reporter(),  # type: ignore[arg-type]
    )
    return sync, fleet


def play(sync: WeightSync, *labels: WeightLabel) -> None:
    """Publish each label and let every worker reach it."""

    async def main() -> None:
        loop = asyncio.create_task(sync.run())
        for label in labels:
            await sync.publish(label)
            await asyncio.wait_for(sync.sync_all(), 60)
        loop.cancel()

    asyncio.run(main())


class DeadActor(Actor):
    """Its process is gone, or answers with an error."""

    def __init__(self, error: Exception) -> None:
        super().__init__(0.0)
        self.error = error

    async def _sync(self, manifest: WeightManifest, at_step_0: float | None) -> SyncReport:
        raise self.error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ActorDiedError(), LossReason.DIED),
        (RayTaskError("sync", "traceback", ValueError("chunk 3")), LossReason.SYNC_FAILED),
    ],
)
def test_a_worker_that_dies_while_it_syncs_has_died(error: Exception, reason: LossReason) -> None:
    sync, fleet = make(1e-6)
    fleet.workers["rollout-1"] = Worker("rollout-1", DeadActor(error), WorkerState.READY)
    play(sync, WeightLabel(0, 0))
    assert fleet.restarts == {reason: 1}
    assert [worker.name for worker in fleet.ready()] == ["rollout-0"]


def test_every_ready_worker_reaches_the_newest_label() -> None:
    sync, fleet = make(1e-6, 2e-6)
    play(sync, WeightLabel(0, 0), WeightLabel(0, 1))
    assert {sync.label(worker) for worker in fleet.ready()} == {WeightLabel(0, 1)}


def test_the_first_passed_probe_sets_the_tolerance_of_later_ones() -> None:
    sync, fleet = make(1e-6)
    play(sync, WeightLabel(0, 0), WeightLabel(0, 1))
    (worker,) = fleet.ready()
    assert worker.actor.tolerances == [None, 1e-6]


@pytest.mark.parametrize("difference", [3.0, float("inf")])
def test_a_broken_worker_is_quarantined_and_widens_no_tolerance(difference: float) -> None:
    sync, fleet = make(difference, 1e-6)
    play(sync, WeightLabel(0, 0), WeightLabel(0, 1))
    broken, sound = fleet.workers.values()
    assert broken.state is WorkerState.QUARANTINED
    assert sound.state is WorkerState.READY
    assert sound.actor.tolerances == [None, 1e-6]


def test_a_late_worker_comes_up_on_what_is_newest_when_its_engine_runs() -> None:
    sync, _ = make()

    async def main() -> WorkerInfo:
        late = Actor(1e-6)
        await sync.publish(WeightLabel(0, 0))
        coming = asyncio.create_task(sync.start_worker(late))
        await asyncio.sleep(0)
        for version in (1, 2, 3):
            await sync.publish(WeightLabel(0, version))
        late.engine_runs.set()
        return await coming

    assert asyncio.run(main()).label == WeightLabel(0, 3)


def test_a_late_worker_that_fails_the_probe_does_not_come_up() -> None:
    sync, _ = make()

    async def main() -> None:
        broken = Actor(3.0)
        broken.engine_runs.set()
        await sync.publish(WeightLabel(0, 0))
        await sync.start_worker(broken)

    with pytest.raises(RunError, match="failed the parity probe"):
        asyncio.run(main())


def test_without_a_ready_worker_the_wait_goes_on() -> None:
    sync, fleet = make()

    async def main() -> None:
        await sync.publish(WeightLabel(0, 0))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sync.sync_all(), 0.05)

    asyncio.run(main())
    assert fleet.ready() == []
