"""What a run says on the terminal: one line per step, and a table at the end."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from actors.process_log import last_lines
from orchestrator.records import StepRecord

TAIL_LINES = 12


def step_line(record: StepRecord) -> str:
    """One step in one line; what was not measured is a dash."""
    width = len(str(record.steps))
    cells = [
        f"step {record.step:>{width}}/{record.steps}",
        f"acc {_number(record.accuracy, '.2f')}",
        f"reward {_number(record.reward, '.2f')}",
        f"lag {_number(record.staleness_mean, '.1f')}",
        f"len {_number(record.response_tokens_mean, '.1f')}",
        f"tok/s {record.trained_tokens_per_second:.0f}",
        f"step {record.seconds:.1f}s",
        f"bottleneck: {record.bottleneck}",
    ]
    if record.unscored:
        cells.insert(-1, f"UNSCORED {record.unscored}/{record.samples}")
    if record.skipped:
        cells.insert(1, f"SKIPPED: {record.skipped}")
    return "  ".join(cells)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


SUMMARY_ROWS = (
    ("accuracy_before", "held-out accuracy before", "share"),
    ("accuracy_after", "held-out accuracy after", "share"),
    ("steps", "steps", "count"),
    ("seconds", "seconds, everything", "seconds"),
    ("samples_per_second", "samples per second", "rate"),
    ("tokens_per_second", "trained tokens per second", "rate"),
    ("staleness_mean", "staleness, mean versions", "rate"),
    ("staleness_max", "staleness, largest", "count"),
    ("parity_max_abs", "engine mismatch, largest", "small"),
)
_FORMS = {"share": ".1%", "count": ",.0f", "seconds": ",.1f", "rate": ",.2f", "small": ".2g"}


def summary_table(summary: Mapping[str, Any], *, title: str) -> Table:
    """The result as a table: the known figures of summary.json that are there."""
    table = Table(title=Text(title), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for key, label, kind in SUMMARY_ROWS:
        if summary.get(key) is not None:
            table.add_row(label, format(summary[key], _FORMS[kind]))
    return table


class Console:
    """Writes to standard output; plain text where that is no terminal."""

    def __init__(self, rich_console: RichConsole | None = None) -> None:
        self._out = rich_console or RichConsole(highlight=False)

    def note(self, text: str) -> None:
        """One line about what happens outside of the steps."""
        self._out.print(Text(text), soft_wrap=True)

    def step(self, record: StepRecord) -> None:
        """The line of one step."""
        style = "yellow" if record.skipped else ""
        self._out.print(Text(step_line(record), style=style), soft_wrap=True)

    def evaluation(self, when: str, accuracy: float, samples: int) -> None:
        """The result of one evaluation; `when` is such as `before`, `step 20`."""
        self.note(f"held-out accuracy {when}: {accuracy:.1%} of {samples} samples")

    def log_tail(self, path: Path) -> None:
        """The last lines of the log of a process that a failure is about."""
        lines = last_lines(path, TAIL_LINES)
        nothing = f"{path} is empty" if path.exists() else f"{path.name} is not on this machine"
        self.note(f"the last lines of {path}:" if lines else nothing)
        for line in lines:
            self.note(f"  | {line}")

    def summary(self, summary: Mapping[str, Any], *, title: str) -> None:
        """The final table."""
        self._out.print()
        self._out.print(summary_table(summary, title=title))
