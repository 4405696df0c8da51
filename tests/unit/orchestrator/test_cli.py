"""The command line: splitting words, exit codes, and what `--help` costs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.cli import CONFIGURED, main, split_overrides
from orchestrator.errors import UsageError

CONFIG = """
name = "tiny"
steps = 10
model.path = "./model"
learner.groups_per_batch = 4
rollout = {sampling = {max_tokens = 16}, engine = {max_model_len = 64}}
[data]
train = {reasoning_gym = "basic_arithmetic", size = 100, seed = 1}
held_out = {reasoning_gym = "basic_arithmetic", size = 10, seed = 1000}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return str(path)


def test_overrides_are_told_from_options_in_any_order() -> None:
    words = ["run", "--seed", "-3", "c.toml", "--a.b=x=y", "--resume", "--runs-folder", "out"]
    rest, overrides = split_overrides([*words, "--name=", "-h"], CONFIGURED["run"])
    assert rest == ["run", "c.toml", "--resume", "--runs-folder", "out", "-h"]
    assert overrides == [("seed", "-3"), ("a.b", "x=y"), ("name", "")]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--seed"], "--seed needs a value"),
        (["--seed", "--steps", "3"], "--seed needs a value"),
        (["--runs-foler", "x"], "Did you mean --runs-folder"),
        (["--max-staleness", "3"], "Did you mean --max_staleness"),
        (["--a..b", "3"], "neither an option nor a key"),
    ],
)
def test_words_that_are_neither_option_nor_override(words: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        split_overrides(["run", "c.toml", *words], CONFIGURED["run"])


def test_check_prints_roles_objective_and_ends_with_0(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", config, "--learner.objective.preset", "dapo"]) == 0
    printed = capsys.readouterr().out
    for word in ("rollout", "verifiers", "learner", "clip.high", "0.28", "dynamic_sampling"):
        assert word in printed


def test_configuration_errors_end_with_2_and_every_problem(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", config, "--steps", "0", "--learner.optimizr.lr", "1"]) == 2
    said = capsys.readouterr().err
    assert "2 problems" in said
    assert "steps: 0" in said
    assert "Did you mean learner.optimizer?" in said


def test_missing_inputs_end_with_2_before_anything_starts(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    assert main(["run", config, "--model.path", "./gone", "--runs-folder", str(runs)]) == 2
    assert f"there is no {tmp_path / 'gone'}" in capsys.readouterr().err
    assert not runs.exists()


def test_resuming_a_run_that_is_not_there_ends_with_2(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", config, "--resume", "--runs-folder", str(tmp_path / "runs")]) == 2
    assert "no run is in" in capsys.readouterr().err


def test_a_reader_that_has_enough_is_no_fault(config: str, tmp_path: Path) -> None:
    """As in `slipstream check CONFIG | head -1`, where head has gone before the first line."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "orchestrator.cli", "check", config]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("words", [[], ["frobnicate"], ["run"], ["check", "a.toml", "b.toml"]])
def test_wrong_usage_ends_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: slipstream" in capsys.readouterr().err


def test_an_unexpected_error_ends_with_1_in_one_paragraph(
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "faulty_plugin.py").write_text("raise RuntimeError('boom\\nand more')\n")
    (tmp_path / "tasks.jsonl").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = '{path = "tasks.jsonl", verifier = "faulty_plugin:score"}'
    assert main(["check", config, "--data.train", source]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "RuntimeError: boom and more" in said
    kept = next(tmp_path.glob("slipstream-*.traceback"))
    assert str(kept) in said
    assert "Traceback" in kept.read_text()


def test_ctrl_c_ends_with_130(tmp_path: Path) -> None:
    pipe = tmp_path / "config.toml"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.cli", "check", str(pipe)],
        stderr=subprocess.PIPE,
        text=True,
    )
    with pipe.open("w"):  # opens once the command reads it, and keeps it waiting
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    assert process.stderr is not None
    with process.stderr as said:
        assert said.read() == "slipstream: interrupted\n"


def test_help_imports_next_to_nothing() -> None:
    code = (
        "import sys, json\nfrom orchestrator.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as ended: assert ended.code == 0\n"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "run" in done.stdout
    assert "check" in done.stdout
    heavy = {"pydantic", "ray", "torch", "vllm", "transformers", "numpy", "pyarrow", "rich"}
    assert heavy.isdisjoint(json.loads(done.stderr))
