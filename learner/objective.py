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

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from learner import kl
from learner.correction import MismatchStatistics, importance_weights, rejections
from learner.covariance import restrained_tokens
from learner.diagnostics import Evaluated, Tally, measure
from learner.fused import contiguous_samples, evaluate_fused, worthwhile
from learner.objective_config import ObjectiveConfig, expand
from learner.objective_metrics import SUM_STARTS, Metrics
from learner.ratio import Weighing, sequence_log_ratio, surrogate, through_the_mean
from learner.token_batch import (
    TOKEN_FIELDS,
    BatchCount,
    Normalizer,
    TokenBatch,
    TokenFate,
    check_batch,
    count_batch,
    fate_counts,
    sample_lengths,
    stale_tokens,
    with_known_samples,
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


_PART_TOKENS = 1 << 17


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
    compiled: bool | None = None,
) -> ObjectiveOutput:
    """Loss, metrics and token fates of one micro-batch; `logprobs` is c, float[N], with gradient.

    `normalizer` counts the whole batch, so that losses and gradients of micro-batches and ranks
    are summed, never averaged; None means that this batch is all of it. Without `diagnostics` the
    metrics hold the loss and the counts only. `compiled` False is the definition, in torch; True is
    `learner.fused` wherever it applies, None where it pays. Raises ValueError when the batch lacks
    something that the config needs. Linear in N, no loop over samples. First derivatives only.
    """
    check_batch(config, logprobs, batch)
    samples = None
    if compiled or (compiled is None and worthwhile(logprobs)):
        samples = contiguous_samples(config, logprobs, batch)
    if samples is None:
        batch = with_known_samples(batch)
        return _evaluate_in_torch(config, logprobs, batch, normalizer, diagnostics)
    scale = -1 / _denominator(config, batch, normalizer or samples, torch.float32)
    fused = evaluate_fused(config, logprobs, batch, samples, scale.item(), diagnostics=diagnostics)
    loss = _Attached.apply(logprobs, scale * fused.value, fused.gradient)
    fused.metrics.sums[SUM_STARTS["loss"]] = loss.detach()
    return ObjectiveOutput(loss, fused.metrics, fused.fates)


def _evaluate_in_torch(
    config: ObjectiveConfig,
    logprobs: Tensor,
    batch: TokenBatch,
    normalizer: BatchCount | None,
    diagnostics: bool,
) -> ObjectiveOutput:
    with torch.no_grad():
        fixed = logprobs.detach()
        scale = -1 / _denominator(config, batch, normalizer, _working_dtype(fixed))
        tally, values, bonuses = Tally(fixed.device), [], []
        gradient = torch.empty_like(fixed, dtype=_working_dtype(fixed))
        fates = torch.empty_like(fixed, dtype=torch.uint8)
        for some in _parts(config, batch):
            part = batch if some is None else _slice(batch, some)
            evaluated = _evaluate_tokens(config, fixed if some is None else fixed[some], part)
            measure(config, part, evaluated, tally, everything=diagnostics)
            here = slice(None) if some is None else some
            torch.mul(evaluated.slope, scale, out=gradient[here])
            fates[here] = evaluated.fates
            values.append(evaluated.value)
            if config.entropy_bonus:
                bonuses.append(_held(evaluated, weighted=False))
        value = torch.stack(values).sum() * scale
    loss = _Attached.apply(logprobs, value, gradient)
    if config.entropy_bonus and batch.entropy is not None:
        factors = torch.cat(bonuses) * (config.entropy_bonus * scale)
        # A zero factor alone would leave the NaN of what is masked.
        loss = loss + (batch.entropy.to(value.dtype).masked_fill(factors == 0, 0.0) * factors).sum()
    return ObjectiveOutput(loss, tally.metrics(loss.detach()), fates)


