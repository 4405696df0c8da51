"""Response tokens of some samples, flat, and how a batch of them is counted."""

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from learner.objective_config import ObjectiveConfig
from learner.segments import segment_any, segment_count


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
    """int64[N]: sample of each token, in [0, num_samples) within `mask`."""
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
    reference_logprobs: Tensor | None = field(default=None, kw_only=True)
    """float[N]: the frozen reference model (f)."""
    entropy: Tensor | None = field(default=None, kw_only=True)
    """float[N]: entropy of the current policy at each token's prefix, in nats, with gradient."""
    version_lag: Tensor | None = field(default=None, kw_only=True)
    """int64[N]: learner's version minus the version that sampled the token."""
    crossed: Tensor | None = field(default=None, kw_only=True)
    """bool[N]: sampled after an update in mid-generation, with older keys and values cached.
    Only reported."""
    position: Tensor | None = field(default=None, kw_only=True)
    """int64[N]: place of the token in its response, from 0. Only reported."""


TOKEN_FIELDS = (
    "sample_index",
    "mask",
    "behavior_logprobs",
    "old_logprobs",
    "advantages",
    "reference_logprobs",
    "entropy",
    "version_lag",
    "crossed",
    "position",
)
"""The fields of TokenBatch that hold one value per token."""
_WHOLE_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


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


def count_batch(batch: TokenBatch) -> Normalizer:
    """Counts of this batch alone (0-d tensors); sum them over micro-batches and ranks. Raises
    ValueError for a sample that does not exist."""
    batch = with_known_samples(batch)
    lengths = segment_count(batch.mask, batch.sample_index, batch.num_samples)
    return Normalizer(tokens=lengths.sum(), samples=lengths.count_nonzero())


def sample_lengths(
    mask: Tensor, sample_index: Tensor, num_samples: int, dtype: torch.dtype
) -> Tensor:
    """T_i: tokens in the data mask per sample, [S]."""
    return segment_count(mask, sample_index, num_samples).to(dtype)


def fate_counts(fates: Tensor, sample_index: Tensor, num_samples: int) -> Tensor:
    """Tokens of each sample by fate: int64[S, len(TokenFate)]."""
    kinds = len(TokenFate)
    # A token outside the data mask may name a sample that does not exist.
    known = (sample_index >= 0) & (sample_index < num_samples)
    places = sample_index[known] * kinds + fates[known].long()
    return torch.bincount(places, minlength=num_samples * kinds).view(num_samples, kinds)


def with_known_samples(batch: TokenBatch) -> TokenBatch:
    """The batch with every token in a sample that exists. Raises ValueError where an unmasked one
    is in none."""
    index, samples = batch.sample_index, batch.num_samples
    if not len(index):
        return batch
    low, high = (int(value) for value in index.aminmax())
    if low >= 0 and high < samples:
        return batch
    bad = (batch.mask & ((index < 0) | (index >= samples))).nonzero().flatten()
    if len(bad):
        raise ValueError(
            f"sample_index of token {int(bad[0])} is {int(index[bad[0]])}, "
            f"expected one of [0, {samples})"
        )
    samples = max(samples, 1)
    return replace(batch, sample_index=index.clamp(0, samples - 1), num_samples=samples)


def stale_tokens(config: ObjectiveConfig, batch: TokenBatch) -> Tensor | None:
    """bool[N] within the data mask; None where no lag is too old. A stale token has no p, so
    nothing of its sample has a value where the unit or a statistic is per sequence."""
    if batch.version_lag is None or config.max_staleness is None:
        return None
    stale = batch.mask & (batch.version_lag > config.max_staleness)
    if config.per_sequence:
        of_sample = segment_any(stale, batch.sample_index, batch.num_samples)
        stale = batch.mask & of_sample.index_select(0, batch.sample_index)
    return stale


def check_batch(config: ObjectiveConfig, logprobs: Tensor, batch: TokenBatch) -> None:
    """Raises ValueError when shapes contradict each other or the config needs what is missing."""
    if batch.mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, got {batch.mask.dtype}")
    for name in TOKEN_FIELDS:
        values = getattr(batch, name)
        if values is not None and values.shape != logprobs.shape:
            raise ValueError(
                f"{name} has shape {tuple(values.shape)}, logprobs {tuple(logprobs.shape)}"
            )
    for name in ("sample_index", "version_lag", "position"):
        values = getattr(batch, name)
        if values is not None and values.dtype not in _WHOLE_NUMBERS:
            raise ValueError(f"{name} is {values.dtype}, expected whole numbers, as torch.int64")
    if logprobs.dim() != 1:
        raise ValueError(f"logprobs must be flat over tokens, got shape {tuple(logprobs.shape)}")
    _check_fields(config, batch)


def _check_fields(config: ObjectiveConfig, batch: TokenBatch) -> None:
    if config.needs_old and batch.old_logprobs is None:
        raise ValueError(
            f"old_logprobs are missing, and ratio.anchor {config.ratio.anchor!r}, the correction, "
            "the covariance term or KL in the reward needs them"
        )
    if config.max_staleness is not None and batch.version_lag is None:
        raise ValueError(
            f"version_lag is missing, and max_staleness {config.max_staleness} needs it; zeros say "
            "that every token is of the newest version"
        )
    if config.entropy_bonus and batch.entropy is None:
        raise ValueError("entropy is missing, and entropy_bonus needs it")
    if config.needs_reference and config.kl_in_loss and batch.reference_logprobs is None:
        raise ValueError("reference_logprobs are missing, and kl.coefficient needs them")
    if config.aggregation.kind == "constant" and config.aggregation.max_tokens is None:
        raise ValueError(
            "aggregation 'constant' needs max_tokens: set it, or fill in the run's response limit"
        )
