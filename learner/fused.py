"""The objective's evaluation on a CPU in float32: loops over tokens, compiled by numba.

What the objective is says the torch code of `learner.objective`; this is a faster way to the same
numbers where it applies, and `tests/unit/learner/test_fused.py` holds both together. The batch is
taken in parts that stay in a processor's cache, by as many threads as torch has, and what they
find is summed in order: bitwise reproducible. numba is imported with the first batch that the
loops take.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner import kl
from learner.correction import keep_bounds
from learner.objective_config import ObjectiveConfig
from learner.objective_metrics import (
    BINS,
    FATE_CODES,
    FIRST_BIN,
    LAG_ORIGINS,
    LARGEST_LOG,
    MASK_REASONS,
    MAXIMA,
    MAXIMUM_STARTS,
    MOMENTS,
    ORIGINS,
    PARTS,
    SIZE_EDGES,
    SIZES,
    SUM_STARTS,
    SUMS,
    Metrics,
)
from learner.ratio import clip_bounds, rounding_slack
from learner.token_batch import TokenBatch, TokenFate

if TYPE_CHECKING:
    from learner import fused_types as types

_LEAST_TOKENS = 1 << 14
_PART_TOKENS = 1 << 16
# Buffers of a part, see Work, and what is found beside SUMS, see Found.
_BUFFERS = 12
_BESIDES = {"by_fate": len(TokenFate), "trained": 7, "clipped": 3, "mass": 8}
_BESIDE = sum(_BESIDES.values())
_CLIPPED = ("clip_low_tokens", "clip_high_tokens", "clip_dual_tokens")
_STATISTICS = ("token", "product", "geometric")


@dataclass(frozen=True)
class Samples:
    """The samples of a batch that have tokens, in their order; a BatchCount."""

    starts: NDArray[np.int64]
    """[R + 1]: first token of each, and the end."""
    lengths: NDArray[np.int64]
    """[R]: tokens in the data mask."""

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def samples(self) -> int:
        return int(np.count_nonzero(self.lengths))


@dataclass(frozen=True)
class Fused:
    """-loss x Z, its derivative by c times `scale`, fates, and the sums and maxima of Metrics."""

    value: float
    gradient: Tensor
    fates: Tensor
    metrics: Metrics


def worthwhile(logprobs: Tensor) -> bool:
    """Whether there are enough tokens to spend a second on numba, and half a minute where nothing
    is compiled yet. Depends on nothing but the batch, so that a resumed run takes the same way."""
    return len(logprobs) >= _LEAST_TOKENS


def contiguous_samples(
    config: ObjectiveConfig, logprobs: Tensor, batch: TokenBatch
) -> Samples | None:
    """The samples of a batch that the loops can take, else None: on a GPU, in float64, with terms
    beside the surrogate, or where samples are not contiguous and in order. A reference is no
    term where its KL is only reported."""
    terms = (
        config.covariance.kind != "none"
        or config.entropy_bonus
        or (config.kl_in_loss and batch.reference_logprobs is not None)
    )
    size = len(logprobs)
    if not size or logprobs.device.type != "cpu" or logprobs.dtype == torch.float64 or terms:
        return None
    from learner.fused_loops import find_samples

    starts = np.empty(max(1, min(batch.num_samples, size)) + 1, np.int64)
    lengths = np.empty(len(starts) - 1, np.int64)
    index = batch.sample_index.to(torch.int64).contiguous().numpy()
    mask = batch.mask.contiguous().numpy()
    count = find_samples(index, mask, batch.num_samples, starts, lengths)
    return None if count < 0 else Samples(starts[: count + 1], lengths[:count])


def evaluate_fused(
    config: ObjectiveConfig,
    logprobs: Tensor,
    batch: TokenBatch,
    samples: Samples,
    scale: float,
    *,
    diagnostics: bool,
) -> Fused:
    """See `learner.objective.evaluate`; the loss is not yet among the sums."""
    size = len(logprobs)
    gradient, fates = np.empty(size, np.float32), np.empty(size, np.uint8)
    parts = _parts(samples)
    values = np.zeros(len(parts))
    sums = np.zeros((len(parts), sum(SUMS.values()) + _BESIDE))
    maxima = np.zeros((len(parts), sum(MAXIMA.values())))
    rules = _rules(config, batch, scale, diagnostics)
    keep, tokens = _keep(config), _tokens(logprobs, batch)
    # Every part has sums of its own, so that how many threads there are changes nothing.
    threads = max(1, min(torch.get_num_threads(), len(parts)))

    def take(thread: int) -> None:
        buffers = np.empty((_BUFFERS, max(high - low for _, _, low, high in parts)), np.float32)
        for number in range(thread, len(parts), threads):
            found = _found(sums[number], maxima[number])
            values[number] = _evaluate_part(
                rules, keep, tokens, samples, parts[number], buffers, gradient, fates, found
            )

    if threads == 1:
        take(0)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(take, range(threads)))
    total, largest = sums.sum(axis=0), maxima.max(axis=0)
    _name_sums(batch, samples, _found(total, largest), diagnostics, total)
    if diagnostics and batch.reference_logprobs is not None:
        kept = torch.from_numpy(fates) == int(TokenFate.TRAINED)
        distance = torch.where(kept, logprobs.detach().float() - batch.reference_logprobs, 0.0)
        total[SUM_STARTS["kl"]] = kl.estimate(config.kl.estimator, distance).sum().item()
        total[SUM_STARTS["kl_tokens"]] = kept.count_nonzero().item()
    metrics = Metrics(torch.from_numpy(total[:-_BESIDE]), torch.from_numpy(largest))
    return Fused(float(values.sum()), torch.from_numpy(gradient), torch.from_numpy(fates), metrics)


def _evaluate_part(
    rules: "types.Rules",
    keep: "types.Keep",
    whole: "types.Tokens",
    samples: Samples,
    part: tuple[int, int, int, int],
    buffers: NDArray[np.float32],
    gradient: NDArray[np.float32],
    fates: NDArray[np.uint8],
    found: "types.Found",
) -> float:
    from learner import fused_loops, fused_sums
    from learner import fused_types as types

    first, last, low, high = part
    starts, lengths = samples.starts[first : last + 1] - low, samples.lengths[first:last]
    tokens = types.Tokens._make(column[low:high] for column in whole)
    work = _work(rules, types.Work(*buffers[:, : high - low]))
    some = fates[low:high]
    value = fused_loops.evaluate(
        rules, keep, tokens, starts, lengths, work, gradient[low:high], some
    )
    fused_sums.add_counts(some, found)
    if rules.everything:
        scales = types.Scales(np.array(LAG_ORIGINS), np.array(SIZE_EDGES), FIRST_BIN)
        fused_sums.add(rules, scales, tokens, starts, lengths, work, some, found)
    return float(value)


def _parts(samples: Samples) -> list[tuple[int, int, int, int]]:
    """Whole samples that fit a processor's cache: first and last of them, and of their tokens."""
    starts = samples.starts
    wanted = np.arange(_PART_TOKENS, int(starts[-1]), _PART_TOKENS)
    bounds = np.unique([0, *np.searchsorted(starts, wanted), len(starts) - 1]).tolist()
    return [
        (first, last, int(starts[first]), int(starts[last])) for first, last in pairwise(bounds)
    ]


