"""The parts of the benchmarks, and how one is run in a process of its own."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module

from tests.benchmarks.figures import Figures

PARTS = {
    "machine": "gemm",
    "loop": "bench_loop",
    "weight-sync": "bench_weight_sync",
    "data-plane": "bench_data_plane",
    "ledger": "bench_ledger",
    "learner": "bench_learner",
    "objective": "bench_objective",
    "memory": "bench_memory",
}
"""Name → module with `run(quick) -> Figures`."""

LONG = ("memory",)
"""Parts that have to be asked for by name."""


def run_part(name: str, quick: bool) -> Figures:
    """A part's figures, from a fresh process: memory, threads and process group are its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_run, PARTS[name], quick).result()


def _run(module: str, quick: bool) -> Figures:
    return import_module(f"tests.benchmarks.{module}").run(quick)
