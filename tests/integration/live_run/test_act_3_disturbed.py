"""Act 3: the live run loses a worker, is stopped, goes on in a new process, and gets a Ctrl-C."""

import json
import os
import re
import signal
import urllib.request

import pytest
from live import QUICKSTART, LiveRun
from play import Play, even, fleet

from orchestrator.steering import Role

pytestmark = pytest.mark.integration


def test_a_killed_rollout_worker_is_replaced_and_its_work_done_again(play: Play) -> None:
    (lost,) = fleet(play.client.status(), Role.ROLLOUT).workers
    assert lost.pid is not None
    os.kill(lost.pid, signal.SIGKILL)
    play.run.wait_for(f"{lost.name} is lost")
    status = play.until(lambda s: even(s, Role.ROLLOUT, 1), "with a worker again")
    assert fleet(status, Role.ROLLOUT).workers[0].name != lost.name
    assert fleet(status, Role.ROLLOUT).restarts == 1
    later = play.more_steps(2)
    assert later.balanced and later.samples["failed_tasks"] == 0


def test_stop_drains_saves_and_ends_well(play: Play) -> None:
    assert play.command("stop").returncode == 0
    assert play.run.wait() == 0, play.run.output
    summary = play.run.summary()
    assert summary["stopped"] and not summary["interrupted"]
    assert summary["rollout_restarts"] == 1
    assert summary["ledger"]["balanced"] and summary["ledger"]["failed_tasks"] == 0
    assert (play.run.directory / f"checkpoints/step_{summary['steps']}").is_dir()
    assert not (play.run.directory / "control.json").exists()
    ended = play.command("status")
    assert ended.returncode != 0 and "Traceback" not in ended.stderr


def test_an_ended_run_is_no_target_any_more(play: Play) -> None:
    assert json.loads((play.run.directory / "prometheus_targets.json").read_text()) == []
    assert list((play.run.runs / "targets").iterdir()) == []


def test_resume_goes_on_where_the_run_stopped(play: Play) -> None:
    done = play.run.summary()
    options = ["--steps", "100000", "--evaluation.max_tasks", "16", "--resume"]
    play.run = LiveRun(QUICKSTART, play.run.runs.parent, options)
    endpoint = play.run.wait_for(r"metrics: (http://127\.0\.0\.1:\d+/metrics)").group(1)
    play.run.wait_for(rf"step +{done['steps'] + 1}/")
    with urllib.request.urlopen(endpoint) as answer:
        page = answer.read().decode()
    assert re.search(r"^slipstream_policy_version \d+", page, re.MULTILINE)
    assert re.search(r'^slipstream_workers\{role="rollout",state="ready"\} 1', page, re.MULTILINE)
    first = next(step for step in play.run.steps() if step["step"] == done["steps"] + 1)
    assert first["version"] == done["version"] + 1


def test_ctrl_c_saves_and_exits_130(play: Play) -> None:
    play.run.interrupt()
    assert play.run.wait() == 130, play.run.output
    summary = play.run.summary()
    assert summary["interrupted"] and summary["ledger"]["balanced"]
    assert (play.run.directory / f"checkpoints/step_{summary['steps']}").is_dir()
