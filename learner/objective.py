"""The policy objective over flat response tokens: mask x weight x clipped ratio x advantage / Z.

Three log-probabilities per token: current c (with gradient), old p (the learner under the version
that sampled the token) and behavior b (the rollout engine at sampling), so that exactly

    c - b  =  (c - p)  +  (p - b)      all = movement and staleness + engine mismatch

The ratio and its clip act on the first part, the correction on the second. The loss is

    - Σ_i a_i Σ_t m_it k_it w_it S(u_it, A_it) / Z

with the data mask m, policy mask k (staleness, keep intervals, veto), detached weight w, and the
token factor a and denominator Z of the aggregation. Data masks shape lengths and Z; policy masks
never do. Added terms (KL to a reference, entropy, KL-Cov) have the same Z.

The derivative by c is computed beside the value, from the formula, and handed to autograd as one
vector: one pass instead of a graph of twenty. This module knows no model, no ranks, no optimizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from learner import kl
from learner.correction import MismatchStatistics, importance_weights, rejections
from learner.covariance import restrained_tokens
from learner.diagnostics import Evaluated, measure
from learner.objective_config import ObjectiveConfig, expand
from learner.objective_metrics import Metrics
from learner.ratio import sequence_log_ratio, surrogate, through_the_mean
from learner.token_batch import (
    BatchCount,
    Normalizer,
    TokenBatch,
    TokenFate,
    check_batch,
    count_batch,
    fate_counts,
    sample_lengths,
    stale_tokens,
)

__all__ = [
    "BatchCount",
    "Normalizer",
    "ObjectiveOutput",
    "TokenBatch",
    "TokenFate",
    "count_batch",
    "evaluate",
    "fate_counts",
    "preset",
    "sample_lengths",
]


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


@dataclass
class _Total:
    """Sum of -loss x Z so far, and its derivative by c, [N]."""

    value: Tensor
    slope: Tensor


def preset(name: str, overrides: Mapping[str, Any] | None = None) -> ObjectiveConfig:
    """The named preset with `overrides`, nested like the fields of ObjectiveConfig."""
    return expand(name, overrides)


def evaluate(
    config: ObjectiveConfig,
    logprobs: Tensor,
    batch: TokenBatch,
    normalizer: BatchCount | None = None,
    *,
    diagnostics: bool = True,
) -> ObjectiveOutput:
    """Loss, metrics and token fates of one micro-batch; `logprobs` is c, float[N], with gradient.

    `normalizer` counts the whole batch, so that losses and gradients of micro-batches and ranks
    are summed, never averaged; None means that this batch is all of it. Without `diagnostics` the
    metrics hold the loss and the counts only. Raises ValueError when the batch lacks something
    that the config needs. Linear in N, no loop over samples. First derivatives only.
    """
    check_batch(config, logprobs, batch)
    with torch.no_grad():
        evaluated, total, factors = _evaluate_tokens(config, logprobs.detach(), batch)
        scale = -1 / _denominator(config, batch, evaluated.lengths, normalizer)
        value = total.value * scale
        gradient = total.slope * scale
    loss = _Attached.apply(logprobs, value, gradient)
    if config.entropy_bonus and batch.entropy is not None:
        entropy = batch.entropy.to(value.dtype).masked_fill(~evaluated.kept, 0.0)
        loss = loss + (entropy * factors).sum() * (config.entropy_bonus * scale)
    with torch.no_grad():
        metrics = measure(config, batch, evaluated, loss.detach(), everything=diagnostics)
    return ObjectiveOutput(loss, metrics, evaluated.fates)


class _Attached(torch.autograd.Function):
    """`value`, whose derivative by `logprobs` is `gradient`."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.dtype = logprobs.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream).to(ctx.dtype), None, None


