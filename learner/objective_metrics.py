"""What one evaluation of the objective reports, as sums that add up over micro-batches and ranks.

A mean of means is wrong as soon as micro-batches differ in size, so an evaluation reports counts,
sums and maxima only; `Metrics.finalise` turns those of the whole batch into shares and means.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

PARTS = ("movement", "mismatch")
MASK_REASONS = ("stale", "veto", "keep_low", "keep_high")
_PART_SUMS = ("tokens", "log", "abs", "excess", "excess_sq", "k3")

SUMS: tuple[str, ...] = (
    "loss",
    "tokens",
    "samples",
    "trained_tokens",
    *(f"masked_tokens/{reason}" for reason in MASK_REASONS),
    "clip_low_tokens",
    "clip_high_tokens",
    "clip_dual_tokens",
    "cap_tokens",
    "weight",
    "entropy",
    "entropy_tokens",
    "lag",
    "lag_tokens",
    *(f"{part}/{name}" for part in PARTS for name in _PART_SUMS),
)
MAXIMA: tuple[str, ...] = ("lag", *(f"{part}/abs" for part in PARTS))


@dataclass(frozen=True)
class Metrics:
    """`sums` float64[len(SUMS)] and `maxima` float64[len(MAXIMA)], in the order of those names.

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
        """From scalars by name; a missing name is 0. Does not wait for the device."""
        return cls(_packed(SUMS, sums, device), _packed(MAXIMA, maxima, device))

    def __add__(self, other: "Metrics") -> "Metrics":
        return Metrics(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def finalise(self) -> dict[str, float]:
        """Counts, shares and means of everything summed so far.

        Clip and cap shares are of trained tokens, mask shares of all tokens in the data mask.
        `movement_*` is of c - p, `mismatch_*` of p - b, over tokens that are in the data mask and
        not stale: k1 = -mean, k3 = mean(exp(d) - 1 - d), ess = (Σw)²/(N Σw²) of the unclamped
        token ratio. Only mean log-ratios (k1) add up over the two parts. What was not measured
        (no old log-probabilities, no entropy, no lag, no token) is absent.
        """
        sums = dict(zip(SUMS, self.sums.tolist(), strict=True))
        maxima = dict(zip(MAXIMA, self.maxima.tolist(), strict=True))
        masked = {name: sums[name] for name in SUMS if name.startswith("masked_tokens/")}
        result = {name: sums[name] for name in ("loss", "tokens", "samples", "trained_tokens")}
        result |= masked
        if trained := sums["trained_tokens"]:
            for name in ("clip_low", "clip_high", "clip_dual", "cap"):
                result[f"{name}_share"] = sums[f"{name}_tokens"] / trained
            result["weight_mean"] = sums["weight"] / trained
        if tokens := sums["tokens"]:
            for name, count in masked.items():
                result[f"{name.removeprefix('masked_tokens/')}_share"] = count / tokens
        if entropy_tokens := sums["entropy_tokens"]:
            result["entropy"] = sums["entropy"] / entropy_tokens
        if lag_tokens := sums["lag_tokens"]:
            result["staleness_mean"] = sums["lag"] / lag_tokens
            result["staleness_max"] = maxima["lag"]
        for part in PARTS:
            if count := sums[f"{part}/tokens"]:
                result |= _part_summary(part, sums, count)
                result[f"{part}_abs_max"] = maxima[f"{part}/abs"]
        return result


def log_ratio_sums(part: str, log_ratio: Tensor, known: Tensor) -> dict[str, Tensor]:
    """Sums for one part of c - b: `log_ratio[N]` is 0 outside `known` (bool[N]).

    exp(d) - 1 is summed rather than exp(d), since its zeros at unknown tokens need no second mask
    and small differences keep their digits.
    """
    excess = torch.expm1(log_ratio)
    return {
        f"{part}/tokens": known.count_nonzero(),
        f"{part}/log": log_ratio.sum(),
        f"{part}/abs": log_ratio.abs().sum(),
        f"{part}/excess": excess.sum(),
        f"{part}/excess_sq": torch.dot(excess, excess),
        f"{part}/k3": (excess - log_ratio).sum(),
    }


def largest(values: Tensor) -> Tensor:
    """Largest magnitude of `values`; 0 for none."""
    if not values.numel():
        return values.new_zeros(())
    low, high = values.aminmax()
    return torch.maximum(-low, high)


def _part_summary(part: str, sums: Mapping[str, float], count: float) -> dict[str, float]:
    excess = sums[f"{part}/excess"]
    weight, weight_sq = count + excess, count + 2 * excess + sums[f"{part}/excess_sq"]
    finite = math.isfinite(weight_sq) and weight_sq > 0
    return {
        f"{part}_abs_mean": sums[f"{part}/abs"] / count,
        f"{part}_k1": -sums[f"{part}/log"] / count,
        f"{part}_k3": sums[f"{part}/k3"] / count,
        f"{part}_ess": weight * weight / (count * weight_sq) if finite else 0.0,
    }


def _packed(names: tuple[str, ...], values: Mapping[str, Tensor], device: torch.device) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(
        [values[name].detach().double() if name in values else zero for name in names]
    )
