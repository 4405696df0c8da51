"""Admission, ledger and queue moved as one: leases, retries, drops, batches, resume."""

import asyncio
from dataclasses import replace

import pytest
from flows import (
    SAMPLES,
    ListJournal,
    batch,
    complete,
    entry_of,
    leases,
    make_flow,
    trained,
)

from orchestrator.errors import RunError
from orchestrator.flow import Flow
from orchestrator.history.transitions import Admitted
from orchestrator.store import ReadyGroup


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


def test_a_resumed_flow_goes_on_as_if_nothing_had_happened() -> None:
    journal = ListJournal()
    flow = make_flow(journal)
    under_way = leases(flow)
    for lease in under_way[:2]:
        complete(flow, lease)
    groups = batch(flow)
    assert groups is not None
    trained(flow, groups)
    kept = complete(flow, under_way[2])
    resumed = make_flow(journal)
    ledger = resumed.replay(journal.all)
    assert ledger.ready() == [(2, 0)]
    resumed.restore(ledger, {(2, 0): kept}, {(2, 0): 0}, lineage=3)
    assert (resumed.step, resumed.version, resumed.label.lineage) == (1, 1, 3)
    assert resumed.queue_stats().ready_groups == 1
    again, *new = leases(resumed, version=1)
    assert (again.group_id, again.attempt, again.task) == (3, 1, under_way[3].task)
    assert [lease.group_id for lease in new] == [4, 5]
    assert [lease.task for lease in new] == [lease.task for lease in leases(flow, version=1)]
    complete(resumed, again)
    assert [g.entry.group_id for g in batch(resumed) or []] == [2, 3]
    assert resumed.ledger.check().samples.superseded == 0, "it had no samples yet"


def test_a_ready_group_whose_content_is_lost_is_generated_once_more() -> None:
    journal = ListJournal()
    flow = make_flow(journal, supervision={"attempts": 1})
    complete(flow, leases(flow)[0])
    resumed = make_flow(journal, supervision={"attempts": 1})
    resumed.restore(resumed.replay(journal.all), {}, {}, lineage=1)
    report = resumed.ledger.check()
    assert report.samples.superseded_by_reason == {"resumed": SAMPLES}
    assert report.failed_tasks == 0, "a restart of the run is not the task's failure"
    assert [lease.group_id for lease in leases(resumed)] == [0, 1, 2, 3]


def test_a_task_that_is_gone_from_the_data_is_named() -> None:
    journal = ListJournal()
    journal.append([Admitted(0, "no-such-task", SAMPLES)])
    flow = make_flow()
    ledger = flow.replay(journal.all)
    with pytest.raises(RunError, match="'no-such-task' was under way"):
        flow.restore(ledger, {}, {}, lineage=1)


def test_segments_of_the_log_are_let_go_once_no_step_would_need_them() -> None:
    flow = make_flow()
    for number in range(3):
        for lease in leases(flow, version=number):
            complete(flow, lease, segment=number)
        groups = batch(flow)
        assert groups is not None
        trained(flow, groups)
    # Segment 0 was used by steps 1 and 2, segment 1 by step 3, segment 2 is on its way.
    assert flow.unneeded_segments(1) == []
    assert flow.unneeded_segments(2) == [0]
    assert flow.unneeded_segments(9) == [1], "what is on its way stays"


