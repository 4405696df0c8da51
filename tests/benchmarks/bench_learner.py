"""The learner's batch step against matrix multiplication in its own dtype on one thread.

Model FLOPs are 6 x parameters x real tokens: no padding, no recomputation, no scoring pass. Steps
with fresh samples (lag 0, which need no scoring) and with samples one version old alternate.
"""

import gc
import time

import torch

from learner.rank import LearnerRank
from tests.benchmarks.figures import Figure, Figures, interleaved
from tests.benchmarks.gemm import Gemm
from tests.benchmarks.recipes import Recipe, recipes

DTYPES = ("float32", "bfloat16")
GROUPS = {"quickstart": 16}
FEW_GROUPS = 2
LARGE_PARAMETERS = 10_000_000


def run(quick: bool) -> Figures:
    """Per model and dtype: trained tokens per second, share of the GEMM rate, share of scoring."""
    figures: Figures = {}
    for recipe in recipes():
        for dtype in DTYPES:
            figures |= {
                f"{recipe.name} {dtype}: {name}": figure
                for name, figure in _measure(recipe, dtype, quick).items()
            }
            gc.collect()
    return figures


def _measure(recipe: Recipe, dtype: str, quick: bool) -> Figures:
    rank = recipe.rank(dtype)
    try:
        parameters = sum(p.numel() for p in rank._policy.parameters())
        small = parameters < LARGE_PARAMETERS
        groups = GROUPS.get(recipe.name, 1 if quick else FEW_GROUPS)
        gemm = Gemm(getattr(torch, dtype), seconds=0.1 if small else 0.5)
        rounds = interleaved(
            lambda: {"gemm": gemm()},
            lambda: _step(rank, recipe, groups, 0),
            lambda: _step(rank, recipe, groups, 1),
            repeats=2 if quick else 15 if small else 3,
        )
    finally:
        rank.close()
    floor = Figure(tuple(rate / (6.0 * parameters) for rate in rounds["gemm"]), "tokens/s")
    figures = {"gemm": Figure(tuple(rate / 1e9 for rate in rounds["gemm"]), "GFLOP/s")}
    for lag in (0, 1):
        when = f"lag {lag}"
        figures |= {
            f"trained tokens, {when}": Figure(rounds[f"trained {lag}"], "tokens/s"),
            f"share of gemm, {when}": Figure(rounds[f"fed {lag}"], "tokens/s").per(floor),
            f"step, {when}": Figure(rounds[f"step_ms {lag}"], "ms"),
        }
    return figures | {"scoring share of step, lag 1": Figure(rounds["scoring 1"], "x")}


def _step(rank: LearnerRank, recipe: Recipe, groups: int, lag: int) -> dict[str, float]:
    request = recipe.request(rank.version, groups, rank.version, lag)
    start = time.perf_counter()
    result = rank.step(request)
    seconds = time.perf_counter() - start
    if not result.changed:
        raise RuntimeError(f"a step was skipped: {result.skipped}")
    metrics = result.metrics
    return {
        f"trained {lag}": sum(fate.trained_tokens for fate in result.fates) / seconds,
        f"fed {lag}": metrics["input_tokens"] / seconds,
        f"step_ms {lag}": seconds * 1e3,
        f"scoring {lag}": metrics["score_s"] / seconds,
    }
