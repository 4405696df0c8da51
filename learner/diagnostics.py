"""What an evaluated micro-batch reports: the sums, histograms and maxima that `Metrics` adds up.

Nothing here has a gradient. Tokens are taken in blocks that stay in a processor's cache, since
everything is a reduction.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from learner import kl
from learner.objective_config import ObjectiveConfig
from learner.objective_metrics import (
    BINS,
    FATE_CODES,
    MASK_REASONS,
    MOMENTS,
    ORIGINS,
    PARTS,
    REMOVALS,
    SIZE_EDGES,
    SIZES,
    Metrics,
    bin_of,
)
from learner.ratio import rounding_slack
from learner.segments import segment_sum
from learner.token_batch import TokenBatch, TokenFate

_BLOCK = 1 << 15
_BUCKET_OF_LAG = (0, 1, 2, 3, 3, 4, 4, 4, 4, 5)
_CROSSED = len(ORIGINS) - 1
# exp of more overflows float32 sums; such a ratio is the only sample that counts anyhow.
_LARGEST_LOG = 40.0
_STAGE_OF_FATE = (0, 0, 1, 2, 3, 3)


@dataclass
class Evaluated:
    """What the objective knows per token [N] once it is evaluated; detached, 0 outside its mask.

    `ratio` is u and `bounded` u within the clip; `weights` w after the cap, `log_weights` before;
    `reference` c - f; `lengths[S]` the data mask's. None is not computed.
    """

    live: Tensor
    kept: Tensor
    fates: Tensor
    lengths: Tensor
    current: Tensor
    advantages: Tensor
    movement: Tensor | None
    mismatch: Tensor | None
    weights: Tensor | None
    log_weights: Tensor | None
    ratio: Tensor
    bounded: Tensor
    restrained: Tensor | None
    reference: Tensor | None


def measure(
    config: ObjectiveConfig,
    batch: TokenBatch,
    evaluated: Evaluated,
    loss: Tensor,
    *,
    everything: bool,
) -> Metrics:
    """Metrics of a micro-batch; the loss and the counts alone without `everything`."""
    by_fate = torch.bincount(evaluated.fates, minlength=len(TokenFate))
    sums = {
        "loss": loss,
        "tokens": by_fate[1:].sum(),
        "samples": (evaluated.lengths > 0).sum(),
        "trained_tokens": by_fate[TokenFate.TRAINED],
    }
    sums |= {f"masked_tokens/{r}": by_fate[TokenFate[r.upper()]] for r in MASK_REASONS}
    tally = _Tally(loss.device)
    if everything:
        sums["measured_tokens"] = sums["tokens"]
        for start in range(0, len(evaluated.fates), _BLOCK):
            _measure_block(config, batch, evaluated, slice(start, start + _BLOCK), tally)
        sums |= _by_length(batch, evaluated)
    return Metrics.pack(sums | tally.sums, tally.maxima, loss.device)


class _Tally:
    """Sums and maxima by name, in float64."""

    def __init__(self, device: torch.device) -> None:
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}
        self.bucket_of_lag = torch.tensor(_BUCKET_OF_LAG, device=device)
        self.stage_of_fate = torch.tensor(_STAGE_OF_FATE, device=device)
        self.edges = torch.tensor(SIZE_EDGES, device=device)

    def add(self, name: str, values: Tensor) -> None:
        values = values.double()
        self.sums[name] = self.sums[name] + values if name in self.sums else values

    def raise_to(self, name: str, values: Tensor) -> None:
        values = values.double()
        known = self.maxima.get(name)
        self.maxima[name] = values if known is None else torch.maximum(known, values)


def _measure_block(
    config: ObjectiveConfig, batch: TokenBatch, evaluated: Evaluated, block: slice, tally: _Tally
) -> None:
    live, kept = evaluated.live[block], evaluated.kept[block]
    fates = evaluated.fates[block].long()
    current, advantages = evaluated.current[block], evaluated.advantages[block]
    tally.add("covariance", _covariance_sums(current, advantages, kept))
    inside = batch.mask[block]
    tally.add("zero_advantage_tokens", (inside & (batch.advantages[block] == 0)).count_nonzero())
    if batch.entropy is not None:
        tally.add("entropy", batch.entropy.detach()[block].masked_fill(~live, 0.0).sum())
        tally.add("entropy_tokens", live.count_nonzero())
    if evaluated.reference is not None:
        distance = evaluated.reference[block]
        tally.add("kl", kl.estimate(config.kl.estimator, distance).sum())
        tally.add("kl_tokens", kept.count_nonzero())
    origin = torch.zeros_like(fates)
    if batch.version_lag is not None:
        lag = batch.version_lag[block]
        trained_lag = lag.masked_fill(~kept, 0)
        tally.add("lag", trained_lag.sum())
        tally.add("lag_tokens", kept.count_nonzero())
        tally.raise_to("lag", trained_lag.max())
        origin = tally.bucket_of_lag[lag.clamp(0, len(_BUCKET_OF_LAG) - 1)]
    if batch.crossed is not None:
        origin = origin.masked_fill(batch.crossed[block], _CROSSED)
    capped = _mass_block(config, batch, evaluated, block, tally)
    codes = (fates - 1).masked_fill(capped, len(FATE_CODES) - 1)
    tally.add("origin_fates", _count(origin * len(FATE_CODES) + codes, inside, "origin_fates"))
    for part, values in zip(PARTS, (evaluated.movement, evaluated.mismatch), strict=True):
        if values is not None:
            _log_ratio_block(part, values[block], live, origin, tally)
    if evaluated.mismatch is not None and batch.old_logprobs is not None:
        _slope_block(evaluated, block, tally)
    if batch.position is not None:
        bucket = torch.bucketize(batch.position[block], tally.edges, right=True)
        tally.add("position_tokens", _count(bucket, inside, "position"))
        tally.add("position_masked", _count(bucket, inside & ~kept, "position"))


def _covariance_sums(current: Tensor, advantages: Tensor, kept: Tensor) -> Tensor:
    known = current.masked_fill(~kept, 0.0)
    return torch.stack([known.sum(), advantages.sum(), torch.dot(known, advantages)])


_KINDS = {"origin_fates": len(ORIGINS) * len(FATE_CODES), "position": len(SIZES)}


def _count(codes: Tensor, chosen: Tensor, kind: str) -> Tensor:
    """Tokens of `chosen` by code."""
    size = _KINDS[kind]
    return torch.bincount(codes.masked_fill(~chosen, size), minlength=size + 1)[:size]


def _log_ratio_block(
    part: str, values: Tensor, live: Tensor, origin: Tensor, tally: _Tally
) -> None:
    """Moments, histogram and maximum of one part of c - b by origin; 0 outside `live`.

    exp(d) - 1 is summed rather than exp(d), so that small differences keep their digits.
    """
    magnitude = values.abs()
    safe = values.clamp(max=_LARGEST_LOG)
    excess = torch.expm1(safe)
    rows = [live.to(values.dtype), values, magnitude, excess, excess.square(), excess - safe]
    if len(rows) != len(MOMENTS):
        raise AssertionError(MOMENTS)
    members = torch.nn.functional.one_hot(origin, len(ORIGINS)).to(values.dtype)
    tally.add(f"{part}/moments", (torch.stack(rows) @ members).flatten())
    size = len(ORIGINS) * BINS
    codes = (origin * BINS + bin_of(magnitude)).masked_fill_(~live, size)
    tally.add(f"{part}/histogram", torch.bincount(codes, minlength=size + 1)[:size])
    largest = values.new_zeros(len(ORIGINS)).scatter_reduce_(0, origin, magnitude, "amax")
    tally.raise_to(f"{part}/abs", largest)


def _slope_block(evaluated: Evaluated, block: slice, tally: _Tally) -> None:
    """Whether the mismatch follows the log-probability itself, as with a wrong temperature."""
    assert evaluated.movement is not None and evaluated.mismatch is not None
    old = evaluated.current[block] - evaluated.movement[block]
    mismatch = evaluated.mismatch[block]
    products = [torch.dot(old, old), torch.dot(old, mismatch), torch.dot(mismatch, mismatch)]
    tally.add("old_slope", torch.stack([old.sum(), *products]))


def _mass_block(
    config: ObjectiveConfig, batch: TokenBatch, evaluated: Evaluated, block: slice, tally: _Tally
) -> Tensor:
    """Σ|wA| and who removes it; returns which tokens were capped. A stale token has no weight and
    counts with 1; a rejected one counts with the weight that it would have had, uncapped."""
    kept, signs = evaluated.kept[block], evaluated.advantages[block]
    capped = torch.zeros_like(kept)
    sizes = batch.advantages[block].masked_fill(~batch.mask[block], 0.0).abs().to(signs.dtype)
    mass = after = sizes
    weights, log_weights = evaluated.weights, evaluated.log_weights
    if weights is not None and log_weights is not None:
        full = log_weights[block].clamp(max=_LARGEST_LOG).exp()
        mass = after = sizes * full
        tally.add("weight", weights[block].masked_fill(~kept, 0.0).sum())
        if config.correction.cap is not None:
            after = torch.where(kept, sizes * weights[block], mass)
            bound = torch.tensor(config.correction.cap).log().item()
            slack = rounding_slack(log_weights.dtype)
            capped = kept & (log_weights[block] > bound + slack)
            tally.add("cap_tokens", capped.count_nonzero())
    else:
        tally.add("weight", kept.count_nonzero())
    stage = tally.stage_of_fate[evaluated.fates[block].long()]
    ratio, bounded = evaluated.ratio[block], evaluated.bounded[block]
    below, above = ratio < bounded, ratio > bounded
    acts, negative = kept & (signs != 0), signs < 0
    cispo = config.clip.kind == "cispo"
    dual = above & acts & negative & (not cispo)
    for number, name, chosen in (
        (5, "clip_low", below & acts),
        (6, "clip_high", above & acts & ~dual),
        (7, "clip_dual", dual),
    ):
        tally.add(f"{name}_tokens", chosen.count_nonzero())
        if not cispo:
            stage = stage.masked_fill(chosen, number)
    if evaluated.restrained is not None and config.covariance.kind == "clip":
        chosen = evaluated.restrained[block]
        tally.add("clip_cov_tokens", chosen.count_nonzero())
        stage = stage.masked_fill(chosen, 8)
    removed = after.new_zeros(len(REMOVALS) + 1).index_add_(0, stage, after)
    removed[4] += (mass - after).sum()
    tally.add("mass", mass.sum())
    tally.add("mass_removed", removed[1:])
    return capped


def _by_length(batch: TokenBatch, evaluated: Evaluated) -> dict[str, Tensor]:
    """Tokens in the data mask, and those of them that a policy mask took, by response length."""
    lengths = evaluated.lengths
    kept = segment_sum(evaluated.kept.to(lengths.dtype), batch.sample_index, batch.num_samples)
    edges = torch.tensor(SIZE_EDGES, device=lengths.device)
    bucket = torch.bucketize(lengths, edges, right=True)
    return {
        "length_tokens": segment_sum(lengths, bucket, len(SIZES)),
        "length_masked": segment_sum(lengths - kept, bucket, len(SIZES)),
    }
