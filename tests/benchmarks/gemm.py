"""What this machine can do: matrix-multiplication rate and memory-copy bandwidth.

The other benchmarks state themselves as shares of these.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import linear

from tests.benchmarks.figures import Figure, Figures, interleaved


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
        return _rate(lambda: linear(left, weight), 2.0 * self.m * self.n * self.k, self.seconds)


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
        return _rate(lambda: np.copyto(target, source), float(self.nbytes), self.seconds)


def _rate(work: Callable[[], object], amount: float, seconds: float) -> float:
    done = 0
    start = time.perf_counter()
    while True:
        work()
        done += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return done * amount / elapsed


def run(quick: bool) -> Figures:
    """GEMM rates and copy bandwidth of one thread."""
    torch.set_num_threads(1)
    rates = interleaved(
        lambda: {"float32": Gemm(torch.float32)()},
        lambda: {"bfloat16": Gemm(torch.bfloat16)()},
        lambda: {"memcpy": Copy()()},
        repeats=3 if quick else 9,
    )
    return {
        "gemm float32": Figure(tuple(r / 1e9 for r in rates["float32"]), "GFLOP/s"),
        "gemm bfloat16": Figure(tuple(r / 1e9 for r in rates["bfloat16"]), "GFLOP/s"),
        "memcpy": Figure(tuple(r / 1e9 for r in rates["memcpy"]), "GB/s"),
    }
