"""Live `slipstream run` processes for tests: start, watch what they print, signal, collect."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = REPOSITORY / "deploy/quickstart/quickstart.toml"
START_LIMIT_S = 300.0


class LiveRun:
    """One `slipstream run` in a process of its own, its output in a file."""

    def __init__(self, config: Path, folder: Path, options: Sequence[str] = ()) -> None:
        self.runs = folder / "runs"
        self.output_path = folder / f"output-{time.monotonic_ns()}.txt"
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        with self.output_path.open("w") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "orchestrator.cli", "run", str(config)),
                    *("--runs-folder", str(self.runs), *options),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
            )

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return self.output_path.read_text()

    @property
    def directory(self) -> Path:
        """The run directory; exists once the run has begun."""
        return (self.runs / "latest").resolve()

    def wait_for(self, pattern: str, limit_s: float = START_LIMIT_S) -> re.Match[str]:
        """The first match in the output; fails with the output when it does not come."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if found := re.search(pattern, self.output):
                return found
            assert self.process.poll() is None, f"ended before {pattern!r}:\n{self.output}"
            time.sleep(0.2)
        raise AssertionError(f"no {pattern!r} within {limit_s:.0f} s:\n{self.output}")

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def command(
        self, *words: str, limit_s: float = START_LIMIT_S
    ) -> subprocess.CompletedProcess[str]:
        """A `slipstream` command, given where the run's folder of runs is `./runs`."""
        return subprocess.run(
            [sys.executable, "-m", "orchestrator.cli", *words],
            capture_output=True,
            text=True,
            cwd=self.runs.parent,
            timeout=limit_s,
        )

    def wait(self, limit_s: float = START_LIMIT_S) -> int:
        """The exit code."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still running after {limit_s:.0f} s:\n{self.output}") from None

    def summary(self) -> dict[str, Any]:
        """summary.json."""
        return json.loads((self.directory / "summary.json").read_text())

    def steps(self) -> list[dict[str, Any]]:
        """The step records of metrics.jsonl."""
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [r for line in lines if (r := json.loads(line))["kind"] == "step"]


def learner_pid(run: LiveRun) -> int:
    """Process id of the only learner rank of a run."""
    family = psutil.Process(run.process.pid).children(recursive=True)
    (rank,) = (p for p in family if "_RankActor" in p.name() or "_RankActor" in _command(p))
    return rank.pid


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
