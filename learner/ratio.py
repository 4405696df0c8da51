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


@dataclass(frozen=True)
class Weighing:
    """What weighs a token beside its ratio and advantage, [N]; None is 1."""

    weights: Tensor | None
    """w, within the cap."""
    log_weights: Tensor | None
    """log w before the cap."""
    log_cap: float
    shares: Tensor | None
    """a."""


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
    clip: ClipConfig, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, weighing: Weighing
) -> Surrogate:
    """S(u, A) of each token times its weights, to be maximised; all inputs [N] and finite.

    ppo is min(r A, clip(r, 1 - low, 1 + high) A), with max(., dual A) where A < 0 and dual is set;
    cispo is sg(clip(r, low, high)) A c (MiniMax-M1, arXiv 2506.13585); none is r A. On a bound the
    gradient stays. A token with A = 0 contributes exactly 0, however large its weight or ratio is.
    """
    bounded = _bounded(clip, log_ratio, advantages)
    value = _weighed(bounded, advantages, weighing)
    if clip.kind == "none":
        return Surrogate(value, value, bounded)
    if clip.kind == "cispo":
        return Surrogate(value * logprobs, value, bounded)
    return Surrogate(value, value.masked_fill(bounded != log_ratio, 0.0), bounded)


def _bounded(clip: ClipConfig, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """u where the clip leaves it, else the bound itself: slack decides, but is no part of it."""
    if clip.kind == "none":
        return log_ratio
    within, at = (clip_bounds(clip, slack) for slack in (rounding_slack(log_ratio.dtype), 0.0))
    if clip.kind == "cispo":
        return torch.where(
            log_ratio.clamp(*within[0]) == log_ratio, log_ratio, log_ratio.clamp(*at[0])
        )
    negative = advantages < 0
    above, below = (
        torch.where(negative, log_ratio.clamp(*side[1]), log_ratio.clamp(max=side[0][1]))
        for side in (within, at)
    )
    return torch.where(above == log_ratio, log_ratio, below)


def _weighed(log_ratio: Tensor, advantages: Tensor, weighing: Weighing) -> Tensor:
    nothing = advantages == 0
    # Masked before `exp`: an overflowing ratio or weight times a zero advantage would be NaN.
    log_ratio = log_ratio.masked_fill(nothing, 0.0)
    others = advantages if weighing.shares is None else advantages * weighing.shares
    if weighing.weights is None:
        return log_ratio.exp().mul_(others)
    value = log_ratio.exp().mul_(weighing.weights).mul_(others)
    # One of r and w may overflow while the other underflows; their product does neither.
    log_weights = weighing.log_weights
    assert log_weights is not None
    joint = (log_ratio + log_weights.clamp(max=weighing.log_cap)).exp_().mul_(others)
    return torch.where(value.isfinite(), value, joint).masked_fill_(nothing, 0.0)


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
