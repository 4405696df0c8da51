"""Fleets: what a target, a loss, a drain and a failed start do to the workers of a role."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import RunError
from orchestrator.fleet import Fleet
from orchestrator.restarts import RestartBudget
from orchestrator.signal import Signal
from orchestrator.workers import LossReason, Worker, WorkerState

READY, DRAINING = WorkerState.READY, WorkerState.DRAINING


class Remote:
    """A method of an actor: `.remote()` gives something to await."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    async def remote(self) -> object:
        return self._answer


class Actor:
    """A worker process that does as it is told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.progress = Remote(0)
        self.close = Remote(None)


@dataclass
class Machine:
    """Where the actors of a fleet run: who lives, who may start."""

    limit: int = 1000
    slow: set[str] = field(default_factory=set)
    killed: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    spawned: int = 0

    def spawn(self, name: str) -> Actor:
        self.spawned += 1
        return Actor(name)

    async def start(self, actor: Actor) -> None:
        if actor.name in self.slow:
            await asyncio.Event().wait()
        if self.spawned > self.limit:
            raise RunError("no room for another worker")

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor.name)

    def fleet(
        self, *, per_hour: int = 100, drain_timeout_s: float = 60.0, starts_at_once: int = 100
    ) -> Fleet:
        return Fleet(
            "rollout",
            self.spawn,
            self.start,
            changed=Signal(),
            tell=self.said.append,
            kill=self.kill,
            budget=RestartBudget(per_hour, first_delay_s=0.0),
            progress_timeout_s=60.0,
            drain_timeout_s=drain_timeout_s,
            starts_at_once=lambda: starts_at_once,
        )


async def until(fleet: Fleet, holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0)


def supervised(fleet: Fleet, workers: int, script: Callable[[], Awaitable[None]]) -> None:
    """Launch `workers`, play `script` beside the fleet's loop, which must not end by itself."""

    async def main() -> None:
        await fleet.launch(workers)
        loop = asyncio.create_task(fleet.supervise())
        play = asyncio.ensure_future(script())
        await asyncio.wait({loop, play}, return_when=asyncio.FIRST_COMPLETED)
        try:
            if loop.done():
                await loop
            await play
        finally:
            for task in (loop, play):
                task.cancel()
            await asyncio.gather(loop, play, return_exceptions=True)

    asyncio.run(main())


def settled(fleet: Fleet, workers: int) -> bool:
    return fleet.count(READY) == workers == len(fleet.workers)


def test_a_higher_target_starts_workers_at_once() -> None:
    machine = Machine()
    fleet = machine.fleet()

    async def script() -> None:
        fleet.set_target(4)
        await until(fleet, lambda: settled(fleet, 4))

    supervised(fleet, 1, script)
    assert sorted(fleet.workers) == [f"rollout-{i}" for i in range(4)]
    assert not fleet.restarts


def test_many_workers_start_a_few_at_a_time_and_can_be_called_off() -> None:
    machine = Machine(slow={f"rollout-{i}" for i in range(1, 1000)})
    fleet = machine.fleet(starts_at_once=2)

    async def script() -> None:
        fleet.set_target(500)
        await until(fleet, lambda: machine.spawned == 3)
        for _ in range(50):
            await asyncio.sleep(0)
        assert machine.spawned == 3, "the others wait for their turn"
        fleet.set_target(1)
        await until(fleet, lambda: settled(fleet, 1))
        machine.slow.clear()
        fleet.set_target(5)
        await until(fleet, lambda: settled(fleet, 5))

    supervised(fleet, 1, script)


def test_a_lower_target_lets_the_least_loaded_finish_what_it_has() -> None:
    machine = Machine()
    fleet = machine.fleet()

    async def script() -> None:
        busy, lighter = fleet.workers["rollout-0"], fleet.workers["rollout-1"]
        busy.in_flight, lighter.in_flight = 5, 2
        fleet.set_target(1)
        await until(fleet, lambda: lighter.state is DRAINING)
        assert fleet.ready() == [busy], "a draining worker takes no work"
        assert not machine.killed
        lighter.in_flight = 0
        fleet._changed.notify()
        await until(fleet, lambda: settled(fleet, 1))
        assert machine.killed == ["rollout-1"]
        assert not lighter.given_up

    supervised(fleet, 2, script)


def test_a_worker_that_does_not_finish_in_time_hands_its_work_back() -> None:
    machine = Machine()
    fleet = machine.fleet(drain_timeout_s=0.01)

    async def script() -> None:
        stuck = fleet.workers["rollout-1"]
        stuck.in_flight = 3
        fleet.workers["rollout-0"].in_flight = 4
        fleet.set_target(1)
        await until(fleet, lambda: settled(fleet, 1))
        assert stuck.given_up and machine.killed == ["rollout-1"]
        assert any("did not finish 3 groups" in text for text in machine.said)

    supervised(fleet, 2, script)


def test_a_lost_worker_is_replaced_and_counted_by_reason() -> None:
    machine = Machine()
    fleet = machine.fleet()

    async def script() -> None:
        fleet.report_lost(fleet.workers["rollout-0"], LossReason.NO_PROGRESS, "it hung")
        await until(fleet, lambda: settled(fleet, 2))

    supervised(fleet, 2, script)
    assert sorted(fleet.workers) == ["rollout-1", "rollout-2"]
    assert fleet.restarts == {LossReason.NO_PROGRESS: 1}


