"""The commands on a run's history: `ledger` accounts for it, `replay` does steps of it again.

Their arguments are defined here and cost no import; what a command needs is imported when it runs.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import EXIT_FAILED, EXIT_OK
from orchestrator.records import finite_or_none

if TYPE_CHECKING:
    from rich.table import Table

    from orchestrator.history.ledger import LedgerReport
    from orchestrator.history.transitions import Transition

FATES = ("generated", "trained", "masked", "dropped", "superseded", "pending")


def add_arguments(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands to the parser of `slipstream`."""
    ledger = _add(
        commands,
        "ledger",
        _ledger,
        "what became of every sample of a run",
        "Tell what became of every sample of a run, from its beginning, in samples and in tokens. "
        "The last line is one JSON object. RUN may be live.",
    )
    ledger.add_argument(
        "--check", action="store_true", help="end with exit code 1 unless everything adds up"
    )
    replay = _add(
        commands,
        "replay",
        _replay,
        "do recorded steps again and compare every tensor",
        "Let a learner do steps of an ended run again, from the ledger and the trajectory log, and "
        "compare weights, optimizer state and kept versions with the run's own checkpoint. Ends "
        "with exit code 1 unless all are equal bit for bit; the last line is one JSON object.",
    )
    for name, text in (
        (
            "from",
            "begin with the checkpoint of this step; 0 is the model that the run began with "
            "(default: the oldest checkpoint)",
        ),
        ("to", "end at the checkpoint of this step (default: the newest)"),
    ):
        replay.add_argument(f"--{name}", type=int, metavar="STEP", dest=f"{name}_step", help=text)


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    command: Callable[[argparse.Namespace], int],
    text: str,
    description: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=description, allow_abbrev=False)
    parser.add_argument(
        "run",
        nargs="?",
        default="latest",
        metavar="RUN",
        help="a run directory or a name in the runs folder (default: the newest)",
    )
    parser.add_argument(
        "--runs-folder",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="where run directories are (default: ./runs)",
    )
    parser.set_defaults(command=command)
    return parser


def _ledger(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from orchestrator.history.ledger_file import read_history
    from orchestrator.run_directory import RunDirectory

    directory = RunDirectory.find(arguments.runs_folder, arguments.run)
    audit = audited(read_history(directory.ledger))
    console = Console(highlight=False)
    console.print(f"{directory.path.name}: step {audit.step}, version {audit.version}")
    for table in tables(audit.report):
        console.print(table)
    if audit.problem:
        console.print(f"the history cannot have been: {audit.problem}", markup=False)
    print(json.dumps(audit.as_dict()))
    return EXIT_OK if audit.balanced or not arguments.check else EXIT_FAILED


def _replay(arguments: argparse.Namespace) -> int:
    from orchestrator.history.replay import replay
    from orchestrator.run_directory import RunDirectory

    directory = RunDirectory.find(arguments.runs_folder, arguments.run)
    found = replay(directory, start=arguments.from_step, end=arguments.to_step)
    for name, difference in found.different.items():
        print(f"{name} differs, by {difference:.3g} at most")
    equal = found.tensors - len(found.different)
    print(f"{equal} of {found.tensors} tensors ({found.elements:,} numbers) are equal bit for bit")
    told = {"tensors": found.tensors, "elements": found.elements, "different": found.different}
    print(json.dumps(finite_or_none(told)))
    return EXIT_FAILED if found.different or not found.tensors else EXIT_OK


@dataclass(frozen=True)
class Audit:
    """Where a history led, as far as it can be followed."""

    report: "LedgerReport"
    step: int
    version: int
    problem: str
    """The first transition that cannot follow those before it; empty if there is none."""

    @property
    def balanced(self) -> bool:
        """Whether everything adds up, and each transition follows from those before it."""
        return self.report.balanced and not self.problem

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            **self.report.as_dict(),
            "step": self.step,
            "version": self.version,
            "problem": self.problem,
            "balanced": self.balanced,
        }


def audited(history: "Iterable[Transition]") -> Audit:
    """Follow a history from its beginning."""
    from orchestrator.history.ledger import Ledger, LedgerError

    ledger, problem = Ledger(), ""
    try:
        for transition in history:
            ledger.apply(transition)
    except LedgerError as error:
        problem = str(error)
    return Audit(ledger.report(), ledger.step, ledger.version, problem)


def tables(report: "LedgerReport") -> "list[Table]":
    """Fates with their reasons in samples and tokens; lengths by fate."""
    from rich.table import Table

    told = report.as_dict()
    fates = Table("fate", "reason", title="samples and tokens", title_justify="left")
    for unit in ("samples", "tokens"):
        fates.add_column(unit, justify="right")
    for fate in FATES:
        fates.add_row(fate, "", f"{told[fate]:,}", f"{told['tokens'][fate]:,}")
        reasons: Mapping[str, int] = told["tokens"].get(f"{fate}_by_reason", {})
        for reason, tokens in sorted(reasons.items()):
            samples = told[f"{fate}_by_reason"].get(reason, 0)
            fates.add_row("", reason, f"{samples:,}", f"{tokens:,}")
    for reason, tasks in sorted(told["failed_by_reason"].items()):
        fates.add_row("failed tasks", reason, f"{tasks:,}", "")
    edges = sorted({edge for buckets in told["lengths"].values() for edge in buckets}, key=float)
    lengths = Table("samples of up to", title="length in tokens", title_justify="left")
    for edge in edges:
        lengths.add_column(edge, justify="right")
    for fate, buckets in told["lengths"].items():
        lengths.add_row(fate, *(f"{buckets.get(edge, 0):,}" for edge in edges))
    return [fates, lengths]
