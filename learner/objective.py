"""The policy objective over flat response tokens: mask x weight x clipped ratio x advantage / Z.

Three log-probabilities per token: current c (with gradient), old p (the learner under the version
that sampled the token) and behavior b (the rollout engine at sampling), so that exactly

    c - b  =  (c - p)  +  (p - b)      all = movement and staleness + engine mismatch

The ratio and its clip act on the first part, the correction on the second. The loss is

    - Σ_i a_i Σ_t m_it k_it w_it S(u_it, A_it) / Z

with the data mask m, policy mask k (staleness, keep intervals, veto), detached weight w, and the
token factor a and denominator Z of the aggregation. Data masks shape lengths and Z; policy masks
never do. This module knows no model, no ranks and no optimizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch import Tensor

from learner.correction import MismatchStatistics, importance_weights, rejections
from learner.objective_config import AggregationConfig, ObjectiveConfig, expand
from learner.objective_metrics import MASK_REASONS, Metrics, largest, log_ratio_sums
from learner.ratio import Surrogate, sequence_log_ratio, surrogate
from learner.segments import segment_any, segment_sum


class TokenFate(IntEnum):
    """What became of a token; a rejected one carries the first reason in this order."""

    OUTSIDE = 0
    TRAINED = 1
    STALE = 2
    VETO = 3
    KEEP_LOW = 4
    KEEP_HIGH = 5


@dataclass(frozen=True)
class TokenBatch:
    """Response tokens of S samples, flat [N], in any order; whole samples only.

    Values outside `mask` may be anything, NaN included; so may `old_logprobs` of tokens that
    `version_lag` makes stale.
    """

    sample_index: Tensor
    """int64[N]: sample of each token, in [0, num_samples)."""
    mask: Tensor
    """bool[N]: data mask; false for tool tokens and for samples that must not train."""
    behavior_logprobs: Tensor
    """float[N]: rollout engine at sampling (b)."""
    old_logprobs: Tensor | None
    """float[N]: the anchor p, at the sampling version (or at the start of the step for anchor
    step_start). None only where the config's `needs_old` is false."""
    advantages: Tensor
    """float[N]: A, per token."""
    num_samples: int
    """S."""
    entropy: Tensor | None = field(default=None, kw_only=True)
    """float[N]: entropy of the current policy at each token's prefix, in nats, with gradient."""
    version_lag: Tensor | None = field(default=None, kw_only=True)
    """int64[N]: learner's version minus the version that sampled the token."""


class BatchCount(Protocol):
    """Anything that counts the whole batch of the run."""

    @property
    def tokens(self) -> int | float | Tensor: ...
    @property
    def samples(self) -> int | float | Tensor: ...


@dataclass(frozen=True)
class Normalizer:
    """Tokens in the data mask, and samples that have one, over all micro-batches and ranks."""

    tokens: int | float | Tensor
    samples: int | float | Tensor


@dataclass(frozen=True)
class ObjectiveOutput:
    """`loss` is a scalar to minimise, this part's share of the whole batch's loss."""

    loss: Tensor
    metrics: Metrics
    fates: Tensor
    """uint8[N]: TokenFate of each token."""


@dataclass(frozen=True)
class _PolicyMask:
    live: Tensor
    kept: Tensor
    fates: Tensor


def preset(name: str, overrides: Mapping[str, Any] | None = None) -> ObjectiveConfig:
    """The named preset with `overrides`, nested like the fields of ObjectiveConfig."""
    return expand(name, overrides)


def evaluate(
    config: ObjectiveConfig,
    logprobs: Tensor,
    batch: TokenBatch,
    normalizer: BatchCount | None = None,
) -> ObjectiveOutput:
    """Loss, metrics and token fates of one micro-batch; `logprobs` is c, float[N], with gradient.

    `normalizer` counts the whole batch, so that losses and gradients of micro-batches and ranks
    are summed, never averaged; None means that this batch is all of it. Raises ValueError when
    the batch lacks something that the config needs. Linear in N, no loop over samples.
    """
    _check(config, logprobs, batch)
    current = _at_least_float32(logprobs)
    lengths = sample_lengths(batch.mask, batch.sample_index, batch.num_samples, current.dtype)
    stale = _stale_tokens(config, batch)
    live = batch.mask & ~stale
    current = torch.where(live, current, 0.0)

    mismatch = movement = None
    if batch.old_logprobs is not None:
        old = torch.where(live, batch.old_logprobs.detach(), 0.0).to(current.dtype)
        movement = current - old
        mismatch = torch.where(live, old - batch.behavior_logprobs.detach(), 0.0)
    statistics = MismatchStatistics(
        torch.zeros_like(current.detach()) if mismatch is None else mismatch,
        batch.sample_index,
        lengths,
    )
    policy = _policy_mask(config, batch, stale, statistics)
    weights, capped = importance_weights(config.correction, statistics, policy.kept)
    advantages = torch.where(policy.kept, batch.advantages.detach(), 0.0).to(current.dtype)
    shaped = _surrogate(config, batch, current, movement, policy, advantages, lengths)

    terms = shaped.value if weights is None else shaped.value * weights
    if config.entropy_bonus:
        terms = terms + config.entropy_bonus * torch.where(policy.kept, batch.entropy, 0.0)
    loss = -_aggregate(config.aggregation, terms, batch, lengths, normalizer)
    metrics = _metrics(loss, batch, policy, shaped, lengths, movement, mismatch, weights, capped)
    return ObjectiveOutput(loss, metrics, policy.fates)


