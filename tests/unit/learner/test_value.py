"""The clipped value loss against numbers by hand, and its normalisation."""

import math

import pytest
import torch

from learner.value import value_loss

NAN = float("nan")


def tensors(*rows):
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def test_by_hand():
    # V - R, and the same with V moved to within 0.2 of V_old:
    #   inside the bound: -0.5 -> 0.25;  moved towards R: 0.1 against 0.4 -> 0.16, flat;
    #   moved away from R: 0.7 against 0.4 -> 0.49, with gradient
    values, old, returns = tensors([0.5, 0.9, 0.7], [0.4, 0.4, 0.2], [1.0, 1.0, 0.0])
    values.requires_grad_()
    mask = torch.ones(3, dtype=torch.bool)
    loss, flat = value_loss(values, old, returns, mask, 3, 0.2)
    loss.backward()
    assert loss.item() == pytest.approx((0.25 + 0.16 + 0.49) / 6)
    assert flat.item() == 1
    assert values.grad.tolist() == pytest.approx([-0.5 / 3, 0.0, 0.7 / 3])


def test_without_a_clip_it_is_half_the_squared_error():
    values, old, returns = tensors([3.0, -1.0], [NAN, NAN], [1.0, 0.0])
    loss, flat = value_loss(values, old, returns, torch.ones(2).bool(), 2, None)
    assert (loss.item(), flat.item()) == (pytest.approx((4 + 1) / 4), 0)


def test_parts_add_up_and_padding_may_be_anything():
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 12, generator=generator, dtype=torch.float64)
    mask = torch.arange(12) % 4 != 1
    whole, flat = value_loss(values, old, returns, mask, 9, 0.2)
    for filler in (NAN, math.inf):
        parts = [
            value_loss(*(t.masked_fill(~mask, filler)[s] for t in (values, old, returns)), mask[s],
                       torch.tensor(9), 0.2)
            for s in (slice(0, 5), slice(5, 12))
        ]  # fmt: skip
        assert sum(part.item() for part, _ in parts) == pytest.approx(whole.item(), rel=1e-12)
        assert sum(int(count) for _, count in parts) == int(flat)
    leaf = values.masked_fill(~mask, NAN).requires_grad_()
    value_loss(leaf, old, returns, mask, 9, 0.2)[0].backward()
    assert torch.isfinite(leaf.grad).all()


def test_shapes_must_agree_and_nothing_is_zero():
    with pytest.raises(ValueError, match=r"returns has shape \(2,\), not \(3,\)"):
        value_loss(torch.ones(3), torch.ones(3), torch.ones(2), torch.ones(3).bool(), 3, 0.2)
    nothing = torch.zeros(3, dtype=torch.bool)
    assert value_loss(torch.ones(3), torch.ones(3), torch.ones(3), nothing, 0, 0.2)[0].item() == 0.0
