"""The ready queue: order, bounds at admission, accounting of bytes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.queue import Bound, QueueError, ReadyQueue


def make(batch=2, groups=4, nbytes=400, worst=100, *, ordered=False) -> ReadyQueue[str]:
    return ReadyQueue(
        batch,
        max_groups=groups,
        max_bytes=nbytes,
        group_bytes=worst,
        in_admission_order=ordered,
    )


def filled(queue: ReadyQueue[str], admitted: int) -> ReadyQueue[str]:
    for group in range(admitted):
        queue.reserve(group)
    return queue


def ids(batch) -> list[int]:
    return [entry.group_id for entry in batch]


def test_a_batch_leaves_in_the_order_in_which_groups_became_ready():
    queue = filled(make(), 4)
    for group in (3, 0, 2):
        queue.put(group, f"item {group}", 10, now=float(group))
    batch = queue.take()
    assert ids(batch) == [3, 0]
    assert [(e.item, e.nbytes, e.ready_at) for e in batch] == [
        ("item 3", 10, 3.0),
        ("item 0", 10, 0.0),
    ]
    assert queue.take() == []
    queue.put(1, "item 1", 10, now=9.0)
    assert ids(queue.take()) == [2, 1]


def test_in_admission_order_a_batch_waits_for_its_first_groups():
    queue = filled(make(ordered=True), 4)
    for group in (1, 2, 3):
        queue.put(group, "", 10, now=0.0)
    assert not queue.can_take()
    assert queue.take() == []
    queue.put(0, "", 10, now=0.0)
    assert ids(queue.take()) == [0, 1]
    assert ids(queue.take()) == [2, 3]


def test_in_admission_order_a_group_that_left_is_not_waited_for():
    queue = filled(make(ordered=True), 4)
    for group in (1, 3):
        queue.put(group, "", 10, now=0.0)
    queue.release(0)
    assert not queue.can_take()
    queue.release(2)
    assert ids(queue.take()) == [1, 3]


def test_the_bound_in_groups_holds_until_groups_are_released_not_taken():
    queue = filled(make(groups=3, nbytes=10_000), 3)
    assert queue.full() is Bound.GROUPS
    queue.put(0, "", 1, now=0.0)
    queue.put(1, "", 1, now=0.0)
    queue.take()
    assert queue.full() is Bound.GROUPS
    queue.release(0)
    assert queue.full() is None


def test_the_bound_in_bytes_counts_the_worst_case_until_the_size_is_known():
    queue = filled(make(groups=100, nbytes=250, worst=100), 2)
    assert queue.full() is Bound.BYTES
    queue.put(0, "", 50, now=0.0)
    assert queue.full() is None
    queue.reserve(2)
    assert queue.full() is Bound.BYTES
    assert queue.stats(0.0).admitted_bytes == 250


def test_reserving_beyond_the_bound_is_refused():
    queue = filled(make(groups=2), 2)
    with pytest.raises(QueueError, match="group 2 cannot be admitted: the queue is full in groups"):
        queue.reserve(2)
    assert queue.stats(0.0).admitted_groups == 2


def test_nothing_admitted_is_refused_however_large():
    queue = filled(make(groups=4, nbytes=200, worst=100), 2)
    for group in (0, 1):
        queue.put(group, "", 10_000, now=0.0)
    assert ids(queue.take()) == [0, 1]


def test_groups_above_their_worst_case_cannot_stop_the_first_batch():
    queue = filled(make(batch=2, groups=4, nbytes=200, worst=100), 1)
    queue.put(0, "", 10_000, now=0.0)
    assert queue.full() is None
    queue.reserve(1)
    assert queue.full() is Bound.BYTES


@pytest.mark.parametrize(
    ("groups", "nbytes", "message"),
    [
        (1, 10_000, "a queue of 1 groups can never hold a batch of 2"),
        (4, 199, "2 groups of up to 100 bytes need 200"),
    ],
)
def test_a_capacity_below_one_batch_is_refused(groups, nbytes, message):
    with pytest.raises(ValueError, match=message):
        make(groups=groups, nbytes=nbytes)


def test_a_lost_group_keeps_its_place_and_its_reservation():
    queue = filled(make(ordered=True), 3)
    for group in (0, 1, 2):
        queue.put(group, f"item {group}", 10, now=0.0)
    assert queue.withdraw(0) == "item 0"
    assert queue.stats(0.0).admitted_bytes == 120
    assert queue.take() == []
    queue.put(0, "again", 20, now=1.0)
    assert ids(queue.take()) == [0, 1]


def test_calls_that_the_state_does_not_allow_are_refused():
    queue = filled(make(), 2)
    queue.put(0, "", 10, now=0.0)
    queue.put(1, "", 10, now=0.0)
    with pytest.raises(QueueError, match="group 0 has a reservation already"):
        queue.reserve(0)
    with pytest.raises(QueueError, match="group 0 is ready already"):
        queue.put(0, "", 10, now=0.0)
    queue.take()
    with pytest.raises(QueueError, match="group 0 is not expected: it was taken"):
        queue.put(0, "", 10, now=0.0)
    with pytest.raises(QueueError, match="group 0 is not ready: it was taken"):
        queue.withdraw(0)
    with pytest.raises(QueueError, match="group 7 is not expected: it was never admitted"):
        queue.put(7, "", 10, now=0.0)
    queue.release(0)
    with pytest.raises(QueueError, match="group 0 has no reservation"):
        queue.release(0)


def test_stats_tell_depth_bytes_age_and_what_holds_it_up():
    queue = make(batch=2, groups=3, nbytes=1_000)
    empty = queue.stats(5.0)
    assert (empty.ready_groups, empty.oldest_age_s, empty.full, empty.starved) == (
        0,
        0.0,
        None,
        True,
    )
    filled(queue, 3)
    queue.put(1, "", 40, now=10.0)
    queue.put(0, "", 30, now=12.0)
    stats = queue.stats(15.0)
    assert (stats.ready_groups, stats.ready_bytes) == (2, 70)
    assert (stats.admitted_groups, stats.admitted_bytes) == (3, 170)
    assert stats.oldest_age_s == 5.0
    assert stats.full is Bound.GROUPS
    assert not stats.starved
    assert len(queue) == 2


def test_starved_in_admission_order_means_that_the_first_groups_are_missing():
    queue = filled(make(ordered=True), 3)
    for group in (1, 2):
        queue.put(group, "", 10, now=0.0)
    assert queue.stats(0.0).starved


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["in", "put", "take", "out"]), st.integers(0, 150))),
    st.booleans(),
)
def test_bytes_are_what_the_groups_in_it_hold_and_all_come_back(events, ordered):
    queue = make(batch=2, groups=5, nbytes=450, ordered=ordered)
    held: dict[int, int] = {}
    unready: list[int] = []
    next_group = 0
    for event, number in events:
        if event == "in" and queue.full() is None:
            queue.reserve(next_group)
            held[next_group] = 100
            unready.append(next_group)
            next_group += 1
        elif event == "put" and unready:
            group = unready.pop(number % len(unready))
            queue.put(group, "", number, now=0.0)
            held[group] = number
        elif event == "take":
            batch = queue.take()
            assert len(batch) in (0, 2)
        elif event == "out" and held:
            group = sorted(held)[number % len(held)]
            queue.release(group)
            del held[group]
            unready = [g for g in unready if g != group]
        stats = queue.stats(0.0)
        assert (stats.admitted_groups, stats.admitted_bytes) == (len(held), sum(held.values()))
    for group in list(held):
        queue.release(group)
    stats = queue.stats(0.0)
    assert (stats.admitted_groups, stats.admitted_bytes, stats.ready_groups) == (0, 0, 0)
