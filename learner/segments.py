"""Per-sample reductions over flat token tensors, without a loop over samples."""

from torch import Tensor


def segment_sum(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Sum of `values[N]` per segment `index[N]` in [0, size): [size], differentiable."""
    return values.new_zeros(size).index_add(0, index, values)


def segment_any(flags: Tensor, index: Tensor, size: int) -> Tensor:
    """Whether any of `flags` (bool[N]) is set per segment: bool[size]."""
    return segment_sum(flags.float(), index, size) > 0
