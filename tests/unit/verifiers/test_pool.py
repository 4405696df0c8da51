import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import verifier_doubles  # noqa: F401  registers the doubles

from verifiers.pool import KillablePool, PoolClosed
from verifiers.process import ChildLost, ChildProcess
from verifiers.registry import resolve
from verifiers.verdict import Question, Verdict

QUESTION = Question("task", "prompt", "right")
DEADLINE_S = 2.0
LIMIT_BYTES = 1 << 30


class Bench:
    """A running pool with its event loop."""

    def __init__(self, runner: asyncio.Runner, pool: KillablePool) -> None:
        self.runner = runner
        self.pool = pool

    def score(self, name: str, completions: Sequence[str]) -> list[Verdict]:
        return self.runner.run(self.pool.score(resolve(name), QUESTION, completions))


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        pool = KillablePool(2, DEADLINE_S, LIMIT_BYTES)
        runner.run(pool.start())
        yield Bench(runner, pool)
        while len(pids := pool.pids) < 2:
            runner.run(asyncio.sleep(0.02))
        runner.run(pool.close())
        assert not any(running(pid) for pid in pids)


def running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int) -> None:
    end = time.monotonic() + 60
    while running(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not running(pid)


def statuses(verdicts: Sequence[Verdict]) -> list[str]:
    return [verdict.status.value for verdict in verdicts]


def test_verdicts_come_in_the_order_of_completions(bench: Bench) -> None:
    completions = [("right" if i % 3 == 0 else "wrong") for i in range(20)]
    verdicts = bench.score("double_obedient", completions)
    assert [verdict.reward for verdict in verdicts] == [float(i % 3 == 0) for i in range(20)]
    assert all(verdict.seconds >= 0 for verdict in verdicts)
    assert bench.score("double_obedient", []) == []


def test_an_endless_loop_times_out_and_harms_no_other_sample(bench: Bench) -> None:
    before = bench.pool.pids
    verdicts = bench.score("double_obedient", ["right", "loop", "wrong", "right", "wrong"])
    assert statuses(verdicts) == ["ok", "timeout", "ok", "ok", "ok"]
    assert [verdict.reward for verdict in verdicts] == [1.0, None, 0.0, 1.0, 0.0]
    assert "'double_obedient' did not answer within 2 s" in verdicts[1].detail
    assert verdicts[1].seconds >= DEADLINE_S
    lost = set(before) - set(bench.pool.pids)
    assert len(lost) == 1
    assert not running(lost.pop())


@pytest.mark.parametrize(
    ("completion", "cause"),
    [
        ("sys.exit", "raised SystemExit: enough"),
        ("raise", "raised LookupError: no such thing"),
        ("surrogate", "raised LookupError: ?"),
        ("memory", "raised MemoryError"),
        ("recurse", "raised RecursionError"),
        ("return nan", "must be finite"),
        ("return inf", "must be finite"),
        ("return 1.5", "reward 1.5 not in [0, 1]"),
        ("return -0.1", "reward -0.1 not in [0, 1]"),
        ("return 'one'", "must be a number, got str"),
        ("return None", "must be a number, got NoneType"),
        ("return [1.0]", "must be a number, got list"),
        ("return {'right':1}", "declares no weights"),
    ],
)
def test_misbehaviour_is_an_error_that_names_the_verifier(
    bench: Bench, completion: str, cause: str
) -> None:
    verdicts = bench.score("double_obedient", ["right", completion, "wrong"])
    assert statuses(verdicts) == ["ok", "error", "ok"]
    assert [verdict.reward for verdict in verdicts] == [1.0, None, 0.0]
    assert "'double_obedient'" in verdicts[1].detail
    assert cause in verdicts[1].detail


def test_every_completion_may_take_its_process_with_it(bench: Bench) -> None:
    verdicts = bench.score("double_obedient", ["segfault", "right", "exit 0", "exit 3"])
    assert statuses(verdicts) == ["error", "ok", "error", "error"]
    assert "the process died of SIGSEGV" in verdicts[0].detail
    assert "the process exited with code 0" in verdicts[2].detail
    assert "the process exited with code 3" in verdicts[3].detail


def test_an_answer_too_deep_to_read_costs_its_own_verdict(bench: Bench) -> None:
    verdicts = bench.score("double_obedient", ["right", "nest", "right"])
    assert statuses(verdicts) == ["ok", "error", "ok"]
    assert "unreadable message" in verdicts[1].detail


def test_what_a_verifier_prints_does_not_reach_the_protocol(bench: Bench) -> None:
    verdicts = bench.score("double_obedient", ["print", "right"])
    assert [verdict.reward for verdict in verdicts] == [1.0, 1.0]


def test_children_are_light(bench: Bench) -> None:
    assert bench.score("double_obedient", ["modules"])[0].detail == ""


def test_children_that_were_killed_are_replaced(bench: Bench) -> None:
    before = bench.pool.pids
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    verdicts = bench.score("double_obedient", ["right", "wrong", "right", "wrong"])
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 1.0, 0.0]
    assert not set(before) & set(bench.pool.pids)


