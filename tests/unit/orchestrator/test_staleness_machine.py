"""Admission, queue and ledger driven together by random events: the contract holds throughout."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from orchestrator.admission import Admission, StalePolicy, drops_group, fresh_tokens
from orchestrator.history.ledger import Ledger
from orchestrator.history.transitions import (
    Admitted,
    Consumed,
    Dropped,
    Failed,
    Generated,
    Ready,
    Retried,
    Verified,
)
from orchestrator.queue import QueueEntry, ReadyQueue

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
    max_examples=60,
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