def _evaluate_tokens(
    config: ObjectiveConfig, logprobs: Tensor, batch: TokenBatch
) -> tuple[Evaluated, _Total, Tensor]:
    """What is known per token, -loss x Z with its slope, and the factors a k of added terms."""
    current = logprobs if logprobs.dtype == torch.float64 else logprobs.float()
    dtype, index = current.dtype, batch.sample_index
    stale = stale_tokens(config, batch)
    outside = ~batch.mask if stale is None else ~batch.mask | stale
    current = current.masked_fill(outside, 0.0)
    movement = mismatch = None
    if batch.old_logprobs is not None:
        old = batch.old_logprobs.to(dtype)
        movement = (current - old).masked_fill_(outside, 0.0)
        mismatch = (old - batch.behavior_logprobs).masked_fill_(outside, 0.0)
    lengths = sample_lengths(batch.mask, index, batch.num_samples, dtype)
    statistics = MismatchStatistics(
        torch.zeros_like(current) if mismatch is None else mismatch, index, lengths
    )
    policy = _policy_mask(config, batch, stale, ~outside, statistics)
    advantages = batch.advantages.to(dtype).masked_fill(~policy.kept, 0.0)
    weighing = importance_weights(config.correction, statistics, policy.kept)
    weights = None if weighing is None else weighing[1]
    token_ratio = movement
    if config.ratio.anchor == "behavior" or movement is None:
        token_ratio = (current - batch.behavior_logprobs.to(dtype)).masked_fill_(outside, 0.0)
    assert token_ratio is not None
    ratio = token_ratio
    if config.ratio.unit != "token":
        ratio = sequence_log_ratio(token_ratio, index, lengths)

    per_token = policy.kept.to(dtype)
    if config.aggregation.kind == "sequence_mean":
        per_token = per_token / lengths.clamp(min=1)[index]
    factors = advantages if weights is None else advantages * weights
    if config.aggregation.kind == "sequence_mean":
        factors = factors * per_token
    shaped = surrogate(config.clip, ratio, current, advantages, factors)
    slope = shaped.slope
    if config.ratio.unit == "sequence_pure" and config.clip.kind != "cispo":
        slope = through_the_mean(slope, index, lengths).masked_fill_(outside, 0.0)
    evaluated = Evaluated(
        live=policy.live,
        kept=policy.kept,
        fates=policy.fates,
        lengths=lengths,
        current=current,
        advantages=advantages,
        movement=movement,
        mismatch=mismatch,
        weights=weights,
        log_weights=None if weighing is None else weighing[0],
        ratio=ratio,
        bounded=shaped.bounded,
        restrained=None,
        reference=_reference(batch, current, policy.kept),
    )
    total = _Total(shaped.value.sum(), slope)
    held = per_token if weights is None else per_token * weights
    _add_terms(config, evaluated, total, token_ratio, held)
    return evaluated, total, per_token


def _add_terms(
    config: ObjectiveConfig, evaluated: Evaluated, total: _Total, log_ratio: Tensor, held: Tensor
) -> None:
    """Covariance and KL terms; `held` is a k w per token. The ratio is the token's, unclipped."""
    choice = config.covariance
    if choice.kind != "none":
        moving = (evaluated.bounded == evaluated.ratio) & (evaluated.advantages != 0)
        evaluated.restrained = restrained_tokens(
            choice, evaluated.current, evaluated.advantages, evaluated.kept, moving
        )
        if choice.kind == "clip":
            total.slope = total.slope.masked_fill(evaluated.restrained, 0.0)
        elif evaluated.movement is not None:
            # The paper's term is the divergence from the old policy; its gradient is taken as that
            # of every other divergence here, since |c - p| has none where it starts.
            there = torch.where(evaluated.restrained, held, 0.0) * choice.coefficient
            _subtract_divergence(total, there, log_ratio, evaluated.movement, "k2")
    if config.kl.coefficient and config.kl.place == "loss" and evaluated.reference is not None:
        there = held * config.kl.coefficient
        _subtract_divergence(total, there, log_ratio, evaluated.reference, config.kl.estimator)


def _subtract_divergence(
    total: _Total, factors: Tensor, log_ratio: Tensor, distance: Tensor, estimator: Any
) -> None:
    """One gradient sg(r) sg(d) ∇c whatever estimate is reported; see `learner.kl`."""
    weighted = log_ratio.masked_fill(factors == 0, 0.0).exp_().mul_(factors)
    total.value = total.value - (weighted * kl.estimate(estimator, distance)).sum()
    total.slope = total.slope - weighted * distance


def _reference(batch: TokenBatch, current: Tensor, kept: Tensor) -> Tensor | None:
    """c - f, 0 outside `kept`."""
    if batch.reference_logprobs is None:
        return None
    return (current - batch.reference_logprobs.to(current.dtype)).masked_fill_(~kept, 0.0)


def _policy_mask(
    config: ObjectiveConfig,
    batch: TokenBatch,
    stale: Tensor | None,
    live: Tensor,
    statistics: MismatchStatistics,
) -> _PolicyMask:
    fates = live.to(torch.uint8) * int(TokenFate.TRAINED)
    if stale is not None:
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


def _denominator(
    config: ObjectiveConfig, batch: TokenBatch, lengths: Tensor, normalizer: BatchCount | None
) -> Tensor:
    """Z of the whole batch, at least 1, in the dtype of `lengths`."""
    kind = config.aggregation.kind
    if normalizer is None:
        count = batch.mask.count_nonzero() if kind == "token_mean" else (lengths > 0).sum()
    else:
        count = torch.as_tensor(
            normalizer.tokens if kind == "token_mean" else normalizer.samples,
            device=lengths.device,
        )
    if kind == "constant":
        assert config.aggregation.max_tokens is not None
        count = count * config.aggregation.max_tokens
    return count.clamp(min=1).to(lengths.dtype)
