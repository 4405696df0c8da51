"""What one evaluation of the objective reports, as sums that add up over micro-batches and ranks.

A mean of means is wrong as soon as micro-batches differ in size, so an evaluation reports counts,
sums, histograms and maxima only; `Metrics.finalise` turns those of the whole batch into shares,
means and quantiles.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

PARTS = ("movement", "mismatch")
MASK_REASONS = ("stale", "veto", "keep_low", "keep_high")
LAG_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9+")
ORIGINS = (*(f"lag_{bucket}" for bucket in LAG_BUCKETS), "crossed")
"""Where a token comes from: its lag, or apart, that it was sampled after an update in
mid-generation. Each token belongs to one."""
LAG_ORIGINS = (0, 1, 2, 3, 3, 4, 4, 4, 4, 5)
"""Origin of each lag; of a larger one the last."""
MOMENTS = ("log", "abs", "excess", "excess_sq", "k3")
FATE_CODES = ("trained", "stale", "veto", "keep_low", "keep_high", "cap")
REMOVALS = ("stale", "veto", "keep", "cap", "clip_low", "clip_high", "clip_dual", "clip_cov")
"""Who takes gradient mass, in this order."""
SIZE_EDGES = (16, 64, 256, 1024, 4096)
SIZES = ("0-15", "16-63", "64-255", "256-1023", "1024-4095", "4096+")

# Histograms of |d| have four bins per octave, cut by the bits of a float32: they need no logarithm.
LOWEST_OCTAVE, OCTAVES = -24, 30
BINS = 4 * OCTAVES
FIRST_BIN = (127 + LOWEST_OCTAVE) << 2
LARGEST_LOG = 40.0
"""exp of more overflows float32 sums; such a ratio is the only sample that counts anyhow."""
_LEAST_SPREAD = 1e-5
"""Of a variance, as a share of the mean square."""

SUMS: dict[str, int] = {
    "loss": 1,
    "tokens": 1,
    "samples": 1,
    "trained_tokens": 1,
    **{f"masked_tokens/{reason}": 1 for reason in MASK_REASONS},
    "clip_low_tokens": 1,
    "clip_high_tokens": 1,
    "clip_dual_tokens": 1,
    "clip_cov_tokens": 1,
    "cap_tokens": 1,
    "zero_advantage_tokens": 1,
    "measured_tokens": 1,
    "weight": 1,
    "entropy": 1,
    "entropy_tokens": 1,
    "lag": 1,
    "lag_tokens": 1,
    "kl": 1,
    "kl_tokens": 1,
    "covariance": 3,
    "old_slope": 4,
    "mass": 1,
    "mass_removed": len(REMOVALS),
    "position_tokens": len(SIZES),
    "position_masked": len(SIZES),
    "length_tokens": len(SIZES),
    "length_masked": len(SIZES),
    "origin_fates": len(ORIGINS) * len(FATE_CODES),
    **{f"{part}/tokens/{i}": 1 for part in PARTS for i in range(len(ORIGINS))},
    **{f"{part}/moments/{i}": len(MOMENTS) for part in PARTS for i in range(len(ORIGINS))},
    **{f"{part}/histogram/{i}": BINS for part in PARTS for i in range(len(ORIGINS))},
}
"""Sizes of the sums by name, in the order in which they are laid out. covariance: Σc, ΣA, ΣcA over
trained tokens. old_slope: Σp, Σp², Σpd, Σd² with d = p - b over live tokens."""
MAXIMA: dict[str, int] = {
    "lag": 1,
    **{f"{part}/abs/{i}": 1 for part in PARTS for i in range(len(ORIGINS))},
}


@dataclass(frozen=True)
class Metrics:
    """`sums` and `maxima`, float64, laid out one after the other as SUMS and MAXIMA say.

    Micro-batches combine with `+`; ranks with one all-reduce (sum) over `sums` and one (max) over
    `maxima`. All maxima are of non-negative quantities, so zeros are neutral for both.
    """

    sums: Tensor
    maxima: Tensor

    @classmethod
    def zeros(cls, device: torch.device | str = "cpu") -> Self:
        return cls.pack({}, {}, torch.device(device))

    @classmethod
    def pack(
        cls, sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor], device: torch.device
    ) -> Self:
        """From tensors by name, of any shape with as many elements; a missing name is 0. Does not
        wait for the device."""
        return cls(_packed(SUMS, sums, device), _packed(MAXIMA, maxima, device))

    def __add__(self, other: "Metrics") -> "Metrics":
        return Metrics(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def total(self, name: str) -> Tensor:
        """The sums of one name: 0-d where there is one, else flat."""
        (values,) = _unpacked({name: SUMS[name]}, self.sums, SUM_STARTS[name]).values()
        return values[0] if SUMS[name] == 1 else values

    def finalise(self) -> dict[str, float]:
        """Counts, shares, means and quantiles of everything summed so far.

        Clip and cap shares are of trained tokens, mask shares of all tokens in the data mask,
        `mass_removed/*` of Σ|wA|. `movement_*` is of c - p, `mismatch_*` of p - b, over tokens that
        are in the data mask and not stale: k1 = -mean, k3 = mean(exp(d) - 1 - d), ess =
        (Σw)²/(N Σw²) of the unclamped token ratio, quantiles of |d| to about a tenth. Only mean
        log-ratios (k1) add up over the two parts. Names with `/lag_*` and `/crossed` are of the
        tokens of that origin. What was not measured is absent.
        """
        sums = {name: part.tolist() for name, part in _unpacked(SUMS, self.sums).items()}
        maxima = {name: part.tolist() for name, part in _unpacked(MAXIMA, self.maxima).items()}
        one = {name: values[0] for name, values in sums.items() if SUMS[name] == 1}
        result = {name: one[name] for name in ("loss", "tokens", "samples", "trained_tokens")}
        result |= {name: one[name] for name in one if name.startswith("masked_tokens/")}
        result |= _shares(one) | _means(one, sums)
        if one["lag_tokens"]:
            result["staleness_mean"] = one["lag"] / one["lag_tokens"]
            result["staleness_max"] = maxima["lag"][0]
        for part in PARTS:
            result |= _part_summaries(part, sums, maxima, bool(one["lag_tokens"]))
        result |= _mass(one["mass"], sums["mass_removed"])
        if one["lag_tokens"]:
            result |= _origin_shares(sums["origin_fates"])
        for kind in ("position", "length"):
            rows = zip(SIZES, sums[f"{kind}_tokens"], sums[f"{kind}_masked"], strict=True)
            result |= {f"masked_share/{kind}_{b}": lost / n for b, n, lost in rows if n}
        return result


def bin_of(magnitudes: Tensor) -> Tensor:
    """int64[N]: histogram bin of each |d|; below the lowest octave bin 0, above the last one."""
    bits = magnitudes.float().view(torch.int32) >> 21
    return (bits - FIRST_BIN).clamp_(0, BINS - 1).long()


def quantile(histogram: list[float], share: float, largest: float) -> float:
    """The smallest |d| that `share` of the counts do not exceed, linear within its bin."""
    target, before = share * math.fsum(histogram), 0.0
    for place, count in enumerate(histogram):
        if count and before + count >= target:
            octave, quarter = divmod(place, 4)
            step = 2.0 ** (octave + LOWEST_OCTAVE) / 4
            low = (4 + quarter) * step if place else 0.0
            width = step if place else 1.25 * 2.0**LOWEST_OCTAVE
            return min(low + width * (target - before) / count, largest)
        before += count
    return largest


def _shares(one: Mapping[str, float]) -> dict[str, float]:
    shares = {}
    if trained := one["trained_tokens"]:
        for name in ("clip_low", "clip_high", "clip_dual", "clip_cov", "cap"):
            shares[f"{name}_share"] = one[f"{name}_tokens"] / trained
        shares["weight_mean"] = one["weight"] / trained
    if tokens := one["tokens"]:
        for reason in MASK_REASONS:
            shares[f"{reason}_share"] = one[f"masked_tokens/{reason}"] / tokens
        shares["zero_advantage_share"] = one["zero_advantage_tokens"] / tokens
    return shares if one["measured_tokens"] else {}


def _means(one: Mapping[str, float], sums: Mapping[str, list[float]]) -> dict[str, float]:
    means = {}
    for name in ("entropy", "kl"):
        if count := one[f"{name}_tokens"]:
            means[name] = one[name] / count
    if one["measured_tokens"] and (trained := one["trained_tokens"]):
        current, advantage, product = (value / trained for value in sums["covariance"])
        means["logprob_advantage_cov"] = product - current * advantage
    origins = range(len(ORIGINS))
    if live := sum(one[f"mismatch/tokens/{i}"] for i in origins):
        p, p_sq, cross, d_sq = (value / live for value in sums["old_slope"])
        d = sum(sums[f"mismatch/moments/{i}"][0] for i in origins) / live
        p_spread, d_spread = p_sq - p * p, d_sq - d * d
        # A variance that is only what sums in float32 leave of equal values says nothing.
        if p_spread > _LEAST_SPREAD * p_sq and d_spread > _LEAST_SPREAD * d_sq:
            means["mismatch_old_correlation"] = (cross - p * d) / math.sqrt(p_spread * d_spread)
            means["mismatch_old_slope"] = (cross - p * d) / p_spread
    return means


def _mass(total: float, removed: list[float]) -> dict[str, float]:
    if not total or not math.isfinite(total):
        return {}
    shares = dict(zip(REMOVALS, (lost / total for lost in removed), strict=True))
    return {f"mass_removed/{name}": share for name, share in shares.items()}


def _origin_shares(fates: list[float]) -> dict[str, float]:
    """Of the tokens of each origin in the data mask: how many the correction touched."""
    result = {}
    for number, origin in enumerate(ORIGINS):
        row = fates[number * len(FATE_CODES) : (number + 1) * len(FATE_CODES)]
        if tokens := sum(row):
            counts = dict(zip(FATE_CODES, row, strict=True))
            result[f"tokens/{origin}"] = tokens
            result |= {
                f"{name}_share/{origin}": counts[name] / tokens
                for name in ("stale", "veto", "keep_low", "keep_high", "cap")
            }
    return result


def _part_summaries(
    part: str,
    sums: Mapping[str, list[float]],
    maxima: Mapping[str, list[float]],
    by_origin: bool,
) -> dict[str, float]:
    places = range(len(ORIGINS))
    counts = [sums[f"{part}/tokens/{i}"][0] for i in places]
    moments = [sums[f"{part}/moments/{i}"] for i in places]
    bins = [sums[f"{part}/histogram/{i}"] for i in places]
    largest = [maxima[f"{part}/abs/{i}"][0] for i in places]
    overall = [[sum(column) for column in zip(*rows, strict=True)] for rows in (moments, bins)]
    result = _part_summary(part, "", sum(counts), overall[0], overall[1], _largest(largest))
    if by_origin:
        for i, origin in enumerate(ORIGINS):
            result |= _part_summary(part, f"/{origin}", counts[i], moments[i], bins[i], largest[i])
    return result


def _largest(values: list[float]) -> float:
    """NaN where one is: `max` would keep it or not, by its place."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def _part_summary(
    part: str,
    suffix: str,
    count: float,
    moments: list[float],
    histogram: list[float],
    largest: float,
) -> dict[str, float]:
    if not count:
        return {}
    log, magnitude, excess, excess_sq, k3 = moments
    weight, weight_sq = count + excess, count + 2 * excess + excess_sq
    finite = math.isfinite(weight_sq) and weight_sq > 0
    values = {
        "abs_mean": magnitude / count,
        "abs_max": largest,
        "p50": quantile(histogram, 0.5, largest),
        "p99": quantile(histogram, 0.99, largest),
        "k1": -log / count,
        "k3": k3 / count,
        "ratio_mean": weight / count,
        "ess": weight * weight / (count * weight_sq) if finite else 0.0,
    }
    return {f"{part}_{name}{suffix}": value for name, value in values.items()}


def _starts(layout: Mapping[str, int]) -> dict[str, int]:
    return dict(zip(layout, accumulate(layout.values(), initial=0), strict=False))


SUM_STARTS, MAXIMUM_STARTS = _starts(SUMS), _starts(MAXIMA)


def _unpacked(layout: Mapping[str, int], flat: Tensor, start: int = 0) -> dict[str, Tensor]:
    parts = {}
    for name, size in layout.items():
        parts[name] = flat[start : start + size]
        start += size
    return parts


def _packed(
    layout: Mapping[str, int], values: Mapping[str, Tensor], device: torch.device
) -> Tensor:
    parts = []
    for name, size in layout.items():
        if name in values:
            parts.append(values[name].detach().double().reshape(size))
        else:
            parts.append(torch.zeros(size, dtype=torch.float64, device=device))
    return torch.cat(parts)