def count_batch(batch: TokenBatch) -> Normalizer:
    """Counts of this batch alone (0-d tensors); sum them over micro-batches and ranks."""
    lengths = sample_lengths(
        batch.mask, batch.sample_index, batch.num_samples, torch.float64
    )
    return Normalizer(tokens=batch.mask.sum(), samples=(lengths > 0).sum())


def sample_lengths(
    mask: Tensor, sample_index: Tensor, num_samples: int, dtype: torch.dtype
) -> Tensor:
    """T_i: tokens in the data mask per sample, [S]."""
    return segment_sum(mask.to(dtype), sample_index, num_samples)


def fate_counts(fates: Tensor, sample_index: Tensor, num_samples: int) -> Tensor:
    """Tokens of each sample by fate: int64[S, len(TokenFate)]."""
    kinds = len(TokenFate)
    flat = torch.bincount(sample_index * kinds + fates.long(), minlength=num_samples * kinds)
    return flat.view(num_samples, kinds)


def _stale_tokens(config: ObjectiveConfig, batch: TokenBatch) -> Tensor:
    """bool[N] within the data mask. A stale token has no p, so nothing of its sample has a value
    where the unit or a statistic is per sequence."""
    if batch.version_lag is None or config.max_staleness is None:
        return torch.zeros_like(batch.mask)
    stale = batch.mask & (batch.version_lag > config.max_staleness)
    if config.per_sequence:
        stale = batch.mask & segment_any(stale, batch.sample_index, batch.num_samples)[batch.sample_index]
    return stale


def _policy_mask(
    config: ObjectiveConfig, batch: TokenBatch, stale: Tensor, statistics: MismatchStatistics
) -> _PolicyMask:
    live = batch.mask & ~stale
    fates = torch.where(live, int(TokenFate.TRAINED), int(TokenFate.OUTSIDE)).to(torch.uint8)
    if batch.version_lag is not None:
        fates.masked_fill_(stale, int(TokenFate.STALE))
    kept = live
    correction = config.correction
    if correction.keep or correction.veto is not None:
        rejected = rejections(correction, statistics, live)
        for reason, fate in (
            (rejected.keep_high, TokenFate.KEEP_HIGH),
            (rejected.keep_low, TokenFate.KEEP_LOW),
            (rejected.veto, TokenFate.VETO),
        ):
            fates.masked_fill_(reason, int(fate))
            kept = kept & ~reason
    return _PolicyMask(live, kept, fates)


def _surrogate(
    config: ObjectiveConfig,
    batch: TokenBatch,
    current: Tensor,
    movement: Tensor | None,
    policy: _PolicyMask,
    advantages: Tensor,
    lengths: Tensor,
) -> Surrogate:
    if config.ratio.anchor == "behavior":
        log_ratio = torch.where(policy.live, current - batch.behavior_logprobs.detach(), 0.0)
    else:
        assert movement is not None
        log_ratio = movement
    if config.ratio.unit != "token":
        pure = config.ratio.unit == "sequence_pure"
        log_ratio = sequence_log_ratio(
            log_ratio, current, batch.sample_index, lengths, pure=pure
        )
    # `where` before `exp`: an overflowing ratio times a zero advantage would be NaN.
    log_ratio = torch.where(advantages != 0, log_ratio, 0.0)
    return surrogate(config.clip, log_ratio, current, advantages)


def _aggregate(
    aggregation: AggregationConfig,
    terms: Tensor,
    batch: TokenBatch,
    lengths: Tensor,
    normalizer: BatchCount | None,
) -> Tensor:
    """Σ a·terms / Z; terms[N] are 0 outside the masks."""
    count = normalizer if normalizer is not None else _count(batch.mask, lengths)
    if aggregation.kind == "sequence_mean":
        terms = terms / lengths.clamp(min=1)[batch.sample_index]
    denominator = torch.as_tensor(
        count.tokens if aggregation.kind == "token_mean" else count.samples, device=terms.device
    )
    if aggregation.kind == "constant":
        assert aggregation.max_tokens is not None
        denominator = denominator * aggregation.max_tokens
    return terms.sum() / denominator.clamp(min=1)


def _count(mask: Tensor, lengths: Tensor) -> Normalizer:
    return Normalizer(tokens=mask.sum(), samples=(lengths > 0).sum())
