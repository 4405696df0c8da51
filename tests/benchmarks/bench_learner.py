"""The learner's batch step against matrix multiplication in its own dtype on one thread.

Model FLOPs are 6 x parameters x real tokens: no padding, no recomputation, no scoring pass. The
samples of a step are one version old, as in an asynchronous run, so that a step scores them
under the version that sampled them before it trains.
"""

import gc
import time

import torch

from learner.rank import LearnerRank
from tests.benchmarks.figures import Figure, Figures, interleaved
from tests.benchmarks.gemm import Gemm
from tests.benchmarks.recipes import Recipe, recipes

DTYPES = ("float32", "bfloat16")
LARGE_PARAMETERS = 10_000_000


def run(quick: bool) -> Figures:
    """Per model and dtype: trained tokens per second and shares of the GEMM rate."""
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
    parameters = sum(p.numel() for p in rank._policy.parameters())
    large = parameters > LARGE_PARAMETERS
    gemm = Gemm(getattr(torch, dtype), seconds=0.5 if large else 0.1)
    groups, size = recipe.config.learner.groups_per_batch, recipe.config.rollout.samples_per_group
    if large:
        # Without instructions for bfloat16 a step of a whole group would take minutes.
        groups, size = 1, size if gemm() > 20e9 else 2
    try:
        rounds = interleaved(
            lambda: {"gemm": gemm()},
            lambda: _step(rank, recipe, groups, size),
            repeats=(1 if quick else 2) if large else (3 if quick else 9),
        )
    finally:
        rank.close()
    floor = Figure(tuple(rate / (6.0 * parameters) for rate in rounds["gemm"]), "tokens/s")
    fed = Figure(rounds["fed tokens"], "tokens")
    step, train = (Figure(rounds[name], "s") for name in ("step", "train"))
    return {
        "gemm": Figure(tuple(rate / 1e9 for rate in rounds["gemm"]), "GFLOP/s"),
        "fed tokens": fed,
        "trained tokens": Figure(rounds["trained tokens"], "tokens").per(step, "tokens/s"),
        "step": Figure(tuple(s * 1e3 for s in step.values), "ms"),
        "gemm share, step": fed.per(step).per(floor),
        "gemm share, no scoring": fed.per(train).per(floor),
        "scoring share": Figure(rounds["score"], "s").per(step),
    }


def _step(rank: LearnerRank, recipe: Recipe, groups: int, size: int) -> dict[str, float]:
    request = recipe.request(rank.version, groups, size)
    start = time.perf_counter()
    result = rank.step(request)
    seconds = time.perf_counter() - start
    if not result.changed:
        raise RuntimeError(f"a step was skipped: {result.skipped}")
    return {
        "step": seconds,
        "train": result.metrics["train_s"],
        "score": result.metrics["score_s"],
        "fed tokens": result.metrics["input_tokens"],
        "trained tokens": sum(fate.trained_tokens for fate in result.fates),
    }
