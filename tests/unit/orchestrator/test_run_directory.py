"""The run directory: names, the link to the newest run, files that are replaced whole."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from learner.layout import COMPLETE
from orchestrator.errors import RunError, UsageError
from orchestrator.run_directory import RunDirectory, write_json

NOON = datetime(2030, 1, 2, 12, 0, 5, tzinfo=UTC)


def test_name_carries_utc_time_and_latest_points_to_the_newest(tmp_path: Path) -> None:
    runs = tmp_path / "deep" / "runs"
    first = RunDirectory.create(runs, "tiny", NOON.astimezone(timezone(timedelta(hours=5))))
    assert first.path == (runs / "tiny-20300102T120005Z").resolve()
    assert first.checkpoints.is_dir()
    assert first.logs.is_dir()
    assert (runs / "latest").resolve() == first.path
    second = RunDirectory.create(runs, "tiny", NOON)
    assert second.path.name == "tiny-20300102T120005Z-2"
    assert (runs / "latest").resolve() == second.path
    assert sorted(entry.name for entry in runs.iterdir()) == [
        "latest",
        "tiny-20300102T120005Z",
        "tiny-20300102T120005Z-2",
    ]


def test_the_link_survives_moving_the_folder(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs", "tiny", NOON)
    (tmp_path / "runs").rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "latest" / "logs").is_dir()
    assert not run.path.exists()


def test_a_real_folder_named_latest_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "latest" / "precious").mkdir(parents=True)
    with pytest.raises(RunError, match="move what is there away"):
        RunDirectory.create(tmp_path, "tiny", NOON)
    assert (tmp_path / "latest" / "precious").is_dir()
    assert not list(tmp_path.glob(".latest*"))


def test_a_runs_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="--runs-folder"):
        RunDirectory.create(tmp_path / "file", "tiny", NOON)


def test_find_by_path_by_name_and_latest(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    run = RunDirectory.create(runs, "tiny", NOON)
    with pytest.raises(UsageError, match=r"no run is in .* yet"):
        RunDirectory.find(runs)  # not a run before it has its config
    run.write_config({"name": "tiny"})
    for reference in ("latest", run.path.name, str(run.path)):
        assert RunDirectory.find(runs, reference).path == run.path
    with pytest.raises(UsageError, match=f"Newest there: {run.path.name}"):
        RunDirectory.find(runs, "other")


def finish(path: Path) -> None:
    path.mkdir()
    (path / COMPLETE).touch()


def test_checkpoints_are_by_number_and_unfinished_ones_are_none(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "tiny", NOON)
    assert run.checkpoint_steps() == []
    for name in ("step_10", "step_9", "step_11.tmp", "step_x"):
        finish(run.checkpoints / name)
    run.checkpoint(7).mkdir()  # its removal was interrupted
    (run.checkpoints / "step_12").touch()
    assert run.checkpoint_steps() == [9, 10]


def test_summary_says_null_for_what_json_cannot(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "tiny", NOON)
    run.write_summary({"accuracy_after": float("nan"), "ledger": {"x": [1.0, float("inf")]}})
    assert json.loads(run.summary_json.read_text()) == {
        "accuracy_after": None,
        "ledger": {"x": [1.0, None]},
    }


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_a_checkpoint_caught_in_replacement_still_counts(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "tiny")
    finish(run.checkpoint(4))
    finish(run.checkpoints / ".step_8.replaced")
    finish(run.checkpoints / ".step_9.partial")
    assert run.checkpoint_steps() == [4, 8]


def test_checkpoints_that_the_ledger_does_not_reach_are_none(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "tiny")
    for step in (4, 8, 12):
        finish(run.checkpoint(step))
    run.set_aside_after(8)
    assert run.checkpoint_steps() == [4, 8]
    run.set_aside_after(8)
    assert (run.checkpoints / "lost_step_12").is_dir(), "nothing is deleted"


HOLDER = """
import sys
from pathlib import Path
from orchestrator.run_directory import RunDirectory

RunDirectory(Path(sys.argv[1])).lock()
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_run_belongs_to_one_process_for_as_long_as_it_lives(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "tiny")
    command = [sys.executable, "-c", HOLDER, str(run.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
        with pytest.raises(RunError, match=f"is being run by process {holder.pid}"):
            run.lock()
        holder.kill()
    run.lock()
