"""Engine-mismatch correction: importance weights and rejections from p - b.

p is the learner's log-probability at the version that sampled the token, b the rollout engine's at
sampling. TIS caps large weights and keeps small ones; IcePop rejects what lies outside an interval.
Neither ever changes a length or a denominator.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.objective_config import CorrectionConfig, KeepInterval
from learner.ratio import rounding_slack
from learner.segments import segment_any, segment_sum


class MismatchStatistics:
    """The log mismatch ratio per token, of the token or of its sample; each computed once.

    `mismatch[N]` is p - b, 0 where unknown or outside the data mask; `lengths[S]` counts the mask.
    """

    def __init__(self, mismatch: Tensor, sample_index: Tensor, lengths: Tensor) -> None:
        self.sample_index = sample_index
        self._lengths = lengths
        self._by_name = {"token": mismatch}

    def __getitem__(self, statistic: str) -> Tensor:
        if statistic not in self._by_name:
            mismatch = self._by_name["token"]
            of_sample = segment_sum(mismatch, self.sample_index, self._lengths.shape[0])
            if statistic == "geometric":
                of_sample = of_sample / self._lengths.clamp(min=1)
            self._by_name[statistic] = of_sample.index_select(0, self.sample_index)
        return self._by_name[statistic]

    @property
    def num_samples(self) -> int:
        return self._lengths.shape[0]


@dataclass(frozen=True)
class Rejections:
    """Tokens that the correction rejects, by reason (bool[N]; a token may have several)."""

    veto: Tensor
    keep_low: Tensor
    keep_high: Tensor


def rejections(
    correction: CorrectionConfig, statistics: MismatchStatistics, live: Tensor
) -> Rejections:
    """Which of the `live` tokens (bool[N]: in the data mask and not stale) are rejected."""
    nothing = torch.zeros_like(live)
    veto = keep_low = keep_high = nothing
    slack = rounding_slack(statistics["token"].dtype)
    if correction.veto is not None:
        bad = live & (statistics["token"] < math.log(correction.veto) - slack)
        index = statistics.sample_index
        veto = live & segment_any(bad, index, statistics.num_samples).index_select(0, index)
    for interval in correction.keep:
        value = statistics[interval.statistic]
        lowest, highest = keep_bounds(interval, slack)
        if interval.low > 0:
            keep_low = keep_low | (live & (value < lowest))
        if interval.high is not None:
            keep_high = keep_high | (live & (value > highest))
    return Rejections(veto, keep_low, keep_high)


def keep_bounds(interval: KeepInterval, slack: float) -> tuple[float, float]:
    """Lowest and highest log mismatch ratio that the interval keeps."""
    lowest = math.log(interval.low) - slack if interval.low > 0 else -math.inf
    return lowest, math.inf if interval.high is None else math.log(interval.high) + slack


def importance_weights(
    correction: CorrectionConfig, statistics: MismatchStatistics, kept: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Detached log weights before the cap, and weights w after it, both [N]; None without.

    Weights are finite wherever a cap is set, and 0 outside `kept` where it is not.
    """
    if correction.weight == "none":
        return None
    log_weight = statistics[correction.weight]
    if correction.cap is None:
        return log_weight, log_weight.exp().masked_fill_(~kept, 0.0)
    return log_weight, log_weight.clamp(max=math.log(correction.cap)).exp_()
