"""Flows for tests: a small configuration, and the events of a group's life in one call each."""

import asyncio
from collections.abc import Sequence
from typing import Any

from actors.worker import GroupReceipt
from learner.batch import GroupEntry, SampleFate, StepResult
from orchestrator.config import RunConfig
from orchestrator.flow import Flow
from orchestrator.history.transitions import Journal, Transition
from orchestrator.leases import Lease
from orchestrator.signal import Signal
from orchestrator.store import ReadyGroup
from orchestrator.tasks import Task

SAMPLES = 2
LENGTH = 3


def make_config(**changes: Any) -> RunConfig:
    content: dict[str, Any] = {
        "name": "flow",
        "steps": 10,
        "max_staleness": 1,
        "model": {"path": "model"},
        "data": {"train": {"path": "train.jsonl"}, "held_out": {"path": "held_out.jsonl"}},
        "rollout": {
            "samples_per_group": SAMPLES,
            "sampling": {"max_tokens": 8},
            "engine": {"max_model_len": 32},
        },
        "learner": {"groups_per_batch": 2, "objective": {"preset": "dapo"}},
    }
    for key, value in changes.items():
        content[key] = {**content.get(key, {}), **value} if isinstance(value, dict) else value
    return RunConfig.model_validate(content).resolved()


class ListJournal:
    """Keeps what it is given, call by call."""

    def __init__(self) -> None:
        self.calls: list[list[Transition]] = []

    def append(self, transitions: Sequence[Transition]) -> None:
        self.calls.append(list(transitions))

    async def flush(self, *, durably: bool = False) -> None:
        """Everything is kept at once."""

    @property
    def all(self) -> list[Transition]:
        return [transition for call in self.calls for transition in call]


def make_flow(journal: Journal | None = None, **changes: Any) -> Flow:
    tasks = [Task(f"t{i}", f"{i}", f"{i}", "exact", "unit", {}, (1, 2)) for i in range(7)]
    return Flow(make_config(**changes), tasks, Signal(), journal)


def complete(
    flow: Flow,
    lease: Lease,
    outcomes: tuple[float, ...] = (0.0, 1.0),
    oldest_version: int | None = None,
    segment: int = 0,
) -> ReadyGroup:
    """Generate, verify and store one lease's group."""
    receipt = GroupReceipt(
        group_id=lease.group_id,
        attempt=lease.attempt,
        ok=True,
        label="0.0",
        started_at=0.0,
        finished_at=1.0,
        samples=SAMPLES,
        response_tokens=(LENGTH,) * SAMPLES,
    )
    flow.generated(lease, receipt)
    flow.verified(lease)
    entry = entry_of(lease, outcomes)
    oldest = flow.version if oldest_version is None else oldest_version
    group = ReadyGroup(entry, lease.attempt, 100, oldest, segment)
    flow.ready(lease, group)
    return group


def entry_of(lease: Lease, outcomes: tuple[float, ...] = (0.0, 1.0)) -> GroupEntry:
    """What the learner is told of a lease's group."""
    return GroupEntry(
        group_id=lease.group_id,
        ref=None,
        sample_ids=tuple(f"{lease.group_id}-{lease.attempt}-{i}" for i in range(SAMPLES)),
        prompt_tokens=2,
        response_tokens=(LENGTH,) * SAMPLES,
        rewards=outcomes,
        outcomes=outcomes,
        ok=(True,) * SAMPLES,
        truncated=(False,) * SAMPLES,
    )


def batch(flow: Flow) -> list[ReadyGroup] | None:
    return asyncio.run(flow.next_batch(until=lambda: False))


def trained(flow: Flow, groups: list[ReadyGroup], *, changed: bool = True) -> None:
    fates = tuple(SampleFate(s, LENGTH, {}) for group in groups for s in group.entry.sample_ids)
    skipped = "" if changed else "empty"
    version = flow.version + changed
    flow.trained(groups, StepResult(changed, version, skipped, {}, fates))


def leases(flow: Flow, version: int = 0) -> list[Lease]:
    found = []
    while (lease := flow.next_lease(version)) is not None:
        found.append(lease)
    return found
