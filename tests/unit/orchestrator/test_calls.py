"""Deadlines, signals and the restart budget: the small pieces that keep loops from hanging."""

import asyncio

import pytest

from orchestrator.calls import DeadlineExceeded, longest_waits, plain, waiting, within
from orchestrator.errors import RunError
from orchestrator.joining import join
from orchestrator.loops import LoopEnded, beside
from orchestrator.restarts import RestartBudget
from orchestrator.signal import Signal


def test_a_late_answer_names_the_call() -> None:
    async def main() -> None:
        await within(asyncio.sleep(60), 0.01, "the learner's step")

    with pytest.raises(DeadlineExceeded, match=r"the learner.s step did not answer within 0\.01 s"):
        asyncio.run(main())


def test_an_answer_in_time_is_passed_on() -> None:
    assert asyncio.run(within(asyncio.sleep(0, "answer"), 60, "a call")) == "answer"


def test_a_timeout_raised_by_the_call_itself_is_not_renamed() -> None:
    async def fails() -> None:
        raise TimeoutError("inside")

    with pytest.raises(TimeoutError, match="inside"):
        asyncio.run(within(fails(), 60, "a call"))


def test_ray_identifiers_and_advice_are_left_out() -> None:
    text = """The actor died unexpectedly before finishing this task.
\tclass_name: RolloutWorker
\tactor_id: 6d42de
\tpid: 17
The actor is dead because its worker process has died. Some common causes include: (1) memory"""
    assert plain(text) == (
        "The actor died unexpectedly before finishing this task. "
        "The actor is dead because its worker process has died."
    )


def test_every_waiter_wakes_once_per_change() -> None:
    async def main() -> int:
        signal = Signal()
        woken = 0

        async def waiter() -> None:
            nonlocal woken
            await signal.wait()
            woken += 1

        waiters = [asyncio.create_task(waiter()) for _ in range(3)]
        await asyncio.sleep(0)
        signal.notify()
        await asyncio.gather(*waiters)
        late = asyncio.create_task(signal.wait())
        await asyncio.sleep(0)
        assert not late.done()
        late.cancel()
        return woken

    assert asyncio.run(main()) == 3


def test_restarts_back_off_and_run_out_within_an_hour() -> None:
    budget = RestartBudget(per_hour=3, first_delay_s=1.0, max_delay_s=3.0)
    assert [budget.next_delay_s(now) for now in (0.0, 1.0, 2.0, 3.0)] == [1.0, 2.0, 3.0, None]
    assert budget.next_delay_s(3601.5) is not None


def test_a_loop_that_ends_by_itself_ends_the_script() -> None:
    async def ends() -> None:
        return

    async def main() -> None:
        script = asyncio.create_task(asyncio.sleep(60))
        await beside(script, {"feeding": ends()})

    with pytest.raises(LoopEnded, match="the feeding loop ended"):
        asyncio.run(main())


def test_a_loop_that_raises_gives_its_cause() -> None:
    async def raises() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())

    async def fails() -> None:
        raise RunError("no worker is left")

    async def main() -> None:
        script = asyncio.create_task(asyncio.sleep(60))
        await beside(script, {"feeding": raises()})

    with pytest.raises(RunError, match="no worker is left"):
        asyncio.run(main())


def test_the_script_ends_the_loops() -> None:
    async def main() -> tuple[str, bool]:
        stopped = asyncio.Event()

        async def endless() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                stopped.set()

        script = asyncio.create_task(asyncio.sleep(0.01, "done"))
        return await beside(script, {"feeding": endless()}), stopped.is_set()

    assert asyncio.run(main()) == ("done", True)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "no-such-host.invalid:2"])
def test_a_cluster_that_is_not_there_is_told_at_once(address: str) -> None:
    with pytest.raises(RunError, match=rf"cannot reach the Ray cluster at {address}"):
        join(address)


def test_a_death_of_which_ray_knows_nothing_is_told_in_plain_words() -> None:
    told = (
        "learner rank 0 died: The actor died unexpectedly before finishing this task.\n"
        "\tclass_name: _RankActor\n"
        "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a "
        "connection error code 2. End of file. Some common causes include: (1) the OOM killer"
    )
    assert plain(told) == (
        "learner rank 0 died: its process ended unexpectedly: it was killed, ran out of memory or "
        "crashed"
    )


def test_what_is_waited_for_is_known_the_longest_first() -> None:
    async def main() -> list[str]:
        never = asyncio.get_running_loop().create_future()
        with waiting("groups to train on"):
            call = asyncio.create_task(within(never, 60, "the trajectory store (group 7)"))
            await asyncio.sleep(0)
            told = longest_waits(5)
            assert longest_waits(1) == told[:1]
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        return told

    told = asyncio.run(main())
    assert told == ["groups to train on for 0 s", "the trajectory store (group 7) for 0 s"]
    assert longest_waits(5) == []
