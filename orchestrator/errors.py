"""Errors that a user is meant to read, and the exit code each one ends the command with.

A message says what was wrong and where, what was expected, and what to do about it. Whoever
catches a SlipstreamError prints it as it is: no traceback is needed to act on it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class SlipstreamError(Exception):
    """Root of the errors whose message is written for the user."""

    exit_code: ClassVar[int] = EXIT_FAILED


class RunError(SlipstreamError):
    """A run cannot start or go on; the message is the one paragraph of cause.

    `culprit` is the process that it is about, by the name of its log, where there is one.
    """

    def __init__(self, message: str, *, culprit: str = "") -> None:
        super().__init__(message)
        self.culprit = culprit


class UsageError(SlipstreamError):
    """The command line asks for something that does not exist or makes no sense."""

    exit_code = EXIT_USAGE


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration."""

    key: str
    """Dotted key, such as `learner.optimizer.lr`; empty when it concerns the whole file."""
    found: str
    """What stands there, as a short text; or a whole sentence, which then needs no `expected`."""
    expected: str = ""
    """What would be accepted."""
    hint: str = ""
    """What to do, a sentence, where more can be said."""

    def __str__(self) -> str:
        where = f"{self.key}: " if self.key else ""
        expected = f"; expected {self.expected}" if self.expected else ""
        hint = f" {self.hint}" if self.hint else ""
        sentence = f"{where}{self.found}{expected}"
        stop = "" if sentence.endswith((".", "?", "!")) else "."
        return f"{sentence}{stop}{hint}"


class ConfigError(SlipstreamError):
    """A configuration is refused; lists every problem found, not only the first."""

    exit_code = EXIT_USAGE

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = [f"{source}: {count} problem{'s' if count != 1 else ''}"]
        lines += [f"  {problem}" for problem in self.problems]
        super().__init__("\n".join(lines))
