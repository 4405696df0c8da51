"""Causal attention over packed rows, sample by sample, without a dense mask.

Everything outside attention sees one unpadded row of tokens. Only here are samples padded, in
groups of like length, on the right: a causal query never looks there. Registered with
transformers under `ATTENTION`; the `Packing` of the row comes along as a keyword argument.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from learner.packing import length_buckets, ragged_index

ATTENTION = "slipstream_packed"


@dataclass(frozen=True, eq=False)
class Bucket:
    """`rows` sequences padded to `width` tokens; `masks` caches sliding-window masks by window."""

    rows: int
    width: int
    masks: dict[int, Tensor]


@dataclass(frozen=True, eq=False)
class Moves:
    """From N packed tokens to P padded slots and back.

    `slots` int64 [N]: the slot of each token; `sources` int64 [P]: the token of each slot, some
    token of the row for padding; `padding` bool [P, 1, 1], None where nothing is padded.
    """

    slots: Tensor
    sources: Tensor
    padding: Tensor | None


@dataclass(frozen=True, eq=False)
class Packing:
    """How a packed row maps to padded buckets, one after the other; `moves` is None where packed
    and padded order are the same."""

    buckets: tuple[Bucket, ...]
    moves: Moves | None

    @property
    def slot_count(self) -> int:
        """P: tokens that attention computes, padding included."""
        return sum(bucket.rows * bucket.width for bucket in self.buckets)


def make_packing(lengths: np.ndarray, device: torch.device | None = None) -> Packing:
    """Index tensors for a row of sequences with these lengths (int64 [S], each ≥ 1)."""
    if (lengths == lengths[0]).all():
        bucket = Bucket(len(lengths), int(lengths[0]), {})
        return Packing((bucket,), None)
    starts = np.cumsum(lengths) - lengths
    slots = np.empty(int(lengths.sum()), np.int64)
    buckets = []
    offset = 0
    for group in length_buckets(lengths):
        width = int(lengths[group[0]])
        tokens = ragged_index(starts[group], lengths[group])
        first_slots = offset + width * np.arange(len(group))
        slots[tokens] = ragged_index(first_slots, lengths[group])
        buckets.append(Bucket(len(group), width, {}))
        offset += len(group) * width
    sources = np.full(offset, -1, np.int64)
    sources[slots] = np.arange(len(slots))
    padding = sources < 0
    sources[padding] = 0
    moves = Moves(
        torch.from_numpy(slots).to(device),
        torch.from_numpy(sources).to(device),
        torch.from_numpy(padding)[:, None, None].to(device) if padding.any() else None,
    )
    return Packing(tuple(buckets), moves)


class _ToSlots(torch.autograd.Function):
    """[N, H, D] → [P, H, D]. Padding repeats a token and gets no gradient: nothing reads it."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, moves: Moves) -> Tensor:
        ctx.moves = moves
        return tokens.index_select(0, moves.sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Each token has one slot, so that the gradient is a gather rather than a slow index_add.
        return grad.index_select(0, ctx.moves.slots), None


class _FromSlots(torch.autograd.Function):
    """[P, H, D] → [N, H, D]; padding is dropped and gets a zero gradient."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, moves: Moves) -> Tensor:
        ctx.moves = moves
        return padded.index_select(0, moves.slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        padded = grad.index_select(0, ctx.moves.sources)
        if ctx.moves.padding is not None:
            padded.masked_fill_(ctx.moves.padding, 0.0)
        return padded, None


def _sliding_mask(bucket: Bucket, window: int, device: torch.device) -> Tensor:
    """bool [W, W], true where a query may look: itself and the window - 1 tokens before it."""
    if window not in bucket.masks:
        position = torch.arange(bucket.width, device=device)
        distance = position[:, None] - position[None, :]
        bucket.masks[window] = (distance >= 0) & (distance < window)
    return bucket.masks[window]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bucket: Bucket, scale: float, window: int | None
) -> Tensor:
    """[B·W, heads, D] each → [B·W, query heads, D]."""
    shape = (bucket.rows, bucket.width)
    query, key, value = (x.unflatten(0, shape).transpose(1, 2) for x in (query, key, value))
    mask = None
    if window is not None and window < bucket.width:
        mask = _sliding_mask(bucket, window, query.device)
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).flatten(0, 1)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    *,
    packing: Packing | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function in the form of transformers: [1, heads, N, D] → [1, N, heads, D]."""
    if packing is None:
        raise ValueError(f"{type(module).__name__} does not pass its keyword arguments on")
    if kwargs.get("softcap") or kwargs.get("s_aux") is not None:
        raise ValueError(f"{type(module).__name__} needs soft-capped attention or sinks")
    dtype = query.dtype
    # torch's half-precision attention backward is several times slower than float32 on CPUs.
    if query.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        query, key, value = query.float(), key.float(), value.float()
    rows = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]
    if packing.moves is not None:
        rows = [_ToSlots.apply(x, packing.moves) for x in rows]
    sizes = [bucket.rows * bucket.width for bucket in packing.buckets]
    parts = zip(packing.buckets, *(x.split(sizes) for x in rows), strict=True)
    outputs = [_attend(q, k, v, bucket, scaling, sliding_window) for bucket, q, k, v in parts]
    output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    if packing.moves is not None:
        output = _FromSlots.apply(output, packing.moves)
    return output.unsqueeze(0).to(dtype), None


AttentionInterface.register(ATTENTION, packed_attention)