def test_questions_overlap(bench: Bench) -> None:
    async def both() -> list[list[Verdict]]:
        obedient = resolve("double_obedient")
        questions = [Question(str(i), "", str(i)) for i in range(10)]
        return await asyncio.gather(
            *(bench.pool.score(obedient, question, list("0123456789")) for question in questions)
        )

    for index, verdicts in enumerate(bench.runner.run(both())):
        assert [verdict.reward for verdict in verdicts] == [float(i == index) for i in range(10)]


def test_a_class_is_built_once_per_process(bench: Bench) -> None:
    verdicts = bench.score("double_class", ["a"] * 6)
    assert {verdict.parts["built"] for verdict in verdicts} == {1.0}
    assert max(verdict.parts["calls"] for verdict in verdicts) >= 3


def test_async_and_undecorated_verifiers_run_isolated(bench: Bench) -> None:
    for name in ("double_async_isolated", "verifier_doubles:Plain"):
        verdicts = bench.score(name, ["right", "wrong"])
        assert [verdict.reward for verdict in verdicts] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("double_broken", "did not load: ImportError: a library is missing"),
        ("double_deadly", "did not load: the process exited with code 7"),
    ],
)
def test_a_verifier_that_cannot_load_is_an_error(bench: Bench, name: str, cause: str) -> None:
    [verdict] = bench.score(name, ["right"])
    assert verdict.status == "error"
    assert cause in verdict.detail
    assert bench.score("double_obedient", ["right"])[0].reward == 1.0


def test_a_group_is_scored_whole_or_not_at_all(bench: Bench) -> None:
    verdicts = bench.score("double_group_isolated", ["a", "b", "c", "d"])
    assert [verdict.reward for verdict in verdicts] == [0.25] * 4
    verdicts = bench.score("double_group_isolated", ["a", "crash", "c"])
    assert statuses(verdicts) == ["error"] * 3
    assert all("exited with code 3" in verdict.detail for verdict in verdicts)


def test_closing_a_pool_ends_what_is_running() -> None:
    async def scenario() -> tuple[list[int], list[object]]:
        pool = KillablePool(1, 1000.0, LIMIT_BYTES)
        with pytest.raises(PoolClosed):
            await pool.score(resolve("double_obedient"), QUESTION, ["right"])
        await pool.start()
        obedient = resolve("double_obedient")
        spawned = await pool.score(obedient, QUESTION, ["spawn"])
        pids = [*pool.pids, int(spawned[0].detail)]
        assert all(map(running, pids))
        waiting = [
            asyncio.create_task(pool.score(obedient, QUESTION, [text]))
            for text in ("loop", "right")
        ]
        await asyncio.sleep(0.1)
        await pool.close()
        await pool.close()
        return pids, await asyncio.gather(*waiting, return_exceptions=True)

    pids, results = asyncio.run(scenario())
    assert all(isinstance(result, PoolClosed) for result in results)
    for pid in pids:
        wait_until_gone(pid)


def test_a_child_that_cannot_start_is_reported() -> None:
    async def scenario() -> None:
        with pytest.raises(ChildLost, match=r"did not come up: no answer within 0\.001 s"):
            await KillablePool(2, 1.0, LIMIT_BYTES, start_timeout_s=0.001).start()

    asyncio.run(scenario())


def test_a_child_that_came_too_late_does_not_deafen_the_next() -> None:
    async def scenario() -> None:
        # What is kept of the failure keeps the lost child's transport from being collected.
        with pytest.raises(ChildLost, match="did not come up") as failure:
            await ChildProcess.start(LIMIT_BYTES, 0.001)
        # Its socket gets the number that the first one's had.
        child = await ChildProcess.start(LIMIT_BYTES, 60.0)
        await child.kill()
        assert failure.value.__cause__ is not None

    asyncio.run(scenario())


def test_an_unreadable_answer_leaves_nothing_to_the_next_job() -> None:
    async def scenario() -> None:
        pool = KillablePool(1, 60.0, LIMIT_BYTES)
        await pool.start()
        obedient = resolve("double_obedient")
        try:
            verdicts = await pool.score(obedient, QUESTION, ["nest", "wrong"])
            assert statuses(verdicts) == ["error", "ok"]
            verdicts = await pool.score(obedient, QUESTION, ["right", "wrong"])
            assert [verdict.reward for verdict in verdicts] == [1.0, 0.0]
        finally:
            await pool.close()

    asyncio.run(scenario())


def test_children_die_with_their_parent() -> None:
    program = """
import asyncio, os, signal
from verifiers.pool import KillablePool
from verifiers.registry import resolve
from verifiers.verdict import Question

async def main():
    pool = KillablePool(1, 1000.0, 1 << 30)
    await pool.start()
    loop = pool.score(resolve("verifier_doubles:obedient"), Question("t", "p", ""), ["loop"])
    task = asyncio.create_task(loop)
    await asyncio.sleep(0.1)
    print(*pool.pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert ended.returncode == -signal.SIGKILL
    wait_until_gone(int(ended.stdout))
