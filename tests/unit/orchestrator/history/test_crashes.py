"""Crashes at any moment: a flow restored from whatever prefix was kept goes on to the same end."""

import random
from collections import Counter

from flows import ListJournal, batch, complete, make_flow, trained
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.cursor import TaskCursor
from orchestrator.flow import Flow
from orchestrator.history.ledger import Ledger
from orchestrator.history.transitions import Admitted, Consumed, Stepped
from orchestrator.leases import Lease
from orchestrator.store import ReadyGroup

STEPS = 5
CHANGES = {"steps": STEPS, "supervision": {"attempts": 3}}


class Driver:
    """One process after the other drives the run; a trajectory log outlives them."""

    def __init__(self, chance: random.Random, staleness: int, policy: str) -> None:
        self.chance = chance
        self.changes = {**CHANGES, "max_staleness": staleness, "queue": {"policy": policy}}
        self.journal = ListJournal()
        self.log: dict[tuple[int, int], ReadyGroup] = {}
        self.flow = self.begin()
        self.running: list[Lease] = []

    def begin(self) -> Flow:
        return make_flow(self.journal, **self.changes)

    def crash(self) -> None:
        """The last few appends may be lost; groups that were being generated are."""
        kept = max(0, len(self.journal.calls) - self.chance.randrange(4))
        del self.journal.calls[kept:]
        self.flow, self.running = self.begin(), []
        ledger = self.flow.replay(self.journal.all)
        survived = self.chance.random() < 0.8  # else the end of the log is torn
        ready = {key: self.log[key] for key in ledger.ready()[: None if survived else -1]}
        segments = {key: group.segment for key, group in self.log.items()}
        self.flow.restore(ledger, ready, segments, lineage=1)

    def generate(self) -> None:
        version = max(0, self.flow.version - self.chance.randrange(2))
        if (lease := self.flow.next_lease(version)) is not None:
            self.running.append(lease)

    def finish(self) -> None:
        if not self.running:
            return
        lease = self.running.pop(self.chance.randrange(len(self.running)))
        if self.chance.random() < 0.2:
            self.flow.attempt_failed(lease, "worker_lost", "killed")
            return
        outcomes = (1.0, 1.0) if self.chance.random() < 0.2 else (0.0, 1.0)
        self.log[lease.group_id, lease.attempt] = complete(self.flow, lease, outcomes)

    def train(self) -> None:
        if self.flow.queue_stats().starved:
            return
        groups = batch(self.flow)
        assert groups is not None
        trained(self.flow, groups, changed=self.chance.random() < 0.9)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 2), st.sampled_from(["mask", "wait", "drop"]))
def test_a_run_that_crashes_anywhere_loses_and_repeats_nothing(seed, staleness, policy):
    chance = random.Random(seed)
    driver = Driver(chance, staleness, policy)
    moves = [driver.generate] * 5 + [driver.finish] * 5 + [driver.train] * 2 + [driver.crash]
    for _ in range(3000):
        if driver.flow.step == STEPS:
            break
        chance.choice(moves)()
    assert driver.flow.step == STEPS, "it must come to its end"
    report = driver.flow.ledger.check()
    history = driver.journal.all
    assert Ledger.replayed(history).report() == report
    assert [t.step for t in history if isinstance(t, Stepped)] == list(range(1, STEPS + 1))
    consumed = Counter(t.group_id for t in history if isinstance(t, Consumed))
    assert set(consumed.values()) <= {1}
    cursor = TaskCursor(7, 0)
    admitted = [t for t in history if isinstance(t, Admitted)]
    assert [t.task_id for t in admitted] == [f"t{cursor.next()}" for _ in admitted]
    assert "resumed" not in report.failed_by_reason, "a restart is no failure of a task"
    under_way = report.in_flight_by_state
    ended = report.consumed_tasks + report.dropped_tasks + report.failed_tasks
    assert ended + sum(under_way.values()) == len(admitted)
