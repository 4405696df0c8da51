"""How measurements are taken, told and compared: rounds, medians with spread, ratios.

On a shared machine a time says little by itself. What is to be compared is measured in the same
rounds, with `interleaved`, and compared round by round, with `Figure.per`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

Measure = Callable[[], Mapping[str, float]]
"""Does its work once and returns what it measured, by name."""


@dataclass(frozen=True)
class Figure:
    """One quantity, measured once per round."""

    values: tuple[float, ...]
    unit: str

    @property
    def median(self) -> float:
        return median(self.values)

    def per(self, other: Figure, unit: str = "x") -> Figure:
        """The ratio to `other`, round by round."""
        pairs = zip(self.values, other.values, strict=True)
        return Figure(tuple(own / most for own, most in pairs), unit)

    def as_json(self) -> dict[str, Any]:
        """Median, lowest, highest, and the values in the order of the rounds."""
        low, high = min(self.values), max(self.values)
        return {
            "unit": self.unit,
            "median": self.median,
            "low": low,
            "high": high,
            "values": list(self.values),
        }

    def __str__(self) -> str:
        return f"{self.median:.4g}"

    @property
    def spread(self) -> str:
        """Lowest and highest."""
        return f"{min(self.values):.4g} - {max(self.values):.4g}"


Figures = dict[str, Figure]
"""What a part of the benchmarks returns, by name."""


def interleaved(*measures: Measure, repeats: int, warm_up: int = 1) -> dict[str, tuple[float, ...]]:
    """What was measured, by name, one value per round; each round takes every measure once, in
    the order given. The first `warm_up` rounds are not counted."""
    rounds: list[dict[str, float]] = []
    for _ in range(warm_up + repeats):
        rounds.append({})
        for measure in measures:
            rounds[-1] |= measure()
    counted = rounds[warm_up:]
    return {name: tuple(values[name] for values in counted) for name in counted[0]}
