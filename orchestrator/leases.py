"""Leases: what a rollout worker gets of a group, and where its samples draw from."""

from dataclasses import dataclass

from orchestrator.config import RunConfig
from orchestrator.tasks import Task

SEED_STRIDE = 1 << 32


@dataclass(frozen=True, slots=True)
class Lease:
    """The right and duty to generate one attempt of a group."""

    group_id: int
    """Also the group's place in the admission order."""
    attempt: int
    task: Task
    samples: int
    seed: int | None
    """The same for every attempt, so that a retry draws the same samples."""
    pardoned: int = 0
    """Of the attempts before this one, those that do not count against the limit."""


def new_lease(
    config: RunConfig, group_id: int, task: Task, attempt: int = 0, pardoned: int = 0
) -> Lease:
    """The lease of a group that is admitted, or taken up again at `attempt`."""
    rollout = config.rollout
    seed = None
    if rollout.seeded:
        # Sample i of a group draws from seed + i: groups must not share seeds.
        seed = config.seed * SEED_STRIDE + group_id * rollout.samples_per_group
    return Lease(group_id, attempt, task, rollout.samples_per_group, seed, pardoned)
