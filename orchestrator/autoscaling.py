"""The autoscaling loop: samples the load, asks the controller, tells the run."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from orchestrator.autoscaler import Autoscaler, Load
from orchestrator.operation_config import AutoscalerConfig
from orchestrator.steering import InvalidRequest, NotNow, Role, RunStatus, Steering

SAMPLES_PER_PERIOD = 50


class Scalable(Steering, Protocol):
    """A live run whose load can be looked at."""

    def load(self) -> Load:
        """The load at this moment."""

    def undisturbed(self) -> bool:
        """Whether the run trains, and neither generation nor training is paused."""


async def autoscale(run: Scalable, config: AutoscalerConfig, tell: Callable[[str], None]) -> None:
    """Loop: every period, do what the controller says. Ended by cancellation only."""
    controller = Autoscaler(config)
    while True:
        load = await _mean_load(run, config.period_s)
        status = run.status()
        if load is None:
            continue
        targets = {fleet.role: fleet.target for fleet in status.fleets}
        settled = {role: _settled(status, role) for role in targets}
        for change in controller.decide(load, targets, settled, time.monotonic()):
            tell(f"autoscaler: {change.why}")
            try:
                run.scale(change.role, change.target)
            except (InvalidRequest, NotNow) as error:
                tell(f"autoscaler: {error}")


async def _mean_load(run: Scalable, period_s: float) -> Load | None:
    """Mean over the period; None when it tells nothing about the fleets."""
    samples: list[Load] = []
    undisturbed = True
    for _ in range(SAMPLES_PER_PERIOD):
        await asyncio.sleep(period_s / SAMPLES_PER_PERIOD)
        undisturbed &= run.undisturbed()
        samples.append(run.load())

    def mean(name: str) -> float:
        return sum(getattr(sample, name) for sample in samples) / len(samples)

    if not undisturbed:
        return None
    return Load(
        learner_idle=mean("learner_idle"),
        rollout_busy=mean("rollout_busy"),
        verifiers_busy=mean("verifiers_busy"),
        admission_blocked=mean("admission_blocked"),
    )


def _settled(status: RunStatus, role: Role) -> bool:
    fleet = next(fleet for fleet in status.fleets if fleet.role is role)
    return len(fleet.workers) == fleet.target == fleet.count("ready")
