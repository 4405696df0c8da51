"""The whole loop: short runs of the quick start, by the command that users type.

Their summaries and step records are read, nothing is timed from outside. A GEMM between the runs
shows how much of the machine there was.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.figures import Figure, Figures, interleaved
from tests.benchmarks.gemm import Gemm

REPOSITORY = Path(__file__).parents[2]
CONFIG = REPOSITORY / "deploy/quickstart/quickstart.toml"
UNITS = {
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
    "seconds": "s",
    "training_seconds": "s",
    "staleness_mean": "versions",
}


def run(quick: bool) -> Figures:
    """Figures of the summaries, and the share of the steps' time that went to each phase.

    RuntimeError with the output of a run that fails.
    """
    steps = 5 if quick else 20
    rounds = interleaved(
        lambda: _one_run(steps),
        lambda: {"gemm float32": Gemm()() / 1e9},
        repeats=1 if quick else 3,
        warm_up=0,
    )
    return {name: Figure(values, _unit(name)) for name, values in rounds.items()}


def _unit(name: str) -> str:
    if name.startswith("share"):
        return "x"
    return UNITS.get(name, "GFLOP/s")


def _one_run(steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        command = [
            *(sys.executable, "-m", "orchestrator.cli", "run", str(CONFIG)),
            *("--runs-folder", folder, "--steps", str(steps)),
            *("--evaluation.samples_per_task", "1"),
        ]
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        ended = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True
        )
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{ended.stdout}{ended.stderr}")
        directory = Path(folder) / "latest"
        summary = json.loads((directory / "summary.json").read_text())
        lines = (directory / "metrics.jsonl").read_text().splitlines()
    records = [r for line in lines if (r := json.loads(line))["kind"] == "step"]
    return {name: summary[name] for name in UNITS} | _phase_shares(records)


def _phase_shares(records: list[dict[str, Any]]) -> dict[str, float]:
    total = sum(record["seconds"] for record in records)
    names = sorted({name for record in records for name in record["phase_seconds"]})
    return {
        f"share of {name}": sum(r["phase_seconds"].get(name, 0.0) for r in records) / total
        for name in names
    }
