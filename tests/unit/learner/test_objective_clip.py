"""Clip tables: region x sign of the advantage x unit, bounds included, and sequence-ratio facts."""

import math

import pytest
import torch

from learner.objective import TokenBatch, evaluate, preset

LOW, HIGH, DUAL = 0.2, 0.4, 3.0
UNITS = ["token", "sequence", "sequence_pure"]
# ratio, then whether the gradient is flat for A > 0, for A < 0, and for A < 0 with the dual bound
REGIONS = {
    "far below": (0.3, False, True, True),
    "just below": (1 - LOW - 1e-9, False, True, True),
    "lower bound": (1 - LOW, False, False, False),
    "inside": (1.05, False, False, False),
    "upper bound": (1 + HIGH, False, False, False),
    "just above": (1 + HIGH + 1e-9, True, False, False),
    "above": (2.0, True, False, False),
    "dual bound": (DUAL, True, False, False),
    "beyond dual": (DUAL + 1e-9, True, False, True),
    "far beyond dual": (50.0, True, False, True),
}


def responses(ratios, advantage, anchor=-1.7):
    """One sample whose tokens have these ratios to p = b."""
    old = torch.full((len(ratios),), anchor, dtype=torch.float64)
    logprobs = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    everything = torch.ones(len(ratios), dtype=torch.bool)
    index = torch.zeros(len(ratios), dtype=torch.long)
    advantages = torch.full_like(old, advantage)
    return logprobs, TokenBatch(index, everything, old, old, advantages, 1)


def ppo(unit, dual=None):
    clip = {"low": LOW, "high": HIGH, "dual": dual}
    return preset("grpo", {"ratio": {"unit": unit}, "clip": clip, "correction": "none"})


@pytest.mark.parametrize("with_dual", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("region", REGIONS)
def test_ppo_clip_table(region, unit, sign, with_dual):
    ratio, flat_positive, flat_negative, flat_dual = REGIONS[region]
    advantage = 1.5 * sign
    flat = flat_positive if sign > 0 else flat_dual if with_dual else flat_negative
    bound = 1 + HIGH if sign > 0 else DUAL if ratio > 1 else 1 - LOW

    shares = {
        "clip_low_share": flat and sign < 0 and ratio < 1,
        "clip_high_share": flat and sign > 0,
        "clip_dual_share": flat and sign < 0 and ratio > DUAL,
    }
    slope = 0.0 if flat else -ratio * advantage / 2
    for anchor in (-1.7, -0.013, -11.3):
        logprobs, batch = responses([ratio, ratio], advantage, anchor)
        output = evaluate(ppo(unit, DUAL if with_dual else None), logprobs, batch)
        output.loss.backward()
        value = (bound if flat else ratio) * advantage
        assert output.loss.item() == pytest.approx(-value, rel=1e-12)
        assert logprobs.grad.tolist() == pytest.approx([slope, slope], rel=1e-12)
        metrics = output.metrics.finalise()
        assert {name: bool(metrics[name]) for name in shares} == shares


def test_a_lower_bound_of_zero_never_clips():
    logprobs, batch = responses([1e-6], -1.0)
    config = preset("grpo", {"clip": {"low": 1.0}, "correction": "none"})
    evaluate(config, logprobs, batch).loss.backward()
    assert logprobs.grad.item() == pytest.approx(1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    ("ratio", "weight"), [(0.1, 0.5), (0.5, 0.5), (0.9, 0.9), (3.0, 3.0), (7.0, 3.0)]
)
@pytest.mark.parametrize("unit", UNITS)
def test_cispo_caps_the_weight_and_keeps_the_gradient(unit, ratio, weight, sign):
    clip = {"kind": "cispo", "low": 0.5, "high": 3.0}
    config = preset("cispo", {"ratio": {"unit": unit}, "clip": clip})
    logprobs, batch = responses([ratio, ratio], sign)
    output = evaluate(config, logprobs, batch)
    output.loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-sign * weight / 2] * 2, rel=1e-12)
    value = -sign * weight * logprobs.detach().mean().item()
    assert output.loss.item() == pytest.approx(value, rel=1e-12)
    metrics = output.metrics.finalise()
    assert metrics["clip_low_share"] == float(ratio < 0.5)
    assert metrics["clip_high_share"] == float(ratio > 3.0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.01, 1.0, 40.0])
def test_no_clip_is_the_plain_ratio(ratio, sign):
    logprobs, batch = responses([ratio], sign)
    config = preset("grpo", {"clip": {"kind": "none"}, "correction": "none"})
    output = evaluate(config, logprobs, batch)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-ratio * sign)
    assert logprobs.grad.item() == pytest.approx(-ratio * sign)


@pytest.mark.parametrize("unit", ["sequence", "sequence_pure"])
def test_ratios_2_and_one_half_cancel_in_a_sequence(unit):
    logprobs, batch = responses([2.0, 0.5], 1.0)
    output = evaluate(ppo(unit), logprobs, batch)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-1.0, rel=1e-12)
    assert logprobs.grad.tolist() == pytest.approx([-0.5, -0.5], rel=1e-12)
    assert output.metrics.finalise()["clip_high_share"] == 0.0

    token = evaluate(ppo("token"), *responses([2.0, 0.5], 1.0))
    assert token.metrics.finalise()["clip_high_share"] == 0.5


def test_the_sequence_ratio_is_the_geometric_mean():
    ratios = [1.3, 0.9, 1.2]
    logprobs, batch = responses(ratios, -2.0)
    output = evaluate(ppo("sequence"), logprobs, batch)
    assert output.loss.item() == pytest.approx(2 * math.prod(ratios) ** (1 / 3), rel=1e-12)


def test_one_wild_token_clips_the_whole_sequence_but_only_itself_per_token():
    ratios = [1.0, 1.0, 9.0]
    for unit, expected in (("sequence", [0.0, 0.0, 0.0]), ("token", [-1 / 3, -1 / 3, 0.0])):
        logprobs, batch = responses(ratios, 1.0)
        evaluate(ppo(unit), logprobs, batch).loss.backward()
        assert logprobs.grad.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("weight", ["none", "product", "geometric"])
def test_pure_and_token_form_agree_when_nothing_acts_per_token(weight, seed):
    generator = torch.Generator().manual_seed(seed)
    index = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2])
    old = -torch.rand(8, generator=generator, dtype=torch.float64)
    drift = 0.1 * torch.randn(2, 8, generator=generator, dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)[index]
    batch = TokenBatch(index, index >= 0, old - drift[0], old, advantages, 3)
    results = []
    for unit in ("sequence", "sequence_pure"):
        logprobs = (old + drift[1]).requires_grad_()
        overrides = {"ratio": {"unit": unit}, "correction": {"weight": weight}}
        loss = evaluate(preset("gspo", overrides), logprobs, batch).loss
        loss.backward()
        results.append((loss.detach(), logprobs.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-15)
