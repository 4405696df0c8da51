"""The staleness contract: admission, queue and ledger driven together by random events."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from orchestrator.admission import (
    Admission,
    AdmissionError,
    StalePolicy,
    drops_group,
    fresh_tokens,
    is_fresh,
)
from orchestrator.ledger import Ledger
from orchestrator.queue import QueueEntry, ReadyQueue
from orchestrator.transitions import (
    Admitted,
    Consumed,
    Dropped,
    Failed,
    Generated,
    Ready,
    Retried,
    Verified,
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
    versions = np.array([1, 3, 3, 4, 4, 2])
    offsets = np.array([0, 3, 3, 5, 6])
    tokens = fresh_tokens(versions, offsets, 5, 2, whole_samples=False)
    assert tokens.tolist() == [False, True, True, True, True, False]
    samples = fresh_tokens(versions, offsets, 5, 2, whole_samples=True)
    assert samples.tolist() == [False, False, False, True, True, False]


def test_no_tokens_are_no_trouble():
    none = fresh_tokens(np.array([], int), np.array([0, 0]), 5, 2, whole_samples=True)
    assert none.shape == (0,)


# All of it together

MAX_ATTEMPTS = 3
GROUP_BYTES = 100
"""What the queue believes to be the worst case; some groups turn out larger."""


@dataclass
class Run:
    """A group between its start and its end, as the world outside the pure parts sees it."""

    worker: int
    start_version: int
    eta_at_start: int
    attempt: int


class Spine(RuleBasedStateMachine):
    """Workers, learner and faults around admission, queue and ledger.

    Workers lag behind the learner by as much as they like; the learner holds a batch while
    everything else goes on; what is consumed is judged by the tokens' versions.
    """

    @initialize(
        batch=st.integers(1, 3),
        eta=st.integers(0, 3),
        workers=st.integers(1, 3),
        policy=st.sampled_from(StalePolicy),
        spare=st.sampled_from([0, 1, 4, 20]),
    )
    def begin(self, batch, eta, workers, policy, spare):
        self.batch, self.eta, self.policy = batch, eta, policy
        self.highest_eta = eta
        self.workers = [0] * workers
        self.admission = Admission(batch, eta)
        self.queue: ReadyQueue[tuple[int, int]] = ReadyQueue(
            batch,
            max_groups=batch + spare,
            max_bytes=(batch + spare) * GROUP_BYTES,
            group_bytes=GROUP_BYTES,
            in_admission_order=policy.in_admission_order,
        )
        self.ledger = Ledger()
        self.running: dict[int, Run] = {}
        self.started: dict[int, Run] = {}
        self.held: list[QueueEntry] = []
        self.admitted: set[int] = set()
        self.ended: set[int] = set()
        self.lags_trained: list[int] = []

    # Generation

    def start_one(self, worker: int) -> bool:
        version = self.workers[worker]
        group = self.admission.restart(version)
        if group is None and self.queue.full() is None:
            group = self.admission.admit(version)
            if group is not None:
                self.queue.reserve(group)
                self.ledger.apply(Admitted(group, f"task-{group}", 2))
                self.admitted.add(group)
        if group is None:
            return False
        attempt = self.ledger.group(group).attempt
        self.running[group] = self.started[group] = Run(worker, version, self.eta, attempt)
        return True

    def start(self, worker, count):
        worker %= len(self.workers)
        while count and self.start_one(worker):
            count -= 1

    @rule(worker=st.integers(0, 2), steps=st.integers(1, 3))
    def sync(self, worker, steps):
        worker %= len(self.workers)
        self.workers[worker] = min(self.admission.version, self.workers[worker] + steps)

    def finish_one(self, group: int, dynamic_sampling_drops: bool = False) -> None:
        run = self.running.pop(group)
        self.ledger.apply(Generated(group, run.attempt, (3, 5)), Verified(group, run.attempt))
        if dynamic_sampling_drops:
            self.end(group, Dropped(group, "zero_variance"))
            return
        self.ledger.apply(Ready(group, run.attempt))
        newest = self.workers[run.worker]
        self.queue.put(group, (run.start_version, newest), 30 * (group % 7), now=0.0)

    def finish(self, unfinished: set[int], uniform: set[int]) -> None:
        """All that run end, odd ids last: some stay, some have nothing to teach."""
        for place, group in enumerate(sorted(self.running, key=lambda g: (g % 2, g))):
            if place not in unfinished:
                self.finish_one(group, place in uniform)

    # One rule for both sides: hypothesis switches rules off at random, and without either of
    # them nothing would ever be trained.
    @rule(
        worker=st.integers(0, 2),
        count=st.sampled_from([0, 1, 5, 20]),
        unfinished=st.sets(st.integers(0, 12), max_size=3),
        uniform=st.sets(st.integers(0, 12), max_size=2),
        steps=st.integers(0, 5),
        hold=st.booleans(),
    )
    def work(self, worker, count, unfinished, uniform, steps, hold):
        """A worker starts some, some finish, the learner takes steps, and perhaps a batch more."""
        self.start(worker, count)
        self.finish(unfinished, uniform)
        for _ in range(steps):
            if not self.held:
                self.take()
            if self.held:
                self.train()
        if hold and not self.held:
            self.take()

    # Faults

    def lose(self, group: int) -> None:
        if self.ledger.group(group).attempt + 1 < MAX_ATTEMPTS:
            self.ledger.apply(Retried(group, "worker_lost"))
            self.admission.retry(group)
        else:
            self.end(group, Failed(group, "worker_lost"))

    @rule(
        fault=st.sampled_from(["attempt", "worker", "content", "gives up"]),
        pick=st.integers(0, 20),
    )
    def fault(self, fault, pick):
        if fault == "attempt" and self.running:
            group = sorted(self.running)[pick % len(self.running)]
            del self.running[group]
            self.lose(group)
        elif fault == "worker":
            self.replace_worker(pick % len(self.workers))
        elif fault == "content" and len(self.queue):
            group = self.queue.ready()[pick % len(self.queue)].group_id
            self.queue.withdraw(group)
            self.lose(group)
        elif fault == "gives up" and (waiting := self.admission.waiting):
            group = waiting[pick % len(waiting)]
            self.end(group, Failed(group, "gave_up"))

    def replace_worker(self, worker):
        for group in [g for g, run in self.running.items() if run.worker == worker]:
            del self.running[group]
            self.lose(group)
        self.workers[worker] = self.admission.version

    # Learner

    def end(self, group: int, transition: Dropped | Failed) -> None:
        self.ledger.apply(transition)
        self.admission.leave(group)
        self.queue.release(group)
        self.ended.add(group)

    def take(self) -> None:
        for entry in self.queue.ready():
            if drops_group(self.policy, entry.item[0], self.admission.version, self.eta):
                self.end(entry.group_id, Dropped(entry.group_id, "stale"))
        self.held = self.queue.take()
        if self.held and self.policy.in_admission_order:
            first = sorted(self.admitted - self.ended)[: self.batch]
            assert [entry.group_id for entry in self.held] == first
        for entry in self.held:
            lag = self.admission.version - entry.item[0]
            run = self.started[entry.group_id]
            if self.policy.in_admission_order:
                assert lag <= run.eta_at_start
            if self.highest_eta == 0:
                assert lag == 0

    def train(self) -> None:
        version = self.admission.version
        groups = [entry.group_id for entry in self.held]
        for entry in self.held:
            oldest, newest = entry.item
            versions = np.array([oldest, oldest, newest, oldest, oldest, oldest, newest, newest])
            fresh = fresh_tokens(
                versions, np.array([0, 3, 8]), version, self.eta, whole_samples=False
            )
            lags = (version - versions[fresh]).tolist()
            assert max(lags, default=0) <= self.eta
            self.lags_trained += lags
            trained = (int(fresh[:3].sum()), int(fresh[3:].sum()))
            masked = ({"stale": 3 - trained[0]}, {"stale": 5 - trained[1]})
            attempt = self.ledger.group(entry.group_id).attempt
            self.ledger.apply(Consumed(entry.group_id, attempt, version + 1, trained, masked))
        self.admission.consumed(groups)
        for group in groups:
            self.queue.release(group)
        self.ended.update(groups)
        self.held = []

    @precondition(lambda self: self.held)
    @rule()
    def skip_step(self):
        for entry in self.held:
            self.end(entry.group_id, Dropped(entry.group_id, "skipped_batch"))
        self.held = []

    @rule(eta=st.integers(0, 3))
    def change_bound(self, eta):
        self.eta = eta
        self.highest_eta = max(self.highest_eta, eta)
        self.admission.set_max_staleness(eta)

    # Always

    @invariant()
    def the_three_agree(self):
        live = self.admitted - self.ended
        assert self.admission.live == self.ledger.in_flight == len(live)
        assert self.queue.stats(0.0).admitted_groups == len(live)
        waiting = set(self.admission.waiting)
        ready = {entry.group_id for entry in self.queue.ready()}
        held = {entry.group_id for entry in self.held}
        parts = [waiting, ready, held, set(self.running)]
        assert sum(map(len, parts)) == len(live)
        assert set().union(*parts) == live

    @invariant()
    def counters_are_conserved(self):
        report = self.ledger.check()
        assert report.samples.generated >= 2 * report.consumed_tasks
        assert report.admitted_tasks == len(self.admitted)

    @invariant()
    def nothing_is_stuck(self):
        """If no worker and no step is busy, a worker at version v or the learner can go on."""
        if self.running or self.held:
            return
        version = self.admission.version
        waiting = self.admission.waiting
        can_restart = bool(waiting) and self.admission.may_start(waiting[0], version)
        can_admit = self.queue.full() is None and self.admission.headroom(version) > 0
        assert can_restart or can_admit or self.queue.can_take()

    def teardown(self):
        """Left alone, with workers that keep up, every admitted group ends and nothing leaks."""
        if not hasattr(self, "admission"):
            return
        last = max(self.admitted, default=-1)
        for _ in range(200):
            if self.held:
                self.train()
            self.workers = [self.admission.version] * len(self.workers)
            while self.start_one(0):
                pass
            for group in sorted(self.running):
                self.finish_one(group)
            self.take()
            if self.admitted - self.ended and min(self.admitted - self.ended) > last:
                break
        assert {g for g in self.admitted if g <= last} <= self.ended
        for entry in self.held:
            self.end(entry.group_id, Dropped(entry.group_id, "run_ended"))
        for group in self.admitted - self.ended:
            self.end(group, Dropped(group, "run_ended"))
        stats = self.queue.stats(0.0)
        assert (self.admission.live, stats.admitted_groups, stats.admitted_bytes) == (0, 0, 0)
        report = self.ledger.check()
        assert report.samples.pending == report.tokens.pending == self.ledger.in_flight == 0


TestSpine = Spine.TestCase
TestSpine.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.parametrize("policy", StalePolicy)
@pytest.mark.parametrize("eta", [0, 1, 3])
def test_a_long_run_uses_the_bound_and_keeps_it(policy, eta):
    """300 steps with workers that lag as far as they may: the lag reaches η, never more."""
    rng = random.Random(eta)
    spine = Spine()
    spine.begin(batch=4, eta=eta, workers=3, policy=policy, spare=4 * eta)
    while spine.admission.version < 300:
        for worker in range(3):
            if rng.random() < 0.3:
                spine.workers[worker] = spine.admission.version
            spine.start(worker, rng.randrange(1, 8))
        for group in [g for g in sorted(spine.running) if rng.random() < 0.5]:
            spine.finish_one(group, dynamic_sampling_drops=rng.random() < 0.2)
        if rng.random() < 0.05:
            spine.replace_worker(rng.randrange(3))
        spine.take()
        if spine.held:
            spine.train()
    assert max(spine.lags_trained) == eta
    spine.the_three_agree()
    spine.counters_are_conserved()
    spine.teardown()
