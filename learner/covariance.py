"""Clip-Cov and KL-Cov: restraint of the tokens that use up entropy.

To first order a policy-gradient step changes entropy by minus the covariance of log-probability
and advantage, and few tokens carry most of it (Cui et al. 2025, "The Entropy Mechanism of
Reinforcement Learning for Reasoning Language Models", arXiv 2505.22617). Clip-Cov takes the
gradient from some of them, KL-Cov holds the largest to the old policy. As in the paper means and
shares are of the micro-batch, so that this choice alone depends on how a batch is split.
"""

import torch
from torch import Tensor

from learner.objective_config import CovarianceConfig

# Multiplicative hashing: an odd constant near 2^64 / golden ratio spreads neighbouring values.
_SPREAD = -7046029254386353131


def token_covariances(logprobs: Tensor, advantages: Tensor, kept: Tensor) -> Tensor:
    """(c - mean c)(A - mean A) per token, [N]; means over `kept` (bool[N]), 0 outside."""
    count = kept.count_nonzero().clamp(min=1)
    parts = [torch.where(kept, values, 0.0) for values in (logprobs, advantages)]
    centred = [values - values.sum() / count for values in parts]
    return torch.where(kept, centred[0] * centred[1], 0.0)


def restrained_tokens(
    config: CovarianceConfig, logprobs: Tensor, advantages: Tensor, kept: Tensor, moving: Tensor
) -> Tensor:
    """bool[N]: the tokens that are chosen, share x kept tokens of them, rounded down.

    `moving` says where a gradient is left to take (neither clipped nor with A = 0). clip draws
    among moving tokens whose covariance lies in [low, high]; the draw is a hash of each token's own
    log-probability, so that it varies from step to step but neither with order nor with a seed.
    kl takes the largest covariances among the kept.
    """
    chosen = torch.zeros_like(kept)
    count = int(config.share * int(kept.count_nonzero()))
    if not count:
        return chosen
    covariance = token_covariances(logprobs, advantages, kept)
    if config.kind == "kl":
        candidates, rank = kept, covariance
    else:
        candidates = kept & moving & (covariance >= config.low) & (covariance <= config.high)
        rank = _draw(logprobs)
    places = candidates.nonzero().flatten()
    top = torch.topk(rank[places], min(count, len(places))).indices
    chosen[places[top]] = True
    return chosen


def _draw(logprobs: Tensor) -> Tensor:
    """A fixed pseudo-random number per log-probability."""
    bits = logprobs.double().view(torch.int64) * _SPREAD
    return (bits ^ (bits >> 32)) * _SPREAD
