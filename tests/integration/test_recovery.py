"""A driver and a learner rank are killed: nothing is lost, and steps are repeated exactly."""

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from live import QUICKSTART, LiveRun, learner_pid

from orchestrator.cursor import TaskCursor
from orchestrator.history.ledger_file import read_history
from orchestrator.history.transitions import Admitted, Consumed, Stepped, Transition

pytestmark = pytest.mark.integration

OPTIONS = ("--evaluation.max_tasks", "16", "--checkpoint.every", "3", "--checkpoint.export=false")
STEPS = 14


def balance(run: LiveRun) -> dict:
    """What `slipstream ledger --check` says, which must be content."""
    told = run.command("ledger", "--check")
    assert told.returncode == 0, told.stdout + told.stderr
    return json.loads(told.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> LiveRun:
    """A run whose driver was killed in the middle of things."""
    folder = tmp_path_factory.mktemp("recovery")
    run = LiveRun(QUICKSTART, folder, ["--steps", str(STEPS), *OPTIONS])
    run.wait_for(rf"step +5/{STEPS}")
    family = psutil.Process(run.process.pid).children(recursive=True)
    # Ray's own agents look for their parent once in a while; they hold nothing.
    ours = [process for process in family if "Agent" not in " ".join(process.cmdline())]
    os.kill(run.process.pid, signal.SIGKILL)
    run.wait()
    _, alive = psutil.wait_procs(ours, timeout=60)
    assert alive == [], "every process of a run ends with its driver"
    return run


def test_the_ledger_of_a_killed_run_balances(killed: LiveRun) -> None:
    told = balance(killed)
    assert told["step"] >= 5 and told["trained"] > 0
    assert told["failed_tasks"] == 0


def test_another_configuration_is_refused_with_the_differences(killed: LiveRun) -> None:
    options = ["--steps", str(STEPS), *OPTIONS, "--learner.optimizer.lr", "0.1", "--resume"]
    refused = LiveRun(QUICKSTART, killed.runs.parent, options)
    assert refused.wait() == 2
    assert "learner.optimizer.lr: 0.1 is not what the run was started with" in refused.output
    assert "checkpoint" not in refused.output


@pytest.fixture(scope="module")
def resumed(killed: LiveRun) -> Iterator[LiveRun]:
    """The same run, taken up again; its learner rank is killed too."""
    options = ["--steps", str(STEPS), *OPTIONS, "--resume"]
    run = LiveRun(QUICKSTART, killed.runs.parent, options)
    try:
        run.wait_for(rf"step +8/{STEPS}")
        os.kill(learner_pid(run), signal.SIGKILL)
        assert run.wait() == 0, run.output
        yield run
    finally:
        if run.process.poll() is None:
            run.interrupt()
            run.wait()


def test_a_resumed_run_does_again_what_the_checkpoint_lacks(
    killed: LiveRun, resumed: LiveRun
) -> None:
    done = int(re.findall(r"^step +(\d+)/", killed.output, re.MULTILINE)[-1])
    told = re.search(r"resumed at step (\d+)", resumed.output)
    assert told and int(told.group(1)) >= done, resumed.output
    assert "doing steps 4 to" in resumed.output


def test_a_killed_learner_rank_is_replaced_and_the_workers_go_on(resumed: LiveRun) -> None:
    assert re.search(r"learner rank 0 died: .*; the learner is started again", resumed.output)
    assert re.search(r"the learner is back at step (8|9|10), as lineage 2", resumed.output)
    summary = resumed.summary()
    assert (summary["rollout_restarts"], summary["learner_restarts"]) == (0, 1)
    assert resumed.output.count("rollout-0 is ready") == 1
    assert "Traceback" not in resumed.output


def test_no_task_is_lost_and_no_group_trained_twice(resumed: LiveRun) -> None:
    told = balance(resumed)
    assert told["step"] == STEPS and told["failed_tasks"] == 0
    history = list(read_history(resumed.directory / "ledger.sqlite"))
    steps = [t for t in history if isinstance(t, Stepped)]
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    consumed = Counter(t.group_id for t in history if isinstance(t, Consumed))
    assert set(consumed.values()) == {1}
    batches = Counter(group for step in steps for group, _ in step.groups)
    assert set(batches.values()) == {1}
    assert set(consumed) <= set(batches)


def test_tasks_come_in_the_order_of_an_undisturbed_run(resumed: LiveRun) -> None:
    history: list[Transition] = list(read_history(resumed.directory / "ledger.sqlite"))
    admitted = [t for t in history if isinstance(t, Admitted)]
    assert [t.group_id for t in admitted] == list(range(len(admitted)))
    config = json.loads((resumed.directory / "config.json").read_text())
    (source,) = config["data"]["train"]
    names = _task_ids(Path(source["path"]))
    cursor = TaskCursor(len(names), config["seed"])
    assert [t.task_id for t in admitted] == [names[cursor.next()] for _ in admitted]


def _task_ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def test_the_steps_can_be_replayed_bit_for_bit(resumed: LiveRun) -> None:
    """Steps of before and after both deaths lead to the weights that the run itself came to."""
    answer = resumed.command("replay")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    told = json.loads(answer.stdout.splitlines()[-1])
    assert told["different"] == {} and told["tensors"] > 30


def test_the_log_is_trimmed_to_what_the_oldest_checkpoint_needs(resumed: LiveRun) -> None:
    steps = sorted(int(p.name[5:]) for p in (resumed.directory / "checkpoints").glob("step_*"))
    assert steps == [12, STEPS]
    answer = resumed.command("replay", "--from", "9")
    assert answer.returncode == 2
    assert "has checkpoints of steps 12, 14" in answer.stderr