def _parts(config: ObjectiveConfig, batch: TokenBatch) -> list[slice | None]:
    """Runs of whole samples that fit a processor's cache; [None], all of it, where there is no
    use for parts (on a GPU), or samples are not contiguous, or a choice compares all tokens."""
    index = batch.sample_index
    size = len(index)
    index = index.contiguous()
    if size <= 2 * _PART_TOKENS or index.is_cuda or config.covariance.kind != "none":
        return [None]
    if bool((index[1:] < index[:-1]).any()):
        return [None]
    firsts = index[torch.arange(_PART_TOKENS, size, _PART_TOKENS)]
    bounds = [0, *sorted(set(torch.searchsorted(index, firsts).tolist()) - {0}), size]
    return [slice(low, high) for low, high in pairwise(bounds)]


def _slice(batch: TokenBatch, some: slice) -> TokenBatch:
    """The tokens `some` of contiguous whole samples, as a batch of their own."""
    index = batch.sample_index[some]
    first = int(index[0])
    values: dict[str, Any] = {
        name: None if (tensor := getattr(batch, name)) is None else tensor[some]
        for name in TOKEN_FIELDS
    }
    values |= {"sample_index": index - first, "num_samples": int(index[-1]) - first + 1}
    return TokenBatch(**values)


class _Attached(torch.autograd.Function):
    """`value`, whose derivative by `logprobs` is `gradient`."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.dtype = logprobs.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream).to(ctx.dtype), None, None


def _evaluate_tokens(config: ObjectiveConfig, logprobs: Tensor, batch: TokenBatch) -> Evaluated:
    """What is known per token, with -loss x Z and its slope by c."""
    current = logprobs.to(_working_dtype(logprobs))
    dtype, index = current.dtype, batch.sample_index
    stale = stale_tokens(config, batch)
    live = batch.mask if stale is None else batch.mask & ~stale
    current = torch.where(live, current, 0.0)
    behavior = batch.behavior_logprobs.to(dtype)
    movement = mismatch = None
    if batch.old_logprobs is not None:
        old = batch.old_logprobs.to(dtype)
        movement = torch.where(live, current - old, 0.0)
        mismatch = torch.where(live, old - behavior, 0.0)
    lengths = sample_lengths(batch.mask, index, batch.num_samples, dtype)
    statistics = MismatchStatistics(
        torch.zeros_like(current) if mismatch is None else mismatch, index, lengths
    )
    kept, fates = _policy_mask(config, stale, live, statistics)
    advantages = torch.where(kept, batch.advantages.to(dtype), 0.0)
    weighing = importance_weights(config.correction, statistics, kept)
    weights = None if weighing is None else weighing[1]
    token_ratio = movement
    if config.ratio.anchor == "behavior" or token_ratio is None:
        token_ratio = torch.where(live, current - behavior, 0.0)
    ratio = token_ratio
    if config.ratio.unit != "token":
        ratio = sequence_log_ratio(token_ratio, index, lengths)

    shares = None
    if config.aggregation.kind == "sequence_mean":
        shares = lengths.clamp(min=1).reciprocal_().index_select(0, index)
    log_weights = None if weighing is None else weighing[0]
    cap = config.correction.cap
    log_cap = math.inf if cap is None else math.log(cap)
    weighs = Weighing(weights, log_weights, log_cap, shares)
    shaped = surrogate(config.clip, ratio, current, advantages, weighs)
    slope = shaped.slope
    if config.ratio.unit == "sequence_pure" and config.clip.kind != "cispo":
        slope = torch.where(live, through_the_mean(slope, index, lengths), 0.0)
    evaluated = Evaluated(
        value=shaped.value.sum(),
        slope=slope,
        live=live,
        kept=kept,
        fates=fates,
        lengths=lengths,
        current=current,
        advantages=advantages,
        movement=movement,
        mismatch=mismatch,
        weights=weights,
        log_weights=log_weights,
        shares=shares,
        ratio=ratio,
        bounded=shaped.bounded,
        reference=_reference(batch, current, kept),
    )
    _add_terms(config, evaluated, token_ratio)
    return evaluated


def _held(evaluated: Evaluated, *, weighted: bool) -> Tensor:
    """a k, or a k w, per token."""
    held = evaluated.kept.to(evaluated.current.dtype)
    for other in (evaluated.shares, evaluated.weights if weighted else None):
        held = held if other is None else held * other
    return held


def _add_terms(config: ObjectiveConfig, evaluated: Evaluated, log_ratio: Tensor) -> None:
    """Covariance and KL terms, with the ratio of the token, unclipped."""
    choice = config.covariance
    if choice.kind != "none":
        moving = (evaluated.bounded == evaluated.ratio) & (evaluated.advantages != 0)
        evaluated.restrained = restrained_tokens(
            choice, evaluated.current, evaluated.advantages, evaluated.kept, moving
        )
        if choice.kind == "clip":
            evaluated.slope = evaluated.slope.masked_fill(evaluated.restrained, 0.0)
        elif evaluated.movement is not None:
            # The paper's term is the divergence from the old policy; its gradient is taken as that
            # of every other divergence here, since |c - p| has none where it starts.
            held = torch.where(evaluated.restrained, _held(evaluated, weighted=True), 0.0)
            held = held * choice.coefficient
            _subtract_divergence(evaluated, held, log_ratio, evaluated.movement, "k2")
    if config.kl_in_loss and evaluated.reference is not None:
        held = _held(evaluated, weighted=True) * config.kl.coefficient
        distance = evaluated.reference
        _subtract_divergence(evaluated, held, log_ratio, distance, config.kl.estimator)


def _subtract_divergence(
    evaluated: Evaluated,
    factors: Tensor,
    log_ratio: Tensor,
    distance: Tensor,
    estimator: Literal["k1", "k2", "k3"],
) -> None:
    """One gradient sg(r) sg(d) ∇c whatever estimate is reported; see `learner.kl`."""
    # Where nothing diverges there is nothing to weigh: an infinite weight would leave a NaN.
    factors = factors.masked_fill(distance == 0, 0.0)
    weighted = log_ratio.masked_fill(factors == 0, 0.0).exp_().mul_(factors)
    evaluated.value = evaluated.value - (weighted * kl.estimate(estimator, distance)).sum()
    evaluated.slope = evaluated.slope - weighted * distance


def _reference(batch: TokenBatch, current: Tensor, kept: Tensor) -> Tensor | None:
    """c - f, 0 outside `kept`."""
    if batch.reference_logprobs is None:
        return None
    return (current - batch.reference_logprobs.to(current.dtype)).masked_fill_(~kept, 0.0)


def _policy_mask(
    config: ObjectiveConfig, stale: Tensor | None, live: Tensor, statistics: MismatchStatistics
) -> tuple[Tensor, Tensor]:
    """Kept tokens, bool[N], and everybody's fate."""
    fates = live.to(torch.uint8)
    if stale is not None:
        fates = fates + stale.to(torch.uint8) * int(TokenFate.STALE)
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
    return kept, fates


def _denominator(
    config: ObjectiveConfig, batch: TokenBatch, whole: BatchCount | None, dtype: torch.dtype
) -> Tensor:
    """Z of the whole batch, at least 1."""
    by_tokens = config.aggregation.kind == "token_mean"
    if whole is None:
        whole = Normalizer(batch.mask.count_nonzero(), 0) if by_tokens else count_batch(batch)
    counted = torch.as_tensor(
        whole.tokens if by_tokens else whole.samples, device=batch.mask.device
    )
    if config.aggregation.kind == "constant":
        assert config.aggregation.max_tokens is not None
        counted = counted * config.aggregation.max_tokens
    return counted.clamp(min=1).to(dtype)


def _working_dtype(logprobs: Tensor) -> torch.dtype:
    return torch.float64 if logprobs.dtype == torch.float64 else torch.float32
