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
    behavior = batch.behavior_logprobs.detach().to(current.dtype)
    lengths = sample_lengths(batch.mask, batch.sample_index, batch.num_samples, current.dtype)
    stale = _stale_tokens(config, batch)
    live = batch.mask & ~stale
    current = current.masked_fill(~live, 0.0)

    log_ratios: dict[str, Tensor] = {}
    if batch.old_logprobs is not None:
        old = batch.old_logprobs.detach().to(current.dtype).masked_fill(~live, 0.0)
        log_ratios["movement"] = current - old
        log_ratios["mismatch"] = (old - behavior).masked_fill(~live, 0.0)
    mismatch = log_ratios.get("mismatch", torch.zeros_like(behavior))
    statistics = MismatchStatistics(mismatch, batch.sample_index, lengths)
    policy = _policy_mask(config, batch, stale, statistics)
    weights, capped = importance_weights(config.correction, statistics, policy.kept)
    advantages = batch.advantages.detach().to(current.dtype).masked_fill(~policy.kept, 0.0)
    if config.ratio.anchor == "behavior":
        log_ratio = (current - behavior).masked_fill(~live, 0.0)
    else:
        log_ratio = log_ratios["movement"]
    if config.ratio.unit != "token":
        pure = config.ratio.unit == "sequence_pure"
        log_ratio = sequence_log_ratio(log_ratio, current, batch.sample_index, lengths, pure=pure)
    # Masked before `exp`: an overflowing ratio times a zero advantage would be NaN.
    log_ratio = log_ratio.masked_fill(advantages == 0, 0.0)
    shaped = surrogate(config.clip, log_ratio, current, advantages)

    terms = shaped.value if weights is None else shaped.value * weights
    if config.entropy_bonus and batch.entropy is not None:
        terms = terms + config.entropy_bonus * batch.entropy.masked_fill(~policy.kept, 0.0)
    loss = -_aggregate(config.aggregation, terms, batch, lengths, normalizer)
    metrics = _metrics(loss, batch, policy, shaped, lengths, log_ratios, weights, capped)
    return ObjectiveOutput(loss, metrics, policy.fates)


def count_batch(batch: TokenBatch) -> Normalizer:
    """Counts of this batch alone (0-d tensors); sum them over micro-batches and ranks."""
    present = segment_any(batch.mask, batch.sample_index, batch.num_samples)
    return Normalizer(tokens=batch.mask.count_nonzero(), samples=present.sum())


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
        stale = (
            batch.mask
            & segment_any(stale, batch.sample_index, batch.num_samples)[batch.sample_index]
        )
    return stale


def _policy_mask(
    config: ObjectiveConfig, batch: TokenBatch, stale: Tensor, statistics: MismatchStatistics
) -> _PolicyMask:
    live = batch.mask & ~stale
    fates = live.to(torch.uint8) * int(TokenFate.TRAINED)
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


def _aggregate(
    aggregation: AggregationConfig,
    terms: Tensor,
    batch: TokenBatch,
    lengths: Tensor,
    normalizer: BatchCount | None,
) -> Tensor:
    """Σ a·terms / Z; terms[N] are 0 outside the masks."""
    count = count_batch(batch) if normalizer is None else normalizer
    if aggregation.kind == "sequence_mean":
        terms = terms / lengths.clamp(min=1)[batch.sample_index]
    denominator = torch.as_tensor(
        count.tokens if aggregation.kind == "token_mean" else count.samples, device=terms.device
    )
    if aggregation.kind == "constant":
        assert aggregation.max_tokens is not None
        denominator = denominator * aggregation.max_tokens
    return terms.sum() / denominator.clamp(min=1)


def _metrics(
    loss: Tensor,
    batch: TokenBatch,
    policy: _PolicyMask,
    shaped: Surrogate,
    lengths: Tensor,
    log_ratios: Mapping[str, Tensor],
    weights: Tensor | None,
    capped: Tensor | None,
) -> Metrics:
    trained = policy.kept.count_nonzero()
    sums = {
        "loss": loss,
        "tokens": batch.mask.count_nonzero(),
        "samples": (lengths > 0).sum(),
        "trained_tokens": trained,
        "clip_low_tokens": shaped.clipped_low.count_nonzero(),
        "clip_high_tokens": shaped.clipped_high.count_nonzero(),
        "clip_dual_tokens": shaped.clipped_dual.count_nonzero(),
        "weight": trained if weights is None else weights.sum(),
    }
    by_fate = torch.bincount(policy.fates, minlength=len(TokenFate))
    sums |= {f"masked_tokens/{r}": by_fate[TokenFate[r.upper()]] for r in MASK_REASONS}
    maxima = {}
    if capped is not None:
        sums["cap_tokens"] = capped.count_nonzero()
    if batch.entropy is not None:
        sums["entropy"] = batch.entropy.detach().masked_fill(~policy.live, 0.0).sum()
        sums["entropy_tokens"] = policy.live.count_nonzero()
    if batch.version_lag is not None:
        lag = batch.version_lag.masked_fill(~policy.kept, 0)
        sums |= {"lag": lag.sum(), "lag_tokens": trained}
        maxima["lag"] = largest(lag)
    for part, log_ratio in log_ratios.items():
        fixed = log_ratio.detach()
        sums |= log_ratio_sums(part, fixed, policy.live)
        maxima[f"{part}/abs"] = largest(fixed)
    return Metrics.pack(sums, maxima, loss.device)


def _at_least_float32(logprobs: Tensor) -> Tensor:
    return logprobs if logprobs.dtype == torch.float64 else logprobs.float()


def _check(config: ObjectiveConfig, logprobs: Tensor, batch: TokenBatch) -> None:
    if batch.mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, got {batch.mask.dtype}")
    per_token = {
        "sample_index": batch.sample_index,
        "mask": batch.mask,
        "behavior_logprobs": batch.behavior_logprobs,
        "old_logprobs": batch.old_logprobs,
        "advantages": batch.advantages,
        "entropy": batch.entropy,
        "version_lag": batch.version_lag,
    }
    for name, values in per_token.items():
        if values is not None and values.shape != logprobs.shape:
            raise ValueError(
                f"{name} has shape {tuple(values.shape)}, logprobs {tuple(logprobs.shape)}"
            )
    if logprobs.dim() != 1:
        raise ValueError(f"logprobs must be flat over tokens, got shape {tuple(logprobs.shape)}")
    if config.needs_old and batch.old_logprobs is None:
        raise ValueError(
            f"old_logprobs are missing, and ratio.anchor {config.ratio.anchor!r} or the correction "
            "needs them"
        )
    if config.entropy_bonus and batch.entropy is None:
        raise ValueError("entropy is missing, and entropy_bonus needs it")
    if config.aggregation.kind == "constant" and config.aggregation.max_tokens is None:
        raise ValueError(
            "aggregation 'constant' needs max_tokens: set it, or fill in the run's response limit"
        )
