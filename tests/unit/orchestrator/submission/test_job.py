"""The job: its command, its environment, its log written once, and what its end means."""

import shlex
from pathlib import Path

import pytest

from orchestrator.cli import split_overrides
from orchestrator.submission.job import LogWriter, entrypoint, exit_code, runtime_environment
from orchestrator.submission.package import Package

PACKAGE = Package(Path("/project"), {})
RUN_OPTIONS = ("--help", "--resume", "--runs-folder")


def test_the_command_binds_the_nodes_address() -> None:
    assert entrypoint("a/run.toml", {}, []) == (
        'exec python -m orchestrator.cli run a/run.toml --runs-folder "$HOME"/slipstream-runs '
        "--control.host=node --metrics.host=node"
    )


def test_hosts_of_the_configuration_stay() -> None:
    raw = {"control": {"host": "0.0.0.0"}, "metrics": {"host": "127.0.0.1"}}
    assert ".host" not in entrypoint("run.toml", raw, [])


def test_overrides_come_through_a_shell_as_they_were() -> None:
    overrides = [("learner.resources", '{ "big one" = 1 }'), ("name", "it's"), ("seed", "-1")]
    command = entrypoint("my run.toml", {}, overrides, runs_folder="/mnt/my runs", resume="run-1")
    words = shlex.split(command)[5:]
    rest, parsed = split_overrides(words, RUN_OPTIONS)
    assert parsed[:3] == overrides
    assert rest == ["my run.toml", "--runs-folder", "/mnt/my runs", "--resume=run-1"]


def test_the_environment_takes_the_token_and_a_patient_stop() -> None:
    variables = runtime_environment(PACKAGE, {"SLIPSTREAM_TOKEN": "t", "OTHER": "x"})["env_vars"]
    assert variables == {"RAY_JOB_STOP_WAIT_TIME_S": "600"}
    variables = runtime_environment(PACKAGE, {"RAY_JOB_STOP_WAIT_TIME_S": "9"})["env_vars"]
    assert variables == {"RAY_JOB_STOP_WAIT_TIME_S": "9"}


def test_a_log_that_is_sent_again_is_written_once() -> None:
    written: list[str] = []
    log = LogWriter(written.append)
    for attempt in (["one\n", "two"], ["one\ntwo"], ["one", "\ntwo\nth", "ree"]):
        log.rewind()
        for chunk in attempt:
            log.feed(chunk)
    assert "".join(written) == "one\ntwo\nthree"
    assert "" not in written


@pytest.mark.parametrize(
    ("status", "driver", "code"),
    [
        ("SUCCEEDED", 0, 0),
        ("FAILED", 1, 1),
        ("FAILED", 2, 2),
        ("FAILED", None, 1),
        ("FAILED", -9, 137),
        ("STOPPED", None, 130),
        ("FAILED", 130, 130),
    ],
)
def test_exit_codes(status: str, driver: int | None, code: int) -> None:
    assert exit_code(status, driver) == code