def test_segments_of_before_a_restart_are_let_go_too() -> None:
    journal = ListJournal()
    flow = make_flow(journal)
    for number in range(2):
        for lease in leases(flow, version=number):
            complete(flow, lease, segment=number)
        groups = batch(flow)
        assert groups is not None
        trained(flow, groups)
    resumed = make_flow(journal)
    ledger = resumed.replay(journal.all)
    # Groups 0 to 3 are in segment 0, 4 and 5 in segment 1; 2 and 3 were part of step 2.
    segments = {(group, 0): group // 4 for group in range(6)}
    ready = {key: complete_elsewhere(key, segments[key]) for key in ledger.ready()}
    resumed.restore(ledger, ready, segments, lineage=1)
    assert resumed.unneeded_segments(1) == []
    assert resumed.unneeded_segments(2) == [0]


def complete_elsewhere(key: tuple[int, int], segment: int) -> ReadyGroup:
    """A group as the trajectory log gives it back."""
    other = make_flow()
    lease = replace(leases(other)[0], group_id=key[0], attempt=key[1])
    return ReadyGroup(entry_of(lease), lease.attempt, 100, 0, segment)


def test_attempts_that_a_restart_ended_are_none_of_the_tasks() -> None:
    journal = ListJournal()
    flow = make_flow(journal, supervision={"attempts": 2})
    again = flow.next_lease(0)
    for lineage in range(1, 6):
        flow = make_flow(journal, supervision={"attempts": 2})
        flow.restore(flow.replay(journal.all), {}, {}, lineage=lineage)
        again = flow.next_lease(0)
        assert again is not None and again.attempt == again.pardoned == lineage
    assert again is not None
    flow.attempt_failed(again, "worker_lost", "killed")
    assert flow.ledger.report().failed_tasks == 0


def test_a_deterministic_run_does_not_go_on_without_what_was_ready() -> None:
    journal = ListJournal()
    flow = make_flow(journal, deterministic=True)
    first, *_ = leases(flow)
    complete(flow, first)
    resumed = make_flow(journal, deterministic=True)
    with pytest.raises(RunError, match="group 0 was ready and is not in the trajectory log"):
        resumed.restore(resumed.replay(journal.all), {}, {}, lineage=1)


def test_every_task_is_drawn_once_per_epoch() -> None:
    flow = make_flow(max_staleness=8, steps=100)
    drawn = [lease.task.task_id for lease in leases(flow)][:7]
    assert len(set(drawn)) == 7


def test_a_raised_staleness_bound_lets_more_groups_start_and_a_lowered_one_fewer() -> None:
    flow = make_flow()
    assert len(leases(flow)) == 4
    limits = flow.set_limits(max_staleness=2, max_groups=None)
    assert (limits.max_staleness, limits.max_groups) == (2, 6), "an implied bound follows"
    assert len(leases(flow)) == 2
    assert flow.set_limits(max_staleness=0, max_groups=None).max_groups == 2
    assert leases(flow) == []


def test_an_explicit_bound_on_groups_stays_when_staleness_changes() -> None:
    flow = make_flow(queue={"max_groups": 3})
    assert flow.set_limits(max_staleness=3, max_groups=None).max_groups == 3
    assert len(leases(flow)) == 3
    assert flow.set_limits(max_staleness=None, max_groups=5).max_staleness == 3
    assert len(leases(flow)) == 2


def test_impossible_bounds_change_nothing() -> None:
    flow = make_flow()
    before = flow.limits
    with pytest.raises(ValueError, match="can never hold a batch"):
        flow.set_limits(max_staleness=0, max_groups=1)
    assert flow.limits == before


def test_an_attempt_ended_on_purpose_does_not_count() -> None:
    flow = make_flow(supervision={"attempts": 2})
    (lease, *_) = leases(flow)
    for _ in range(5):
        flow.attempt_failed(lease, "drained", "scaled away", pardoned=True)
        lease = next(again for again in leases(flow) if again.group_id == lease.group_id)
    flow.attempt_failed(lease, "worker_lost", "killed")
    lease = next(again for again in leases(flow) if again.group_id == lease.group_id)
    assert flow.ledger.report().failed_tasks == 0
    flow.attempt_failed(lease, "worker_lost", "killed")
    assert flow.ledger.report().failed_tasks == 1


def test_dropping_what_a_lowered_bound_made_old_does_not_end_the_run() -> None:
    flow = make_flow(queue={"policy": "drop"}, supervision={"max_untrained_batches": 1})
    for lease in leases(flow):
        complete(flow, lease)
    groups = batch(flow)
    assert groups is not None
    trained(flow, groups)
    flow.set_limits(max_staleness=0, max_groups=None)
    asyncio.run(flow.next_batch(until=lambda: flow.queue_stats().ready_groups == 0))
    assert flow.ledger.report().samples.dropped_by_reason == {"stale": 4}


def test_a_full_queue_blocks_admission_too() -> None:
    flow = make_flow(queue={"max_groups": 2})
    assert not flow.admission_blocked(0)
    assert len(leases(flow)) == 2
    assert flow.admission_blocked(0)
