"""How data that cannot be used is reported: every bad row by file, row, column and rule."""

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.errors import EXIT_USAGE, SlipstreamError

SHOWN = 10
"""Bad rows that a message lists; the error holds them all."""


@dataclass(frozen=True)
class BadRow:
    """One row that breaks a rule."""

    source: str
    """File, or name of the generator."""
    row: int | None
    """Row of a parquet file or line of a JSONL file, from 1; None if the whole file is meant."""
    column: str
    expected: str
    found: str

    def __str__(self) -> str:
        row = "" if self.row is None else f", row {self.row}"
        column = f", column `{self.column}`" if self.column else ""
        return f"{self.source}{row}{column}: expected {self.expected}, found {self.found}"


class DataError(SlipstreamError):
    """Tasks are refused. `problems` holds every bad row, the message the first few."""

    exit_code = EXIT_USAGE

    def __init__(self, problems: Iterable[BadRow], advice: str = "") -> None:
        self.problems = tuple(problems)
        lines = [str(problem) for problem in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"and {len(self.problems) - SHOWN} more bad rows")
        if advice:
            lines.append(advice)
        super().__init__("\n".join(lines))


class CellError(ValueError):
    """A cell breaks a rule; whoever knows file and row turns it into a BadRow."""

    def __init__(self, column: str, expected: str, found: str) -> None:
        super().__init__(f"{column}: expected {expected}, found {found}")
        self.column = column
        self.expected = expected
        self.found = found


def describe(value: object) -> str:
    """A value's type and a short form of it, for messages."""
    if value is None:
        return "nothing"
    text = repr(value)
    short = text if len(text) <= 60 else f"{text[:57]}..."
    return f"{type(value).__name__} {short}"
