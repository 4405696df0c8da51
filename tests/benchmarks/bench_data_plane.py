"""What moving trajectories through the object store costs.

1,000 samples of 4,096 tokens are put by one process, then fetched and summed token by token in
another: as Arrow batches and as pickled Python lists, once in groups of 8 as a run does it, once
as a single object, which leaves out Ray's cost per object. A plain copy of the same bytes is the
yardstick. All alternate, so that load from elsewhere falls on each of them.
"""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from actors.trajectory import (
    RolloutSample,
    TrajectoryMeta,
    VersionSpan,
    rollout_batch,
    sample_id,
    tokens,
    validate,
)
from tests.benchmarks.figures import Figure, Figures, Measure, interleaved

GROUPS, GROUP_SIZE, RESPONSE_TOKENS, PROMPT_TOKENS = 125, 8, 4096, 64
QUICK_GROUPS = 10
RATIOS = (
    ("arrow", "memcpy"),
    ("arrow", "lists"),
    ("one_arrow", "one_lists"),
    ("validate", "memcpy"),
)
LISTS = ("prompt_ids", "response_ids", "behavior_logprobs", "loss_mask")


def make_group(group_id: int, response_tokens: int) -> list[RolloutSample]:
    rng = np.random.default_rng(group_id)
    return [
        RolloutSample(
            sample_id=sample_id(group_id, 0, index),
            group_id=group_id,
            task_id=f"task-{group_id}",
            sample_index=index,
            attempt=0,
            prompt_ids=rng.integers(0, 50_000, PROMPT_TOKENS, dtype=np.int32),
            response_ids=rng.integers(0, 50_000, response_tokens, dtype=np.int32),
            behavior_logprobs=-rng.random(response_tokens, np.float32),
            loss_mask=np.ones(response_tokens, bool),
            version_spans=[VersionSpan(3, 0, response_tokens)],
            finish_reason="stop",
            worker="rollout-0",
            started_at=1.0,
            finished_at=2.0,
            temperature=1.0,
        )
        for index in range(GROUP_SIZE)
    ]


class Reader:
    """The consumer, in a process of its own: (seconds, checksum) of fetching and reading all."""

    def arrow(self, refs: list[Any]) -> tuple[float, float]:
        start, total = time.perf_counter(), 0.0
        for batch in ray.get(refs):
            for name in LISTS:
                total += float(tokens(batch, name)[0].sum())
        return time.perf_counter() - start, total

    def lists(self, refs: list[Any]) -> tuple[float, float]:
        start, total = time.perf_counter(), 0.0
        for rows in ray.get(refs):
            for row in rows:
                total += sum(float(sum(row[name])) for name in LISTS)
        return time.perf_counter() - start, total


def _put_and_read(objects: Sequence[Any], read: Any) -> dict[str, float]:
    start = time.perf_counter()
    refs = [ray.put(value) for value in objects]
    put_s = time.perf_counter() - start
    read_s, checksum = ray.get(read.remote(refs))
    return {"put": put_s, "read": read_s, "total": put_s + read_s, "sum": checksum}


def _copy(batches: Sequence[pa.RecordBatch]) -> dict[str, float]:
    sources = [tokens(batch, name)[0].view(np.uint8) for batch in batches for name in LISTS]
    targets = [np.ones_like(source) for source in sources]
    start = time.perf_counter()
    for source, target in zip(sources, targets, strict=True):
        np.copyto(target, source)
    return {"total": time.perf_counter() - start}


def _validate(batches: Sequence[pa.RecordBatch]) -> dict[str, float]:
    start = time.perf_counter()
    for batch in batches:
        validate(batch, verdicts=False)
    return {"total": time.perf_counter() - start}


def run(quick: bool) -> Figures:
    """Milliseconds by stage and GB/s for each way; ratios of totals, round by round.

    Starts a local Ray where none is connected. RuntimeError when not all ways read the same
    values.
    """
    started = not ray.is_initialized()
    if started:
        ray.init(
            num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
        )
    # Ray's workers do not have the repository's root on their path.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        return _run(QUICK_GROUPS if quick else GROUPS, repeats=2 if quick else 5)
    finally:
        if started:
            ray.shutdown()


def _run(groups: int, repeats: int) -> Figures:
    samples = [make_group(group_id, RESPONSE_TOKENS) for group_id in range(groups)]
    meta = TrajectoryMeta(tokenizer="none", model="none")
    batches = [rollout_batch(group, meta) for group in samples]
    pickled = [[{name: getattr(s, name).tolist() for name in LISTS} for s in g] for g in samples]
    all_rows = [row for rows in pickled for row in rows]
    reader: Any = ray.remote(num_cpus=0)(Reader).remote()
    ways: dict[str, Callable[[], dict[str, float]]] = {
        "arrow": lambda: _put_and_read(batches, reader.arrow),
        "lists": lambda: _put_and_read(pickled, reader.lists),
        "one_arrow": lambda: _put_and_read([pa.concat_batches(batches)], reader.arrow),
        "one_lists": lambda: _put_and_read([all_rows], reader.lists),
        "validate": lambda: _validate(batches),
        "memcpy": lambda: _copy(batches),
    }
    # The first round starts workers and maps the store's memory.
    rounds = interleaved(*(_named(way, ways[way]) for way in ways), repeats=repeats)
    ray.kill(reader)
    sums = [value for name, values in rounds.items() if name.endswith(" sum") for value in values]
    if not np.allclose(sums, sums[0], rtol=1e-6):
        raise RuntimeError(f"not all ways read the same values: {sums}")
    return _figures(rounds, sum(batch.nbytes for batch in batches))


def _named(way: str, measure: Callable[[], dict[str, float]]) -> Measure:
    return lambda: {f"{way} {stage}": value for stage, value in measure().items()}


def _figures(rounds: dict[str, tuple[float, ...]], nbytes: int) -> Figures:
    figures = {"trajectories": Figure((nbytes / 1e6,), "MB")}
    for name, seconds in rounds.items():
        way, stage = name.split()
        if stage == "total":
            figures[f"{way} bandwidth"] = Figure(tuple(nbytes / 1e9 / s for s in seconds), "GB/s")
        if stage != "sum":
            figures[name] = Figure(tuple(s * 1e3 for s in seconds), "ms")
    for way, other in RATIOS:
        ratio = figures[f"{way} total"].per(figures[f"{other} total"])
        figures[f"{way} over {other}"] = ratio
    return figures
