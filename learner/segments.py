"""Per-sample reductions over flat token tensors, without a loop over samples."""

import torch
from torch import Tensor


def segment_sum(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Sum of `values[N]` per segment `index[N]` in [0, size): [size], differentiable."""
    return values.new_zeros(size).index_add(0, index, values)


def segment_any(flags: Tensor, index: Tensor, size: int) -> Tensor:
    """Whether any of `flags` (bool[N]) is set per segment: bool[size]."""
    return segment_sum(flags.float(), index, size) > 0


def segment_count(flags: Tensor, index: Tensor, size: int) -> Tensor:
    """How many of `flags` (bool[N]) are set per segment: int64[size].

    Counted over the flags that are not set where segments are contiguous, since those are few.
    """
    if index.is_cuda or bool((index[1:] < index[:-1]).any()):
        return torch.bincount(index[flags], minlength=size)
    starts = torch.searchsorted(index.contiguous(), torch.arange(size + 1, device=index.device))
    return starts.diff() - torch.bincount(index[~flags], minlength=size)
