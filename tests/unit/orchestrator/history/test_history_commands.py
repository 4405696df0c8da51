"""`slipstream ledger`: figures as JSON on the last line, and an exit code to rely on."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator import cli
from orchestrator.history.ledger_file import LedgerFile
from orchestrator.history.transitions import (
    Admitted,
    Consumed,
    Dropped,
    Failed,
    Generated,
    Ready,
    Retried,
    Stepped,
    Transition,
    Verified,
)
from orchestrator.run_directory import RunDirectory

HISTORY: list[Transition] = [
    Admitted(0, "a", 2),
    Admitted(1, "b", 2),
    Admitted(2, "c", 2),
    Admitted(3, "d", 2),
    *(Generated(group, 0, (3, 70)) for group in range(3)),
    *(Verified(group, 0) for group in range(2)),
    *(Ready(group, 0) for group in range(2)),
    Consumed(0, 0, 1, (3, 0), ({}, {"stale": 70})),
    Stepped(1, 1, 2, 10, ((0, 0),)),
    Dropped(1, "zero_variance"),
    Retried(2, "worker_lost"),
    Failed(3, "verifier_lost"),
]


def run_with(tmp_path: Path, history: Sequence[Transition]) -> None:
    directory = RunDirectory.create(tmp_path / "runs", "tiny")
    directory.write_config({})
    file = LedgerFile.create(directory.ledger, tasks="")
    file.append(history)
    file.close()


def ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    code = cli.main(["ledger", "--runs-folder", str(tmp_path / "runs"), *options])
    captured = capsys.readouterr()
    return code, captured.out or captured.err


def test_the_last_line_has_every_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_with(tmp_path, HISTORY)
    code, said = ledger(tmp_path, capsys, "--check")
    told = json.loads(said.splitlines()[-1])
    assert code == 0 and told["balanced"] and not told["problem"]
    counts = {
        "generated": 6,
        "trained": 1,
        "masked": 1,
        "dropped": 2,
        "superseded": 2,
        "pending": 0,
        "failed_tasks": 1,
    }
    assert {name: told[name] for name in counts} == counts
    assert told["tokens"]["masked_by_reason"] == {"stale": 70}
    assert told["tokens"]["generated"] == 219
    assert (told["step"], told["version"]) == (1, 1)
    assert told["lengths"]["masked"] == {"128": 1}
    assert "zero_variance" in said and "verifier_lost" in said


def test_a_history_that_cannot_have_been_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with(tmp_path, [*HISTORY, Consumed(0, 0, 2, (3, 70), ({}, {}))])
    code, said = ledger(tmp_path, capsys, "--check")
    told = json.loads(said.splitlines()[-1])
    assert code == 1 and not told["balanced"]
    assert "group 0 has ended already" in told["problem"]
    assert told["trained"] == 1, "what can be followed is counted"
    assert ledger(tmp_path, capsys)[0] == 0, "without --check it only tells"


def test_a_run_without_a_ledger_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory.create(tmp_path / "runs", "tiny")
    directory.write_config({})
    code, said = ledger(tmp_path, capsys, "--check")
    assert code == 1 and "ledger.sqlite is missing" in said
    code, said = ledger(tmp_path, capsys, "other")
    assert code == 2 and "no run at 'other'" in said
