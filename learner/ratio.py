"""The policy ratio and its clip: log-ratio u, and the surrogate S(u, A) that is maximised.

Everything stays in log space until one `exp`, so that a clipped ratio can neither overflow nor
leave a NaN in the gradient.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.objective_config import ClipConfig
from learner.segments import segment_sum


@dataclass(frozen=True)
class Surrogate:
    """S per token, and which tokens the clip made flat (bool[N] each)."""

    value: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_dual: Tensor


def rounding_slack(dtype: torch.dtype) -> float:
    """Distance in log space within which a ratio counts as lying on a bound.

    Bounds are inclusive, and a difference of two log-probabilities is only known to some ulps.
    """
    return 16 * torch.finfo(dtype).eps


def sequence_log_ratio(
    log_ratio: Tensor, logprobs: Tensor, sample_index: Tensor, lengths: Tensor, *, pure: bool
) -> Tensor:
    """GSPO's length-normalised log-ratio of each token's sample, per token [N].

    `log_ratio` and `logprobs` are 0 outside the data mask; `lengths[S]` counts the mask. Both forms
    have the value (1/T) Σ u. The pure form has its gradient through that mean; the token form
    is sg(mean) + c - sg(c) (GSPO, arXiv 2507.18071, section 4.3), which gives the same gradient
    as long as nothing is masked or weighted per token.
    """
    totals = segment_sum(log_ratio, sample_index, lengths.shape[0])
    mean = (totals / lengths.clamp(min=1))[sample_index]
    return mean if pure else mean.detach() + (logprobs - logprobs.detach())


def surrogate(
    clip: ClipConfig, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor
) -> Surrogate:
    """S(u, A) of each token, to be maximised; all inputs [N] and finite.

    ppo is min(r A, clip(r, 1 - low, 1 + high) A), with max(., dual A) where A < 0 and dual is set;
    cispo is sg(clip(r, low, high)) A c (MiniMax-M1, arXiv 2506.13585); none is r A. On a bound the
    gradient stays.
    """
    if clip.kind == "cispo":
        return _cispo(clip, log_ratio, logprobs, advantages)
    if clip.kind == "none":
        nothing = torch.zeros_like(advantages, dtype=torch.bool)
        return Surrogate(log_ratio.exp() * advantages, nothing, nothing, nothing)
    slack = rounding_slack(log_ratio.dtype)
    negative = advantages < 0
    lower, upper = (
        torch.where(negative, log_ratio.new_tensor(if_negative), log_ratio.new_tensor(otherwise))
        for if_negative, otherwise in (
            (math.log1p(-clip.low) - slack if clip.low < 1 else -math.inf, -math.inf),
            (
                math.inf if clip.dual is None else math.log(clip.dual) + slack,
                math.log1p(clip.high) + slack,
            ),
        )
    )
    above = log_ratio > upper
    return Surrogate(
        value=log_ratio.clamp(lower, upper).exp() * advantages,
        clipped_low=log_ratio < lower,
        clipped_high=above & (advantages > 0),
        clipped_dual=above & negative,
    )


def _cispo(clip: ClipConfig, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Surrogate:
    slack = rounding_slack(log_ratio.dtype)
    lowest = math.log(clip.low) - slack if clip.low > 0 else -math.inf
    highest = math.log(clip.high) + slack
    fixed = log_ratio.detach()
    acts = advantages != 0
    return Surrogate(
        value=fixed.clamp(lowest, highest).exp() * advantages * logprobs,
        clipped_low=(fixed < lowest) & acts,
        clipped_high=(fixed > highest) & acts,
        clipped_dual=torch.zeros_like(acts),
    )
