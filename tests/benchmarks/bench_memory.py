"""A long run of the quick start: what memory, object store and open files do over its steps.

Per role the resident memory that is its own (USS), its open files and the bytes touched in shared
memory, every few seconds. What matters is the slope over the second half, per thousand steps.
Takes half an hour, so it is no part of `make bench`: `python -m tests.benchmarks memory`.
"""

import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import linear_regression

import psutil

from tests.benchmarks.bench_loop import CONFIG
from tests.benchmarks.figures import Figure, Figures

PERIOD_S = 5.0
MARKS = {
    "RolloutWorker": "rollout worker",
    "EngineCore": "engine",
    "VerifierWorker": "verifier worker",
    "_RankActor": "learner rank",
    "_StoreActor": "trajectory store",
    "raylet": "raylet",
    "gcs_server": "gcs",
}
"""Part of a process's title or command → role."""
Series = dict[str, list[tuple[int, float]]]
"""Name → (step, value) over time."""


def run(quick: bool) -> Figures:
    """Levels at the end and slopes of 2,000 steps (60 where it has to be quick)."""
    steps = 60 if quick else 2000
    series: Series = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "output.txt").open("w") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "orchestrator.cli", "run", str(CONFIG)),
                    *("--runs-folder", str(folder / "runs"), "--steps", str(steps)),
                    *("--evaluation.max_tasks", "16", "--checkpoint.every", "100"),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            while process.poll() is None:
                time.sleep(PERIOD_S)
                step = _step(folder / "output.txt")
                for what, value in _sample(process.pid).items():
                    if step:
                        series[what].append((step, value))
        if process.returncode:
            raise RuntimeError((folder / "output.txt").read_text()[-2000:])
    return _figures(series, steps)


def _figures(series: Series, steps: int) -> Figures:
    figures: Figures = {}
    for what, points in sorted(series.items()):
        later = [(step, value) for step, value in points if step >= steps // 2]
        if len({step for step, _ in later}) < 3:
            continue
        slope, _ = linear_regression(*zip(*later, strict=True))
        unit = "files" if what.endswith("files") else "MiB"
        figures[what] = Figure((later[-1][1],), unit)
        figures[f"{what}, slope"] = Figure((1000 * slope,), f"{unit}/1000 steps")
    return figures


def _step(output: Path) -> int:
    """Steps that the run has told of."""
    lines = [line for line in output.read_text().splitlines() if line.startswith("step ")]
    return int(lines[-1].split("/")[0].removeprefix("step")) if lines else 0


def _sample(pid: int) -> dict[str, float]:
    """USS in MiB and open files by role, and what is touched in shared memory."""
    found: dict[str, float] = defaultdict(float)
    try:
        driver = psutil.Process(pid)
        family = driver.children(recursive=True)
    except psutil.NoSuchProcess:
        return {}
    for process in [driver, *family]:
        try:
            words = " ".join([process.name(), *process.cmdline()])
            role = next((role for mark, role in MARKS.items() if mark in words), "")
            role = "driver" if process.pid == pid else role
            if role:
                found[role] += process.memory_full_info().uss / (1 << 20)
                found[f"{role}, open files"] += process.num_fds()
        except psutil.Error:
            continue
    found["shared memory touched"] = psutil.disk_usage("/dev/shm").used / (1 << 20)
    return found