def _rules(
    config: ObjectiveConfig, batch: TokenBatch, scale: float, everything: bool
) -> "types.Rules":
    from learner import fused_types as types

    slack = rounding_slack(torch.float32)
    clip, correction = config.clip, config.correction
    bounds, at = clip_bounds(clip, slack), clip_bounds(clip, 0.0)
    cap_bound = math.inf if correction.cap is None else math.log(correction.cap)
    # Slack decides which side of a bound a ratio is on; what it is cut to is the bound itself.
    (above_low, above_high), (below_low, below_high) = bounds
    low = _with_ratio(above_low)[0], _with_ratio(below_low)[0]
    high = _with_ratio(above_high)[0], _with_ratio(below_high)[0]
    (above_low, above_high), (below_low, below_high) = at
    low_ratio = _with_ratio(above_low)[1], _with_ratio(below_low)[1]
    high_ratio = _with_ratio(above_high)[1], _with_ratio(below_high)[1]
    largest_log, largest = _with_ratio(LARGEST_LOG)
    log_cap, cap = _with_ratio(cap_bound)
    weight = correction.weight
    by_mean = config.ratio.unit != "token"
    to_behavior = config.ratio.anchor == "behavior" or batch.old_logprobs is None
    return types.Rules(
        everything=everything,
        max_lag=2**62 if config.max_staleness is None else config.max_staleness,
        per_sequence=config.per_sequence,
        of_sample=config.per_sequence or correction.veto is not None,
        mismatch_of_sample=bool(correction.statistics - {"token"}) or correction.veto is not None,
        rejecting=correction.veto is not None or bool(correction.keep),
        by_mean=by_mean,
        pure=config.ratio.unit == "sequence_pure" and clip.kind != "cispo",
        to_behavior=to_behavior,
        own_ratio=by_mean or to_behavior,
        cispo=clip.kind == "cispo",
        unclipped=clip.kind == "none",
        low=low,
        high=high,
        low_ratio=low_ratio,
        high_ratio=high_ratio,
        weight=_STATISTICS.index(weight) if weight != "none" else -1,
        log_cap=log_cap,
        cap=cap,
        capped_above=np.float32(cap_bound + slack),
        veto=np.float32(
            -math.inf if correction.veto is None else math.log(correction.veto) - slack
        ),
        by_length=config.aggregation.kind == "sequence_mean",
        largest_log=largest_log,
        largest=largest,
        scale=np.float32(scale),
    )


def _with_ratio(bound: float) -> tuple[np.float32, np.float32]:
    """A bound in log space and its `exp`, as torch would have them."""
    value = torch.tensor(bound, dtype=torch.float32)
    return np.float32(value.item()), np.float32(value.exp().item())


