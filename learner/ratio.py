"""The policy ratio and its clip: log-ratio u, and the surrogate S(u, A) that is maximised.

Values and slopes are computed side by side, without autograd: everything stays in log space until
one `exp`, so that a clipped ratio can neither overflow nor leave a NaN in the gradient.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.objective_config import ClipConfig
from learner.segments import segment_sum


@dataclass(frozen=True)
class Surrogate:
    """Per token [N]: S times its factor, its derivative by c, and u moved into the clip's bounds.

    A token is flat where `bounded` differs from u (cispo has no flat tokens, only bounded weights).
    """

    value: Tensor
    slope: Tensor
    bounded: Tensor


def rounding_slack(dtype: torch.dtype) -> float:
    """Distance in log space within which a ratio counts as lying on a bound.

    Bounds are inclusive, and a difference of two log-probabilities is only known to some ulps.
    """
    return 16 * torch.finfo(dtype).eps


def sequence_log_ratio(log_ratio: Tensor, sample_index: Tensor, lengths: Tensor) -> Tensor:
    """GSPO's length-normalised log-ratio (1/T) sum of u of each token's sample, per token [N].

    `log_ratio` is 0 outside the data mask; `lengths[S]` counts the mask.
    """
    totals = segment_sum(log_ratio, sample_index, lengths.shape[0])
    return (totals / lengths.clamp(min=1)).index_select(0, sample_index)


def through_the_mean(slope: Tensor, sample_index: Tensor, lengths: Tensor) -> Tensor:
    """Derivatives by c of the pure sequence form, [N], from those by the sample's mean log-ratio.

    The token form (GSPO, arXiv 2507.18071, section 4.3: sg(s) exp(c - sg(c))) leaves each slope
    with its own token; both are the same as long as nothing is masked or weighted per token. To be
    masked by the data mask.
    """
    totals = segment_sum(slope, sample_index, lengths.shape[0])
    return (totals / lengths.clamp(min=1)).index_select(0, sample_index)


def surrogate(
    clip: ClipConfig, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, factors: Tensor
) -> Surrogate:
    """S(u, A) of each token times factors / A, to be maximised; all inputs [N] and finite.

    `advantages` decide the side of the clip, `factors` are they times whatever weighs a token
    (>= 0). ppo is min(r A, clip(r, 1 - low, 1 + high) A), with max(., dual A) where A < 0 and dual
    is set; cispo is sg(clip(r, low, high)) A c (MiniMax-M1, arXiv 2506.13585); none is r A. On a
    bound the gradient stays.
    """
    if clip.kind == "none":
        # Masked before `exp`: an overflowing ratio times a zero advantage would be NaN.
        log_ratio = log_ratio.masked_fill(advantages == 0, 0.0)
        value = log_ratio.exp().mul_(factors)
        return Surrogate(value, value, log_ratio)
    above, below = clip_bounds(clip, rounding_slack(log_ratio.dtype))
    if clip.kind == "cispo":
        bounded = log_ratio.clamp(*above)
        slope = bounded.exp().mul_(factors)
        return Surrogate(slope * logprobs, slope, bounded)
    bounded = torch.where(advantages < 0, log_ratio.clamp(*below), log_ratio.clamp(max=above[1]))
    value = bounded.exp().mul_(factors)
    return Surrogate(value, value.masked_fill(bounded != log_ratio, 0.0), bounded)


def clip_bounds(clip: ClipConfig, slack: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """Lowest and highest log-ratio that the clip leaves, where A >= 0 and where A < 0."""
    if clip.kind == "none":
        return (-math.inf, math.inf), (-math.inf, math.inf)
    if clip.kind == "cispo":
        lowest = math.log(clip.low) - slack if clip.low > 0 else -math.inf
        both = lowest, math.log(clip.high) + slack
        return both, both
    lowest = math.log1p(-clip.low) - slack if clip.low < 1 else -math.inf
    dual = math.inf if clip.dual is None else math.log(clip.dual) + slack
    return (-math.inf, math.log1p(clip.high) + slack), (lowest, dual)
