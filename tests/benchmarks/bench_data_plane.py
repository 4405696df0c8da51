"""What moving trajectories through the object store costs.

1,000 samples of 4,096 tokens are put by one process, then fetched and summed token by token in
another: as Arrow batches and as pickled Python lists, once in groups of 8 as a run does it, once
as a single object, which leaves out Ray's cost per object. A plain copy of the same bytes is the
yardstick. All alternate, so that load from elsewhere falls on each of them.
"""

import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
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

GROUPS, GROUP_SIZE, RESPONSE_TOKENS, PROMPT_TOKENS = 125, 8, 4096, 64
WAYS = ("arrow", "lists", "one_arrow", "one_lists", "validate", "memcpy")
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
    return {"put_s": put_s, "get_touch_s": read_s, "total_s": put_s + read_s, "sum": checksum}


def _copy(batches: Sequence[pa.RecordBatch]) -> dict[str, float]:
    sources = [tokens(batch, name)[0].view(np.uint8) for batch in batches for name in LISTS]
    targets = [np.ones_like(source) for source in sources]
    start = time.perf_counter()
    for source, target in zip(sources, targets, strict=True):
        np.copyto(target, source)
    return {"total_s": time.perf_counter() - start}


def _validate(batches: Sequence[pa.RecordBatch]) -> dict[str, float]:
    start = time.perf_counter()
    for batch in batches:
        validate(batch, verdicts=False)
    return {"total_s": time.perf_counter() - start}


def _summary(rows: list[dict[str, float]], nbytes: int) -> dict[str, Any]:
    stages = {key: sorted(row[key] for row in rows) for key in rows[0] if key != "sum"}
    summary: dict[str, Any] = {
        key: {"median": median(values), "min": values[0], "max": values[-1]}
        for key, values in stages.items()
    }
    summary["bytes_per_second"] = nbytes / summary["total_s"]["median"]
    return summary


def run(
    groups: int = GROUPS, response_tokens: int = RESPONSE_TOKENS, repeats: int = 5
) -> dict[str, Any]:
    """Seconds by stage (median, min, max) and bytes per second for each of `WAYS`.

    `arrow_over_lists` and `one_arrow_over_one_lists` are ratios of total medians. Starts a local
    Ray where none is connected. RuntimeError when not all ways read the same values.
    """
    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    if __name__ != "__main__":
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        return _run(groups, response_tokens, repeats)
    finally:
        if started:
            ray.shutdown()


def _run(groups: int, response_tokens: int, repeats: int) -> dict[str, Any]:
    samples = [make_group(group_id, response_tokens) for group_id in range(groups)]
    meta = TrajectoryMeta(tokenizer="none", model="none")
    batches = [rollout_batch(group, meta) for group in samples]
    pickled = [[{name: getattr(s, name).tolist() for name in LISTS} for s in g] for g in samples]
    nbytes = sum(batch.nbytes for batch in batches)
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
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, measure in ways.items():
            row = measure()
            if repeat > 0:  # the first round starts workers and maps the store's memory
                rows[name].append(row)
    ray.kill(reader)
    sums = [row["sum"] for measured in rows.values() for row in measured if "sum" in row]
    if not np.allclose(sums, sums[0], rtol=1e-6):
        raise RuntimeError(f"not all ways read the same values: {sums}")
    result: dict[str, Any] = {name: _summary(measured, nbytes) for name, measured in rows.items()}
    totals = {name: result[name]["total_s"]["median"] for name in ways}
    result["arrow_over_lists"] = totals["arrow"] / totals["lists"]
    result["one_arrow_over_one_lists"] = totals["one_arrow"] / totals["one_lists"]
    result |= {"samples": groups * GROUP_SIZE, "response_tokens": response_tokens, "bytes": nbytes}
    return result


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['samples']} samples x {result['response_tokens']} tokens,"
        f" {result['bytes'] / 1e6:.0f} MB as Arrow; ms: median (min-max)",
        f"{'':<10}{'put':>20}{'get + touch':>20}{'total':>20}{'GB/s':>8}",
    ]
    for name in WAYS:
        cells = "".join(
            f"{_ms(result[name].get(stage)):>20}" for stage in ("put_s", "get_touch_s", "total_s")
        )
        lines.append(f"{name:<10}{cells}{result[name]['bytes_per_second'] / 1e9:>8.2f}")
    lines.append(
        f"arrow costs {result['arrow_over_lists']:.3f} of what pickled lists cost in groups,"
        f" {result['one_arrow_over_one_lists']:.3f} as one object"
    )
    return "\n".join(lines)


def _ms(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "-"
    return "{median:.1f} ({min:.1f}-{max:.1f})".format(**{k: v * 1e3 for k, v in spread.items()})


if __name__ == "__main__":
    print(table(run()))