def _keep(config: ObjectiveConfig) -> "types.Keep":
    from learner import fused_types as types

    intervals = config.correction.keep
    bounds = [keep_bounds(interval, rounding_slack(torch.float32)) for interval in intervals]
    statistics = [_STATISTICS.index(interval.statistic) for interval in intervals]
    limits = np.array(bounds, np.float32).reshape(-1, 2)
    return types.Keep(np.array(statistics, np.int64), limits[:, 0].copy(), limits[:, 1].copy())


def _tokens(logprobs: Tensor, batch: TokenBatch) -> "types.Tokens":
    """What the loops read of each token, contiguous and of their types."""
    from learner import fused_types as types

    columns: dict[str, tuple[Tensor | None, torch.dtype]] = {
        "mask": (batch.mask, torch.bool),
        "current": (logprobs, torch.float32),
        "behavior": (batch.behavior_logprobs, torch.float32),
        "old": (batch.old_logprobs, torch.float32),
        "advantages": (batch.advantages, torch.float32),
        "lag": (batch.version_lag, torch.int64),
        "crossed": (batch.crossed, torch.bool),
        "position": (batch.position, torch.int64),
        "entropy": (batch.entropy, torch.float32),
    }
    arrays = {
        name: (torch.empty(0) if column is None else column.detach()).to(dtype).contiguous().numpy()
        for name, (column, dtype) in columns.items()
    }
    return types.Tokens(**arrays)


def _work(rules: "types.Rules", work: "types.Work") -> "types.Work":
    """One array for what is the same thing under these rules."""
    if not rules.own_ratio:
        work = work._replace(ratio=work.movement, ratio_exp=work.movement_exp)
    if rules.weight <= 0:
        work = work._replace(log_weight=work.mismatch, weight_exp=work.mismatch_exp)
    return work


def _places() -> dict[str, tuple[int, tuple[int, ...]]]:
    """Where in the sums, and in those beside them, what the loops find lies, and its shape."""
    origins, parts = len(ORIGINS), len(PARTS)
    within = {
        "origin_fates": ("origin_fates", (origins, len(FATE_CODES))),
        "old_slope": ("old_slope", (SUMS["old_slope"],)),
        "moments": ("movement/moments/0", (parts, origins, len(MOMENTS))),
        "bins": ("movement/histogram/0", (parts, origins, BINS)),
        **{
            f"{kind}_{what}": (f"{kind}_{what}", (len(SIZES),))
            for kind in ("position", "length")
            for what in ("tokens", "masked")
        },
    }
    places = {name: (SUM_STARTS[first], shape) for name, (first, shape) in within.items()}
    start = sum(SUMS.values())
    for name, size in _BESIDES.items():
        places[name] = start, (size,)
        start += size
    return places


_PLACES = _places()


def _found(sums: NDArray[np.float64], maxima: NDArray[np.float64]) -> "types.Found":
    from learner import fused_types as types

    views = {
        name: sums[start : start + math.prod(shape)].reshape(shape)
        for name, (start, shape) in _PLACES.items()
    }
    start, lag, shape = MAXIMUM_STARTS["movement/abs/0"], MAXIMUM_STARTS["lag"], _PLACES["bins"][1]
    largest = maxima[start : start + shape[0] * shape[1]].reshape(shape[:2])
    return types.Found(**views, largest=largest, largest_lag=maxima[lag : lag + 1])


def _name_sums(
    batch: TokenBatch,
    samples: Samples,
    found: "types.Found",
    diagnostics: bool,
    sums: NDArray[np.float64],
) -> None:
    """Put the rest of what was found in its places."""
    from learner import fused_types as types

    by_fate, trained, mass = found.by_fate, found.trained, found.mass
    names: dict[str, Any] = {
        "tokens": samples.tokens,
        "samples": samples.samples,
        "trained_tokens": by_fate[TokenFate.TRAINED],
    }
    for reason in MASK_REASONS:
        names[f"masked_tokens/{reason}"] = by_fate[TokenFate[reason.upper()]]
    if diagnostics:
        live = samples.tokens - by_fate[TokenFate.STALE]
        names |= {
            "measured_tokens": samples.tokens,
            "zero_advantage_tokens": trained[types.ZERO_ADVANTAGE],
            "covariance": trained[: types.WEIGHT],
            "weight": trained[types.WEIGHT],
            "mass": mass[: types.BY_CLIP].sum(),
            "mass_removed": [*mass[types.BY_STALE :], 0.0],
            "cap_tokens": found.origin_fates[:, FATE_CODES.index("cap")].sum(),
        }
        names |= dict(zip(_CLIPPED, found.clipped, strict=True))
        if batch.entropy is not None:
            names |= {"entropy": trained[types.ENTROPY], "entropy_tokens": live}
        if batch.version_lag is not None:
            names |= {"lag": trained[types.LAG], "lag_tokens": by_fate[TokenFate.TRAINED]}
        if batch.old_logprobs is not None:
            live_codes = np.delete(found.origin_fates, FATE_CODES.index("stale"), axis=1).sum(1)
            for part in PARTS:
                names |= {f"{part}/tokens/{i}": n for i, n in enumerate(live_codes)}
    for name, value in names.items():
        start = SUM_STARTS[name]
        sums[start : start + SUMS[name]] = value
