"""The staleness contract: who may start, what is too old."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.admission import (
    Admission,
    AdmissionError,
    StalePolicy,
    drops_group,
    fresh_tokens,
    is_fresh,
)

# Rule 1


def test_at_zero_staleness_exactly_one_batch_is_admitted_per_version():
    admission = Admission(batch_groups=3, max_staleness=0)
    assert [admission.admit(0) for _ in range(4)] == [0, 1, 2, None]
    assert admission.consumed([0, 1, 2]) == 1
    assert admission.admit(0) is None, "this worker still serves version 0"
    assert [admission.admit(1) for _ in range(4)] == [3, 4, 5, None]


@pytest.mark.parametrize(("eta", "lag"), [(0, 0), (2, 0), (2, 1), (2, 2), (2, 3), (2, 9)])
def test_a_lagging_worker_gets_one_batch_less_per_version_of_lag(eta, lag):
    admission = Admission(batch_groups=4, max_staleness=eta, version=10)
    admitted = 0
    while admission.admit(10 - lag) is not None:
        admitted += 1
    assert admitted == max(0, (1 + eta - lag) * 4)


def test_a_retry_tests_only_the_groups_ahead_of_it():
    admission = Admission(batch_groups=2, max_staleness=1)
    assert [admission.admit(0) for _ in range(5)] == [0, 1, 2, 3, None]
    admission.retry(1)
    assert admission.may_start(1, 0)
    assert admission.restart(0) == 1
    assert admission.restart(0) is None
    assert admission.admit(0) is None


def test_the_earliest_waiting_group_is_started_first():
    admission = Admission(batch_groups=4, max_staleness=0)
    for _ in range(4):
        admission.admit(0)
    for group in (2, 0, 3):
        admission.retry(group)
    assert admission.waiting == (0, 2, 3)
    assert [admission.restart(0) for _ in range(3)] == [0, 2, 3]


def test_a_retry_on_a_lagging_worker_waits_for_a_fresh_one():
    admission = Admission(batch_groups=1, max_staleness=1)
    admission.admit(0), admission.admit(0)
    admission.consumed([0])
    admission.admit(1)
    admission.retry(2)
    assert not admission.may_start(2, 0)
    assert admission.restart(0) is None
    assert admission.restart(1) == 2


def test_dropped_and_failed_groups_leave_and_make_room():
    admission = Admission(batch_groups=2, max_staleness=0)
    admission.admit(0), admission.admit(0)
    admission.leave(0)
    admission.retry(1)
    admission.leave(1)
    assert (admission.live, admission.waiting) == (0, ())
    assert [admission.admit(0) for _ in range(3)] == [2, 3, None]


def test_lowering_and_raising_the_bound_acts_on_the_next_start():
    admission = Admission(batch_groups=2, max_staleness=2)
    assert [admission.admit(0) for _ in range(4)] == [0, 1, 2, 3]
    admission.set_max_staleness(0)
    assert admission.admit(0) is None
    admission.retry(3)
    assert admission.restart(0) is None, "two groups are ahead of it"
    admission.leave(0), admission.leave(1)
    assert admission.restart(0) == 3
    admission.set_max_staleness(1)
    assert [admission.admit(0) for _ in range(3)] == [4, 5, None]


def test_a_version_that_the_learner_has_not_reached_starts_nothing():
    admission = Admission(batch_groups=2, max_staleness=3, version=5)
    assert admission.limit(6) == 0
    assert admission.admit(6) is None
    assert admission.admit(5) == 0


def test_the_version_rises_in_the_instant_in_which_the_groups_leave():
    admission = Admission(batch_groups=2, max_staleness=0)
    admission.admit(0), admission.admit(0)
    assert admission.consumed([1, 0]) == admission.version == 1
    assert admission.live == 0


@pytest.mark.parametrize("groups", [[0], [0, 0], []])
def test_less_than_a_batch_cannot_raise_the_version(groups):
    admission = Admission(batch_groups=2, max_staleness=1)
    admission.admit(0), admission.admit(0)
    with pytest.raises(AdmissionError, match="batches of 2"):
        admission.consumed(groups)
    assert (admission.version, admission.live) == (0, 2)


def test_calls_that_the_order_does_not_allow_are_refused_and_change_nothing():
    admission = Admission(batch_groups=2, max_staleness=1)
    for _ in range(3):
        admission.admit(0)
    admission.leave(0)
    admission.retry(1)
    with pytest.raises(AdmissionError, match="group 0 has left"):
        admission.leave(0)
    with pytest.raises(AdmissionError, match="group 7 was never admitted"):
        admission.retry(7)
    with pytest.raises(AdmissionError, match="group 1 waits"):
        admission.retry(1)
    with pytest.raises(AdmissionError, match="group 1 waits"):
        admission.consumed([2, 1])
    assert (admission.live, admission.waiting, admission.version) == (2, (1,), 0)


def test_a_run_is_taken_up_from_the_started_groups_alone():
    admission = Admission(2, 1, version=4, next_group=12, live=[9, 11, 10])
    assert admission.headroom(4) == 1
    admission.retry(10)
    assert admission.restart(3) == 10
    assert admission.admit(4) == 12
    with pytest.raises(ValueError, match="not below next_group"):
        Admission(2, 1, next_group=9, live=[9])


@pytest.mark.parametrize(("batch", "eta"), [(0, 1), (1, -1)])
def test_meaningless_settings_are_refused(batch, eta):
    with pytest.raises(ValueError, match=r"batch_groups|max_staleness"):
        Admission(batch, eta)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(0, 4))
def test_admission_agrees_with_the_contract_written_out(data, batch, eta):
    """Against the rule computed naively from lists."""
    admission = Admission(batch, eta)
    live: list[int] = []
    waiting: set[int] = set()
    version = next_group = 0
    for _ in range(data.draw(st.integers(1, 25))):
        worker = data.draw(st.integers(0, version))
        limit = (1 + eta - (version - worker)) * batch
        action = data.draw(st.sampled_from(["admit", "retry", "restart", "leave", "train"]))
        if action == "admit":
            expected = next_group if len(live) < limit else None
            assert admission.admit(worker) == expected
            if expected is not None:
                live.append(next_group)
                next_group += 1
        elif action == "restart":
            first = min(waiting, default=None)
            allowed = first is not None and sum(g < first for g in live) < limit
            assert admission.restart(worker) == (first if allowed else None)
            waiting -= {first} if allowed else set()
        elif action == "train" and len(started := [g for g in live if g not in waiting]) >= batch:
            admission.consumed(started[:batch])
            live = [g for g in live if g not in started[:batch]]
            version += 1
        elif action == "retry" and (started := [g for g in live if g not in waiting]):
            group = data.draw(st.sampled_from(started))
            admission.retry(group)
            waiting.add(group)
        elif action == "leave" and live:
            group = data.draw(st.sampled_from(live))
            admission.leave(group)
            live.remove(group)
            waiting.discard(group)
        assert (admission.live, admission.version) == (len(live), version)
        assert admission.waiting == tuple(sorted(waiting))


# Consumption


def test_a_token_trains_up_to_and_including_the_bound():
    assert is_fresh(3, 5, 2)
    assert not is_fresh(2, 5, 2)
    assert is_fresh(5, 5, 0)


@pytest.mark.parametrize(
    ("policy", "oldest", "dropped"),
    [("mask", 0, False), ("wait", 0, False), ("drop", 0, True), ("drop", 3, False)],
)
def test_only_the_drop_policy_drops_and_only_what_is_too_old(policy, oldest, dropped):
    assert drops_group(StalePolicy(policy), oldest, 5, 2) is dropped


def test_only_waiting_consumes_in_admission_order():
    assert [p for p in StalePolicy if p.in_admission_order] == [StalePolicy.WAIT]


def test_stale_tokens_alone_or_their_whole_samples_are_kept_out():
    versions = np.array([3, 1, 3, 4, 4, 2])
    offsets = np.array([0, 3, 3, 5, 6])
    tokens = fresh_tokens(versions, offsets, 5, 2, whole_samples=False)
    assert tokens.tolist() == [True, False, True, True, True, False]
    samples = fresh_tokens(versions, offsets, 5, 2, whole_samples=True)
    assert samples.tolist() == [False, False, False, True, True, False]


def test_no_tokens_are_no_trouble():
    none = fresh_tokens(np.array([], int), np.array([0, 0]), 5, 2, whole_samples=True)
    assert none.shape == (0,)
