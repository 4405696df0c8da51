"""The critic's loss: clipped squared error with an exact denominator. Knows no model."""

import torch
from torch import Tensor


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    tokens: int | float | Tensor,
    clip: float | None,
) -> tuple[Tensor, Tensor]:
    """Scalar loss to minimise, and how many tokens the clip made flat (0-d).

    1/2 Σ m max((V - R)², (clamp(V, V_old - clip, V_old + clip) - R)²) / tokens, over float[N]
    inputs of which only `values` has a gradient; the pessimistic maximum is that of the PPO
    implementations (Huang et al. 2022, "The 37 implementation details of PPO"), the paper (arXiv
    1707.06347) leaves it open. `clip` None is the plain squared error. `tokens` counts the data
    mask of the whole batch over micro-batches and ranks, so that parts add up. Values outside
    `mask` (bool[N]) may be anything. Raises ValueError where shapes differ.
    """
    for name, other in (("old_values", old_values), ("returns", returns), ("mask", mask)):
        if other.shape != values.shape:
            raise ValueError(f"{name} has shape {tuple(other.shape)}, not {tuple(values.shape)}")
    current = values if values.dtype == torch.float64 else values.float()
    current = current.masked_fill(~mask, 0.0)
    target = returns.detach().to(current.dtype).masked_fill(~mask, 0.0)
    errors = (current - target).square()
    flat = torch.zeros_like(mask)
    if clip is not None:
        old = old_values.detach().to(current.dtype).masked_fill(~mask, 0.0)
        bounded = (old + (current - old).clamp(-clip, clip) - target).square()
        flat = (bounded > errors).detach()
        errors = torch.maximum(errors, bounded)
    count = torch.as_tensor(tokens, device=values.device).clamp(min=1)
    return errors.sum() / (2 * count), flat.count_nonzero()
