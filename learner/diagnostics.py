"""What an evaluated batch reports: the sums, histograms and maxima that `Metrics` adds up.

Nothing here has a gradient. What concerns few tokens (the rejected, the clipped, the capped) is
measured on those alone; what concerns all is done once per origin, on the tokens of that origin.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from learner import kl
from learner.objective_config import ObjectiveConfig
from learner.objective_metrics import (
    BINS,
    FATE_CODES,
    LAG_ORIGINS,
    LARGEST_LOG,
    MASK_REASONS,
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

_CROSSED = len(ORIGINS) - 1
_REMOVED_BY_FATE = {"stale": ("STALE",), "veto": ("VETO",), "keep": ("KEEP_LOW", "KEEP_HIGH")}
_CAPPED = FATE_CODES.index("cap")


@dataclass
class Evaluated:
    """What the objective knows per token [N] once it is evaluated; detached, 0 outside its mask.

    `value` is -loss x Z and `slope` its derivative by c; `ratio` is u and `bounded` u within the
    clip; `weights` w after the cap, `log_weights` before; `shares` a where it is not 1;
    `reference` c - f; `restrained` what Clip-Cov or KL-Cov chose; `lengths[S]` the data mask's.
    """

    value: Tensor
    slope: Tensor
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
    shares: Tensor | None
    ratio: Tensor
    bounded: Tensor
    reference: Tensor | None
    restrained: Tensor | None = None


class Tally:
    """Sums and maxima by name, in float64, over the parts of a batch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Add to the sums of this name."""
        known = self._sums.get(name)
        self._sums[name] = values.double() if known is None else known + values

    def raise_to(self, name: str, values: Tensor) -> None:
        """Raise the maxima of this name to `values`."""
        known = self._maxima.get(name)
        self._maxima[name] = values.double() if known is None else torch.maximum(known, values)

    def metrics(self, loss: Tensor) -> Metrics:
        """Everything tallied, with the loss."""
        return Metrics.pack(self._sums | {"loss": loss}, self._maxima, self.device)


def measure(
    config: ObjectiveConfig,
    batch: TokenBatch,
    evaluated: Evaluated,
    tally: Tally,
    *,
    everything: bool,
) -> None:
    """Add what `batch` has to report: its counts, and the rest with `everything`."""
    tokens = batch.mask.count_nonzero()
    trained = evaluated.kept.count_nonzero()
    tally.add("tokens", tokens)
    tally.add("samples", (evaluated.lengths > 0).sum())
    tally.add("trained_tokens", trained)
    rejected = (evaluated.fates > int(TokenFate.TRAINED)).nonzero().flatten()
    fates = evaluated.fates[rejected].long()
    for reason in MASK_REASONS:
        tally.add(f"masked_tokens/{reason}", (fates == TokenFate[reason.upper()]).sum())
    if not everything or not len(evaluated.fates):
        return
    tally.add("measured_tokens", tokens)
    tally.add("zero_advantage_tokens", (batch.mask & (batch.advantages == 0)).count_nonzero())
    known = torch.where(evaluated.kept, evaluated.current, 0.0)
    products = [known.sum(), evaluated.advantages.sum(), torch.dot(known, evaluated.advantages)]
    tally.add("covariance", torch.stack(products))
    if batch.entropy is not None:
        tally.add("entropy", batch.entropy.detach().masked_fill(~evaluated.live, 0.0).sum())
        tally.add("entropy_tokens", evaluated.live.count_nonzero())
    if evaluated.reference is not None:
        tally.add("kl", kl.estimate(config.kl.estimator, evaluated.reference).sum())
        tally.add("kl_tokens", trained)
    capped = _gradient_mass(config, batch, evaluated, rejected, fates, tally)
    _by_origin(batch, evaluated, rejected, capped, tally)
    _by_size(batch, evaluated, tally)


def _gradient_mass(
    config: ObjectiveConfig,
    batch: TokenBatch,
    evaluated: Evaluated,
    rejected: Tensor,
    fates: Tensor,
    tally: Tally,
) -> Tensor:
    """Σ|wA| and who removes it; returns the places of capped tokens. A stale token has no weight
    and counts with 1; a rejected one counts with the weight that it would have had, uncapped."""
    advantages, weights = evaluated.advantages, evaluated.weights
    sizes = advantages.abs()
    removed = torch.zeros(len(REMOVALS), dtype=torch.float64, device=tally.device)
    lost = batch.advantages[rejected].abs().to(sizes.dtype)
    capped = rejected[:0]
    if weights is None or evaluated.log_weights is None:
        tally.add("weight", evaluated.kept.count_nonzero())
    else:
        full = evaluated.log_weights[rejected].clamp(max=LARGEST_LOG).exp()
        lost = torch.where(fates == TokenFate.STALE, lost, lost * full)
        tally.add("weight", torch.dot(weights, evaluated.kept.to(weights.dtype)))
        capped = _capped(config, evaluated)
        full = evaluated.log_weights[capped].clamp(max=LARGEST_LOG).exp()
        removed[REMOVALS.index("cap")] = (sizes[capped] * (full - weights[capped])).sum()
        sizes = (sizes * weights).masked_fill_(sizes == 0, 0.0)
        tally.add("cap_tokens", torch.tensor(len(capped), device=tally.device))
    for name, causes in _REMOVED_BY_FATE.items():
        for cause in causes:
            removed[REMOVALS.index(name)] += lost[fates == TokenFate[cause]].sum()
    moved = (evaluated.ratio != evaluated.bounded).nonzero().flatten()
    moved = moved[advantages[moved] != 0]
    above, negative = evaluated.ratio[moved] > evaluated.bounded[moved], advantages[moved] < 0
    dual = above & negative & (config.clip.kind != "cispo")
    for name, chosen in (("low", ~above), ("high", above & ~dual), ("dual", dual)):
        tally.add(f"clip_{name}_tokens", chosen.count_nonzero())
        if config.clip.kind != "cispo":
            removed[REMOVALS.index(f"clip_{name}")] = sizes[moved[chosen]].sum()
    if evaluated.restrained is not None and config.covariance.kind == "clip":
        tally.add("clip_cov_tokens", evaluated.restrained.count_nonzero())
        removed[REMOVALS.index("clip_cov")] = sizes[evaluated.restrained].sum()
    before_clips = sizes.sum().double() + removed[: REMOVALS.index("cap") + 1].sum()
    tally.add("mass", before_clips)
    tally.add("mass_removed", removed)
    return capped


def _capped(config: ObjectiveConfig, evaluated: Evaluated) -> Tensor:
    log_weights = evaluated.log_weights
    if config.correction.cap is None or log_weights is None:
        return torch.zeros(0, dtype=torch.int64, device=evaluated.fates.device)
    bound = math.log(config.correction.cap) + rounding_slack(log_weights.dtype)
    places = (log_weights > bound).nonzero().flatten()
    return places[evaluated.kept[places]]


def _by_origin(
    batch: TokenBatch, evaluated: Evaluated, rejected: Tensor, capped: Tensor, tally: Tally
) -> None:
    """Both log-ratios, and what the correction did, by where tokens come from."""
    origin = torch.zeros_like(batch.sample_index)
    if batch.version_lag is not None:
        lag = torch.where(evaluated.kept, batch.version_lag, 0)
        tally.add("lag", lag.sum())
        tally.add("lag_tokens", evaluated.kept.count_nonzero())
        tally.raise_to("lag", lag.max())
        bounded = batch.version_lag.clamp(0, len(LAG_ORIGINS) - 1)
        origin = torch.tensor(LAG_ORIGINS, device=tally.device).index_select(0, bounded)
    if batch.crossed is not None:
        origin = origin.masked_fill(batch.crossed, _CROSSED)
    fates = torch.zeros(len(ORIGINS), len(FATE_CODES), dtype=torch.float64, device=tally.device)
    codes = origin[rejected] * len(FATE_CODES) + evaluated.fates[rejected].long() - 1
    fates.view(-1).index_add_(0, codes, torch.ones_like(codes, dtype=torch.float64))
    fates[:, _CAPPED] = torch.bincount(origin[capped], minlength=len(ORIGINS))
    low, high = (int(value) for value in origin.aminmax())
    for number in range(low, high + 1):
        chosen = evaluated.live if low == high else evaluated.live & (origin == number)
        places = chosen.nonzero().flatten()
        fates[number, 0] = len(places) - fates[number, 2:].sum()
        if len(places):
            _log_ratios(batch, evaluated, places, number, tally)
    tally.add("origin_fates", fates.flatten())


def _log_ratios(
    batch: TokenBatch, evaluated: Evaluated, places: Tensor, number: int, tally: Tally
) -> None:
    """Moments, histogram and maximum of both parts of c - b over the tokens of one origin, and
    whether the mismatch follows p itself, as it does with a wrong temperature.

    exp(d) - 1 is summed rather than exp(d), so that small differences keep their digits.
    """
    found: dict[str, Tensor] = {}
    for part, everyone in zip(PARTS, (evaluated.movement, evaluated.mismatch), strict=True):
        if everyone is None:
            continue
        values = found[part] = everyone.index_select(0, places)
        magnitude = values.abs()
        safe = values.clamp(max=LARGEST_LOG)
        excess = torch.expm1(safe)
        moments = [magnitude.sum(), excess.sum(), torch.dot(excess, excess), (excess - safe).sum()]
        tally.add(f"{part}/moments/{number}", torch.stack([values.sum(), *moments]))
        tally.add(f"{part}/tokens/{number}", torch.tensor(len(places), device=tally.device))
        histogram = torch.bincount(bin_of(magnitude), minlength=BINS)
        tally.add(f"{part}/histogram/{number}", histogram)
        tally.raise_to(f"{part}/abs/{number}", magnitude.max())
    if batch.old_logprobs is not None:
        mismatch = found["mismatch"]
        old = batch.old_logprobs.index_select(0, places).to(mismatch.dtype)
        products = [torch.dot(old, old), torch.dot(old, mismatch), torch.dot(mismatch, mismatch)]
        tally.add("old_slope", torch.stack([old.sum(), *products]))


def _by_size(batch: TokenBatch, evaluated: Evaluated, tally: Tally) -> None:
    """Tokens in the data mask, and those of them that a policy mask took, by response length, and
    by position where it is known."""
    lengths = evaluated.lengths
    lost = batch.mask & ~evaluated.kept
    missing = torch.zeros_like(lengths)
    if bool(lost.any()):
        missing = segment_sum(lost.to(lengths.dtype), batch.sample_index, batch.num_samples)
    edges = torch.tensor(SIZE_EDGES, device=lengths.device)
    bucket = torch.bucketize(lengths, edges, right=True)
    tally.add("length_tokens", segment_sum(lengths, bucket, len(SIZES)))
    tally.add("length_masked", segment_sum(missing, bucket, len(SIZES)))
    if batch.position is not None:
        bucket = torch.bucketize(batch.position.contiguous(), edges, right=True)
        tally.add("position_tokens", torch.bincount(bucket[batch.mask], minlength=len(SIZES)))
        tally.add("position_masked", torch.bincount(bucket[lost], minlength=len(SIZES)))
