"""Kullback-Leibler divergence to a frozen reference model, in the loss or in the reward.

With d = c - f (current minus reference log-probability of the sampled token) there is one
gradient, k w sg(r) sg(d) ∇c: with the token ratio r = π/π_old and the weight w = π_old/π_behavior
it is the gradient of the divergence at fixed prefixes, whatever is reported. Differentiating an
estimator instead is a habit that goes wrong: k1 has a gradient with mean zero, k3 that of the
reverse divergence; only k2 is right (Schulman 2020, "Approximating KL divergence", on the values).
The gradient of the divergence of whole responses also has to credit earlier tokens with what comes
later: KL in the reward does.
"""

from typing import Literal

import torch
from torch import Tensor

from learner.segments import segment_sum


def estimate(kind: Literal["k1", "k2", "k3"], log_ratio: Tensor) -> Tensor:
    """Estimates of the divergence in nats per token, from d of tokens that were sampled by π, [N].

    k1 = d, k2 = d² / 2, k3 = exp(-d) - 1 + d: k1 and k3 are unbiased, k3 is never negative.
    """
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    return torch.expm1(-log_ratio) + log_ratio


def reward_penalties(
    old_logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, coefficient: float
) -> Tensor:
    """Token rewards -coefficient (p - f), [N], for KL in the reward; 0 outside `mask`.

    `mask` (bool[N]) is the data mask less the tokens that have no p, because their version is no
    longer kept: those are not penalised. For a critic they are the token rewards that GAE takes,
    with the outcome added at the last token (`advantages.token_rewards`). For a baseline per
    sample they are summed (`penalty_per_sample`) onto the sample's shaped reward before baseline
    and scale, so that they enter the statistics like any other part of the reward.
    """
    return torch.where(mask, (old_logprobs - reference_logprobs) * -coefficient, 0.0).detach()


def penalty_per_sample(penalties: Tensor, sample_index: Tensor, num_samples: int) -> Tensor:
    """Sum of the token penalties of each sample: float[S]."""
    return segment_sum(penalties, sample_index, num_samples)
