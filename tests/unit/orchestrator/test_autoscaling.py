"""The autoscaling loop: it acts on means, says why, and leaves a disturbed run alone."""

import asyncio
from dataclasses import dataclass, field

from orchestrator.autoscaler import Load
from orchestrator.autoscaling import autoscale
from orchestrator.operation_config import AutoscalerConfig
from orchestrator.steering import FleetStatus, Role, WorkerStatus


@dataclass
class Status:
    """The part of a snapshot that the loop reads."""

    fleets: tuple[FleetStatus, ...]


@dataclass
class Run:
    """A run with one worker of each role, whose load is what a test says."""

    loads: list[Load]
    quiet: bool = True
    targets: dict[Role, int] = field(
        default_factory=lambda: {Role.ROLLOUT: 1, Role.VERIFIER: 1, Role.LEARNER: 1}
    )
    scaled: list[tuple[Role, int]] = field(default_factory=list)
    looks: int = 0

    def load(self) -> Load:
        self.looks += 1
        return self.loads[self.looks % len(self.loads)]

    def undisturbed(self) -> bool:
        return self.quiet

    def status(self) -> Status:
        return Status(tuple(_fleet(role, target) for role, target in self.targets.items()))

    def scale(self, role: Role, target: int) -> FleetStatus:
        self.targets[role] = target
        self.scaled.append((role, target))
        return _fleet(role, target)


def _fleet(role: Role, workers: int) -> FleetStatus:
    there = tuple(WorkerStatus(name=f"{role}-{i}", state="ready") for i in range(workers))
    return FleetStatus(role=role, target=workers, restarts=0, workers=there)


CONFIG = AutoscalerConfig.model_validate(
    {
        "enabled": True,
        "rollout": {"max_workers": 2},
        "period_s": 0.005,
        "patience": 2,
        "cooldown_s": 0.0,
    }
)
WAITING = Load(learner_idle=1.0, rollout_busy=0.9, verifiers_busy=0.4, admission_blocked=0.0)
WORKING = Load(learner_idle=0.0, rollout_busy=0.9, verifiers_busy=0.4, admission_blocked=0.0)


def play(run: Run, looks: int) -> list[str]:
    said: list[str] = []

    async def main() -> None:
        loop = asyncio.create_task(autoscale(run, CONFIG, said.append))  # type: ignore[arg-type]
        while run.looks < looks:
            await asyncio.sleep(0)
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)

    asyncio.run(main())
    return said


def test_a_starved_learner_gets_a_worker_and_the_reason_is_said() -> None:
    run = Run([WAITING])
    (said,) = play(run, looks=600)
    assert run.scaled == [(Role.ROLLOUT, 2)]
    assert said == (
        "autoscaler: the learner waited 100% of the time and rollout workers were 90% busy"
    )


def test_it_acts_on_the_mean_of_a_period() -> None:
    run = Run([WAITING] + 9 * [WORKING])
    assert play(run, looks=600) == []
    assert run.scaled == []


def test_a_paused_run_is_left_alone() -> None:
    run = Run([WAITING], quiet=False)
    assert play(run, looks=600) == []
    assert run.scaled == []
