"""Admission, ledger and queue moved as one: leases, retries, drops, batches, resume."""

import asyncio
from typing import Any

import pytest

from actors.worker import GroupReceipt
from learner.batch import GroupEntry, SampleFate, StepResult
from orchestrator.config import RunConfig
from orchestrator.errors import RunError
from orchestrator.flow import Flow, Lease
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


def make_flow(**changes: Any) -> Flow:
    tasks = [Task(f"t{i}", f"{i}", f"{i}", "exact", "unit", {}, (1, 2)) for i in range(7)]
    return Flow(make_config(**changes), tasks, Signal())


def complete(
    flow: Flow,
    lease: Lease,
    outcomes: tuple[float, ...] = (0.0, 1.0),
    oldest_version: int | None = None,
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
    entry = GroupEntry(
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
    oldest = flow.version if oldest_version is None else oldest_version
    group = ReadyGroup(entry, lease.attempt, 100, oldest)
    flow.ready(lease, group)
    return group


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


def test_a_fresh_worker_gets_what_the_staleness_bound_allows() -> None:
    flow = make_flow()
    assert [lease.group_id for lease in leases(flow)] == [0, 1, 2, 3]


def test_consumed_groups_make_room_for_new_ones() -> None:
    flow = make_flow()
    for lease in leases(flow):
        complete(flow, lease)
    groups = batch(flow)
    assert groups is not None and [g.entry.group_id for g in groups] == [0, 1]
    trained(flow, groups)
    assert flow.version == 1 and flow.step == 1
    assert leases(flow, version=0) == []
    assert [lease.group_id for lease in leases(flow, version=1)] == [4, 5]


def test_a_skipped_batch_leaves_without_a_version() -> None:
    flow = make_flow()
    for lease in leases(flow):
        complete(flow, lease)
    groups = batch(flow)
    assert groups is not None
    trained(flow, groups, changed=False)
    report = flow.ledger.check()
    assert (flow.version, flow.step) == (0, 1)
    assert report.samples.dropped_by_reason == {"skipped_batch": 4}


def test_a_group_without_contrast_is_replaced() -> None:
    flow = make_flow()
    first = flow.next_lease(0)
    assert first is not None
    complete(flow, first, outcomes=(1.0, 1.0))
    assert flow.ledger.report().samples.dropped_by_reason == {"zero_variance": SAMPLES}
    assert len(leases(flow)) == 4


def test_a_lost_attempt_keeps_its_place_and_its_seed() -> None:
    flow = make_flow(
        rollout={
            "seeded": True,
            "engine": {"chunked_prefill": False},
            "sampling": {"max_tokens": 8},
        }
    )
    first, *others = leases(flow)
    flow.attempt_failed(first, "worker_lost", "killed")
    again = flow.next_lease(0)
    assert again is not None
    assert (again.group_id, again.attempt, again.seed) == (first.group_id, 1, first.seed)
    seeds = {lease.seed for lease in (first, *others)}
    assert len(seeds) == len(others) + 1


def test_a_task_fails_after_its_attempts_and_is_never_a_reward() -> None:
    flow = make_flow(supervision={"attempts": 2})
    lease = flow.next_lease(0)
    assert lease is not None
    flow.attempt_failed(lease, "worker_lost", "killed")
    again = flow.next_lease(0)
    assert again is not None and again.group_id == lease.group_id
    flow.attempt_failed(again, "worker_lost", "killed")
    report = flow.ledger.check()
    assert report.failed_tasks == 1 and report.failed_by_reason == {"worker_lost": 1}
    assert report.samples.generated == 0


def test_the_run_gives_up_when_nothing_can_be_trained() -> None:
    flow = make_flow(supervision={"max_untrained_batches": 2})
    with pytest.raises(RunError, match="4 groups in a row left without training"):
        while True:
            lease = flow.next_lease(0)
            assert lease is not None
            complete(flow, lease, outcomes=(0.0, 0.0))


def test_no_more_is_admitted_than_the_remaining_steps_can_use() -> None:
    flow = make_flow(steps=1)
    assert len(leases(flow)) == 2


def test_drop_policy_lets_no_stale_group_through() -> None:
    flow = make_flow(queue={"policy": "drop"}, max_staleness=0)
    old = [complete(flow, lease) for lease in leases(flow)]
    groups = batch(flow)
    assert groups == old
    trained(flow, old)
    late, fresh = leases(flow, version=1)
    complete(flow, late, oldest_version=0)
    complete(flow, fresh)
    replacement = flow.next_lease(1)
    assert replacement is None
    flow.changed.notify()
    assert asyncio.run(_first_wait(flow)) is None
    assert flow.ledger.report().samples.dropped_by_reason == {"stale": SAMPLES}
    replacement = flow.next_lease(1)
    assert replacement is not None
    complete(flow, replacement)
    groups = batch(flow)
    assert groups is not None
    assert late.group_id not in [group.entry.group_id for group in groups]


async def _first_wait(flow: Flow) -> list[ReadyGroup] | None:
    """One look of the learner at a queue that holds no full batch."""
    looks = iter([False, True])
    waiting = asyncio.create_task(flow.next_batch(until=lambda: next(looks)))
    await asyncio.sleep(0)
    flow.changed.notify()
    return await waiting


def test_resume_admits_what_was_under_way_anew() -> None:
    flow = make_flow()
    under_way = leases(flow)
    for lease in under_way[:2]:
        complete(flow, lease)
    groups = batch(flow)
    assert groups is not None
    trained(flow, groups)
    resumed = make_flow()
    resumed.restore(flow.state(), lineage=3)
    assert (resumed.step, resumed.version, resumed.label.lineage) == (1, 1, 3)
    tasks = [lease.task.task_id for lease in leases(resumed, version=1)]
    assert tasks[:2] == [lease.task.task_id for lease in under_way[2:]]
    resumed.ledger.check()


def test_every_task_is_drawn_once_per_epoch() -> None:
    flow = make_flow(max_staleness=8, steps=100)
    drawn = [lease.task.task_id for lease in leases(flow)][:7]
    assert len(set(drawn)) == 7