def test_a_draining_worker_that_dies_is_not_replaced() -> None:
    machine = Machine()
    fleet = machine.fleet()

    async def script() -> None:
        worker = fleet.workers["rollout-1"]
        worker.in_flight = 1
        fleet.workers["rollout-0"].in_flight = 2
        fleet.set_target(1)
        await until(fleet, lambda: worker.state is DRAINING)
        fleet.report_lost(worker, LossReason.DIED, "killed")
        await until(fleet, lambda: settled(fleet, 1))
        for _ in range(50):
            await asyncio.sleep(0)
        assert settled(fleet, 1) and machine.spawned == 2

    supervised(fleet, 2, script)
    assert not fleet.restarts


def test_a_worker_that_has_not_started_is_given_up_first() -> None:
    machine = Machine(slow={"rollout-1"})
    fleet = machine.fleet()

    async def script() -> None:
        fleet.set_target(2)
        await until(fleet, lambda: "rollout-1" in fleet.workers)
        fleet.set_target(1)
        await until(fleet, lambda: settled(fleet, 1))
        assert machine.killed == ["rollout-1"]

    supervised(fleet, 1, script)


def test_a_failed_growth_does_not_end_a_run_that_has_workers() -> None:
    machine = Machine(limit=1)
    fleet = machine.fleet(per_hour=2)

    async def script() -> None:
        fleet.set_target(2)
        await until(fleet, lambda: any("goes on with 1 of 2" in text for text in machine.said))
        machine.limit = 1000
        fleet.set_target(1)
        await until(fleet, lambda: settled(fleet, 1))

    supervised(fleet, 1, script)
    assert fleet.restarts[LossReason.START_FAILED] == 3


def test_a_spent_budget_ends_a_run_that_has_no_worker_left() -> None:
    machine = Machine()
    fleet = machine.fleet(per_hour=0)

    async def script() -> None:
        fleet.report_lost(fleet.workers["rollout-0"], LossReason.DIED, "killed")
        await asyncio.Event().wait()

    with pytest.raises(BaseExceptionGroup) as caught:
        supervised(fleet, 1, script)
    assert "rollout-0 died (killed) and the hourly budget" in str(caught.value.exceptions[0])


def test_a_first_launch_that_fails_is_an_error() -> None:
    fleet = Machine(limit=0).fleet()
    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(fleet.launch(1))
    error = caught.value.exceptions[0]
    assert "rollout-0 did not start: no room" in str(error)
    assert error.culprit == "rollout-0", "its log is the one to look at"


events = st.one_of(
    st.tuples(st.just("target"), st.integers(1, 6)),
    st.tuples(st.just("lose"), st.integers(0, 5)),
    st.tuples(st.just("load"), st.integers(0, 5)),
    st.tuples(st.just("finish"), st.integers(0, 5)),
    st.tuples(st.just("breathe"), st.integers(1, 20)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(events, max_size=25), st.integers(1, 4))
def test_whatever_happens_the_fleet_ends_at_its_target(
    script_events: list[tuple[str, int]], first: int
) -> None:
    machine = Machine()
    fleet = machine.fleet(per_hour=1000)

    def pick(index: int) -> Worker | None:
        there = list(fleet.workers.values())
        return there[index % len(there)] if there else None

    async def script() -> None:
        for name, value in script_events:
            worker = pick(value)
            if name == "target":
                fleet.set_target(value)
            elif name == "breathe":
                for _ in range(value):
                    await asyncio.sleep(0)
            elif worker is not None and name == "lose":
                fleet.report_lost(worker, LossReason.DIED, "killed")
            elif worker is not None and name == "load" and worker in fleet.ready():
                worker.in_flight += 1
            elif worker is not None and name == "finish" and worker.in_flight:
                worker.in_flight -= 1
                fleet._changed.notify()
        for worker in list(fleet.workers.values()):
            worker.in_flight = 0
        fleet._changed.notify()
        await until(fleet, lambda: settled(fleet, fleet.target))

    supervised(fleet, first, script)
    assert len(set(machine.killed)) == len(machine.killed), "each actor is killed once"
    assert machine.spawned == len(machine.killed) + len(fleet.workers)


def test_many_losses_at_once_spend_the_budget_and_the_rest_waits() -> None:
    machine = Machine()
    fleet = machine.fleet(per_hour=2)

    async def script() -> None:
        for worker in list(fleet.workers.values()):
            fleet.report_lost(worker, LossReason.DIED, "its node is gone")
        await until(fleet, lambda: fleet.count(READY) == 2)
        assert any("the run goes on" in text for text in machine.said)

    supervised(fleet, 4, script)


def test_a_draining_worker_is_not_quarantined_and_ends() -> None:
    machine = Machine()
    fleet = machine.fleet()

    async def script() -> None:
        worker = fleet.workers["rollout-1"]
        worker.in_flight = 1
        fleet.workers["rollout-0"].in_flight = 2
        fleet.set_target(1)
        await until(fleet, lambda: worker.state is DRAINING)
        fleet.quarantine(worker, "its probe failed")
        worker.in_flight = 0
        fleet._changed.notify()
        await until(fleet, lambda: settled(fleet, 1))

    supervised(fleet, 2, script)


def test_a_start_that_completes_while_it_is_given_up_leaves_nobody() -> None:
    machine = Machine()
    fleet = machine.fleet()

    async def script() -> None:
        fleet.set_target(2)
        await until(fleet, lambda: "rollout-1" in fleet.workers)
        fleet.workers["rollout-1"].given_up = True
        await until(fleet, lambda: settled(fleet, 1))
        assert machine.killed == ["rollout-1"]

    supervised(fleet, 1, script)
