"""What this machine can do: matrix-multiplication rate and memory-copy bandwidth.

The other benchmarks state themselves as shares of these. On a shared machine a rate means little
by itself: measure the yardstick in the same rounds as the work, with `interleaved`, and compare
round by round, with `share`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import linear

Measure = Callable[[], float]
"""Does its work once and returns a rate (of anything per second)."""


class Spread(NamedTuple):
    """Median and extremes of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Gemm:
    """A linear layer's product, [m, k] times the transpose of [n, k], by torch.

    A call multiplies for at least `seconds`, on as many threads as this process has set, and
    returns floating-point operations per second, 2·m·n·k for one multiplication. Processors
    without bfloat16 instructions are many times slower in it than in float32.
    """

    dtype: torch.dtype = torch.float32
    m: int = 1024
    n: int = 1024
    k: int = 1024
    seconds: float = 0.1

    def __call__(self) -> float:
        left = torch.randn(self.m, self.k).to(self.dtype)
        weight = torch.randn(self.n, self.k).to(self.dtype)
        linear(left, weight)  # the first call of a shape sets the kernel up
        return _rate(lambda: linear(left, weight), 2.0 * self.m * self.n * self.k, self)


@dataclass(frozen=True)
class Copy:
    """One thread copying `nbytes` between two buffers; a call returns bytes copied per second.

    The default is well above what caches hold.
    """

    nbytes: int = 256 << 20
    seconds: float = 0.1

    def __call__(self) -> float:
        source = np.ones(self.nbytes, np.uint8)
        target = np.zeros_like(source)
        np.copyto(target, source)  # maps the pages of both
        return _rate(lambda: np.copyto(target, source), float(self.nbytes), self)


def _rate(work: Callable[[], object], amount: float, measure: Gemm | Copy) -> float:
    done = 0
    start = time.perf_counter()
    while True:
        work()
        done += 1
        elapsed = time.perf_counter() - start
        if elapsed >= measure.seconds:
            return done * amount / elapsed


def interleaved(
    measures: Mapping[str, Measure], repeats: int = 5, warm_up: int = 1
) -> dict[str, list[float]]:
    """Rates by name, one per round; each round takes every measure once, in the order given.

    The first `warm_up` rounds are not counted.
    """
    rates: dict[str, list[float]] = {name: [] for name in measures}
    for round_ in range(warm_up + repeats):
        for name, measure in measures.items():
            rate = measure()
            if round_ >= warm_up:
                rates[name].append(rate)
    return rates


def share(rates: Sequence[float], yardstick: Sequence[float]) -> Spread:
    """`rates` over `yardstick`, round by round; both from one call of `interleaved`."""
    return Spread.of([rate / most for rate, most in zip(rates, yardstick, strict=True)])


def run(repeats: int = 5) -> dict[str, Spread]:
    """FLOP/s in float32 and bfloat16 and bytes/s of a copy, on this process's threads."""
    measures: dict[str, Measure] = {
        "gemm_float32_flops": Gemm(torch.float32),
        "gemm_bfloat16_flops": Gemm(torch.bfloat16),
        "memcpy_bytes": Copy(),
    }
    return {name: Spread.of(rates) for name, rates in interleaved(measures, repeats).items()}


def table(result: Mapping[str, Spread]) -> str:
    lines = [f"{torch.get_num_threads()} threads; 10^9 per second: median (lowest-highest)"]
    for name, spread in result.items():
        middle, low, high = (value / 1e9 for value in spread)
        lines.append(f"{name:<22}{middle:>8.1f} ({low:.1f}-{high:.1f})")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table(run()))
