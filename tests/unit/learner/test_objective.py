"""Presets against gradients derived by hand, and the invariances that exact normalisation gives."""

import math
from dataclasses import replace

import pytest
import torch

from learner.config import PRESETS
from learner.objective import Normalizer, TokenBatch, TokenFate, count_batch, evaluate, preset
from learner.objective_metrics import Metrics

NAN, INF = float("nan"), float("inf")
MAX_TOKENS = 12


def config_of(name, **overrides):
    if name == "dr_grpo":
        overrides = {"aggregation": {"max_tokens": MAX_TOKENS}, **overrides}
    return preset(name, overrides)


def random_batch(lengths=(4, 1, 6, 3, 5), spread=0.3, seed=0):
    """Current log-probabilities and a batch with a tool token in every sample longer than 3."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    size = index.shape[0]

    def noise(scale):
        return scale * torch.randn(size, generator=generator, dtype=torch.float64)

    old = -3 * torch.rand(size, generator=generator, dtype=torch.float64) - 0.1
    mask = torch.ones(size, dtype=torch.bool)
    for sample, length in enumerate(lengths):
        if length > 3:
            mask[(index == sample).nonzero()[2]] = False
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)[index]
    batch = TokenBatch(index, mask, old - noise(0.8), old, advantages, len(lengths))
    return old + noise(spread), batch


def loss_and_gradient(config, logprobs, batch, normalizer=None):
    leaf = logprobs.clone().requires_grad_()
    output = evaluate(config, leaf, batch, normalizer)
    output.loss.backward()
    return output, leaf.grad


def rows(batch, chosen):
    """The tokens of some samples, as a batch of their own."""
    keep = torch.isin(batch.sample_index, torch.tensor(chosen))
    return keep, TokenBatch(
        torch.searchsorted(torch.tensor(chosen), batch.sample_index[keep]),
        batch.mask[keep],
        batch.behavior_logprobs[keep],
        batch.old_logprobs[keep],
        batch.advantages[keep],
        len(chosen),
        version_lag=None if batch.version_lag is None else batch.version_lag[keep],
    )


# What each preset's table row says, restated: unit, bounds, token factor, denominator.
TABLE = {
    "ppo": ("token", 0.8, 1.2, "1", "tokens"),
    "grpo": ("token", 0.8, 1.2, "1/T", "samples"),
    "dr_grpo": ("token", 0.8, 1.2, "1", "samples*max"),
    "dapo": ("token", 0.8, 1.28, "1", "tokens"),
    "gspo": ("sequence", 1 - 3e-4, 1 + 4e-4, "1/T", "samples"),
    "cispo": ("cispo", 0.0, 5.0, "1", "tokens"),
    "rloo": ("token", 0.8, 1.2, "1", "tokens"),
    "reinforce_pp": ("token", 0.8, 1.2, "1", "tokens"),
}


def gradient_by_hand(name, logprobs, batch):
    """Closed forms, token by token: -a w dS/dc / Z, with w = min(exp(p - b), 2)."""
    unit, low, high, factor, denominator = TABLE[name]
    index, mask = batch.sample_index.tolist(), batch.mask.tolist()
    lengths = [sum(m for i, m in zip(index, mask, strict=True) if i == s) for s in range(5)]
    movement = (logprobs - batch.old_logprobs).tolist()
    total = (logprobs - batch.behavior_logprobs).tolist()
    mismatch = (batch.old_logprobs - batch.behavior_logprobs).tolist()
    z = {"samples": 5, "tokens": sum(lengths), "samples*max": 5 * MAX_TOKENS}[denominator]
    gradient = []
    for t, sample in enumerate(index):
        if not mask[t]:
            gradient.append(0.0)
            continue
        advantage = batch.advantages[t].item()
        a = 1 / lengths[sample] if factor == "1/T" else 1.0
        weight = min(math.exp(mismatch[t]), 2.0)
        if unit == "cispo":
            slope, weight = min(max(math.exp(total[t]), low), high) * advantage, 1.0
        else:
            members = [movement[u] for u, i in enumerate(index) if i == sample and mask[u]]
            mean = math.exp(sum(members) / lengths[sample])
            ratio = mean if unit == "sequence" else math.exp(movement[t])
            flat = ratio > high if advantage > 0 else ratio < low
            slope = 0.0 if flat else ratio * advantage
        gradient.append(-a * weight * slope / z)
    return torch.tensor(gradient, dtype=torch.float64)


@pytest.mark.parametrize("name", PRESETS)
def test_gradient_equals_the_closed_form(name):
    flat = 0
    for seed in range(4):
        logprobs, batch = random_batch(spread=3e-3 if name == "gspo" else 0.3, seed=seed)
        _, gradient = loss_and_gradient(config_of(name), logprobs, batch)
        expected = gradient_by_hand(name, logprobs, batch)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)
        flat += int((expected[batch.mask] == 0).sum())
    assert flat == 0 if name == "cispo" else flat > 3


def hand_batch():
    """Ratios 1.1 and 1.5 in a sample with A = 1, ratio 0.5 in one with A = -1; p = b = -1."""
    anchor = torch.full((3,), -1.0, dtype=torch.float64)
    logprobs = anchor + torch.tensor([1.1, 1.5, 0.5], dtype=torch.float64).log()
    advantages = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    everything = torch.ones(3, dtype=torch.bool)
    return logprobs, TokenBatch(torch.tensor([0, 0, 1]), everything, anchor, anchor, advantages, 2)


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("grpo", -((1.1 + 1.2) / 2 - 0.8) / 2),
        ("dr_grpo", -(1.1 + 1.2 - 0.8) / (2 * MAX_TOKENS)),
        ("dapo", -(1.1 + 1.28 - 0.8) / 3),
        ("ppo", -(1.1 + 1.2 - 0.8) / 3),
        ("gspo", -(1.0004 - 0.9997) / 2),
        ("rloo", -(1.1 + 1.2 - 0.8) / 3),
        ("reinforce_pp", -(1.1 + 1.2 - 0.8) / 3),
        (
            "cispo",
            -(1.1 * (math.log(1.1) - 1) + 1.5 * (math.log(1.5) - 1) - 0.5 * (math.log(0.5) - 1))
            / 3,
        ),
    ],
)
def test_golden_losses(name, loss):
    logprobs, batch = hand_batch()
    assert evaluate(config_of(name), logprobs, batch).loss.item() == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize(
    "overrides",
    [
        {"clip": {"kind": "none"}},
        {"clip": {"dual": 1.5}},
        {"ratio": {"unit": "sequence_pure"}, "correction": {"weight": "geometric"}},
        {"aggregation": {"kind": "sequence_sum"}, "correction": {"weight": "product"}},
    ],
)
def test_gradient_equals_finite_differences(overrides):
    logprobs, batch = random_batch()
    config = preset("grpo", overrides)
    assert torch.autograd.gradcheck(
        lambda current: evaluate(config, current, batch).loss, logprobs.requires_grad_()
    )


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
@pytest.mark.parametrize("name", PRESETS)
def test_on_policy_every_preset_is_reinforce_with_baseline(name, kind):
    _, batch = random_batch()
    batch = replace(batch, behavior_logprobs=batch.old_logprobs)
    config = config_of(name, aggregation={"kind": kind, "max_tokens": MAX_TOKENS})
    output, gradient = loss_and_gradient(config, batch.old_logprobs, batch)

    lengths = torch.bincount(batch.sample_index[batch.mask]).double()
    a = 1 / lengths[batch.sample_index] if kind == "sequence_mean" else 1.0
    z = {"token_mean": lengths.sum(), "constant": 5 * MAX_TOKENS}.get(kind, 5)
    expected = torch.where(batch.mask, -a * batch.advantages / z, 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)

    metrics = output.metrics.finalise()
    for share in ("clip_low_share", "clip_high_share", "cap_share", "stale_share"):
        assert metrics[share] == 0.0
    for part in ("movement", "mismatch"):
        assert metrics[f"{part}_k1"] == metrics[f"{part}_k3"] == metrics[f"{part}_abs_max"] == 0.0
        assert metrics[f"{part}_ess"] == 1.0


ICEPOP_GSPO = {"preset": "gspo", "overrides": {"correction": "icepop"}}
VARIANTS = [
    *({"preset": name, "overrides": {}} for name in PRESETS),
    ICEPOP_GSPO,
    {"preset": "grpo", "overrides": {"correction": {"weight": "product", "veto": 0.3}}},
    {"preset": "dapo", "overrides": {"correction": "icepop", "max_staleness": 1}},
    {"preset": "gspo", "overrides": {"correction": "icepop", "max_staleness": 1}},
]


def variant_config(variant):
    return config_of(variant["preset"], **variant["overrides"])


def with_lag(batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lag = torch.randint(0, 3, batch.mask.shape, generator=generator)
    return replace(batch, version_lag=torch.where(batch.sample_index == 3, 0, lag))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_micro_batch_split_does_not_matter(variant):
    config = variant_config(variant)
    logprobs, batch = random_batch()
    batch = with_lag(batch)
    whole, gradient = loss_and_gradient(config, logprobs, batch)

    split, loss, metrics = torch.zeros_like(logprobs), 0.0, Metrics.zeros()
    for chosen in ([0, 3], [1], [2, 4]):
        keep, part = rows(batch, chosen)
        output, part_gradient = loss_and_gradient(config, logprobs[keep], part, count_batch(batch))
        split[keep] = part_gradient
        loss += output.loss.item()
        metrics = metrics + output.metrics
    torch.testing.assert_close(split, gradient, rtol=1e-12, atol=1e-15)
    assert loss == pytest.approx(whole.loss.item(), rel=1e-12)
    assert metrics.finalise() == pytest.approx(whole.metrics.finalise(), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_token_and_sample_order_do_not_matter(variant):
    config = variant_config(variant)
    logprobs, batch = random_batch()
    batch = with_lag(batch)
    whole, gradient = loss_and_gradient(config, logprobs, batch)
    order = torch.randperm(len(logprobs), generator=torch.Generator().manual_seed(1))
    renamed = torch.tensor([3, 0, 4, 2, 1])
    moved = TokenBatch(
        renamed[batch.sample_index[order]],
        batch.mask[order],
        batch.behavior_logprobs[order],
        batch.old_logprobs[order],
        batch.advantages[order],
        5,
        version_lag=batch.version_lag[order],
    )
    output, moved_gradient = loss_and_gradient(config, logprobs[order], moved)
    torch.testing.assert_close(moved_gradient, gradient[order], rtol=1e-12, atol=1e-15)
    assert output.loss.item() == pytest.approx(whole.loss.item(), rel=1e-12)
    assert torch.equal(output.fates, whole.fates[order])


@pytest.mark.parametrize("filler", [NAN, INF, -INF, 1e300, 0.0])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_values_outside_the_data_mask_do_not_matter(variant, filler):
    config = variant_config(variant)
    logprobs, batch = random_batch()
    batch = replace(batch, version_lag=torch.zeros_like(batch.sample_index))
    whole, gradient = loss_and_gradient(config, logprobs, batch)

    def spoilt(values):
        return torch.where(batch.mask, values, filler)

    padded = replace(
        batch,
        behavior_logprobs=spoilt(batch.behavior_logprobs),
        old_logprobs=spoilt(batch.old_logprobs),
        advantages=spoilt(batch.advantages),
    )
    output, padded_gradient = loss_and_gradient(config, spoilt(logprobs), padded)
    assert torch.equal(padded_gradient, gradient)
    assert output.loss.item() == whole.loss.item()
    assert output.metrics.finalise() == whole.metrics.finalise()


@pytest.mark.parametrize("name", PRESETS)
def test_zero_advantages_give_exactly_zero_even_where_the_ratio_overflows(name):
    logprobs, batch = random_batch()
    batch = replace(
        batch,
        advantages=torch.zeros_like(logprobs),
        old_logprobs=torch.full_like(logprobs, -1e4),
        behavior_logprobs=torch.full_like(logprobs, -1e4),
    )
    output, gradient = loss_and_gradient(config_of(name), logprobs, batch)
    assert output.loss.item() == 0.0
    assert not gradient.any()


def test_a_clipped_ratio_that_overflows_leaves_a_clean_gradient():
    logprobs, batch = hand_batch()
    batch = replace(batch, old_logprobs=batch.old_logprobs - torch.tensor([0.0, 1e4, 0.0]))
    batch = replace(batch, behavior_logprobs=batch.old_logprobs)
    output, gradient = loss_and_gradient(preset("dapo"), logprobs, batch)
    assert output.loss.item() == pytest.approx(-(1.1 + 1.28 - 0.8) / 3)
    assert gradient.tolist() == pytest.approx([-1.1 / 3, 0.0, 0.0])


def test_a_non_finite_log_probability_inside_the_mask_is_not_hidden():
    logprobs, batch = random_batch()
    logprobs[0] = NAN
    assert math.isnan(evaluate(preset("grpo"), logprobs, batch).loss.item())


@pytest.mark.parametrize("name", PRESETS)
def test_a_batch_without_a_token_has_loss_and_gradient_zero(name):
    logprobs, batch = random_batch()
    batch = replace(batch, mask=torch.zeros_like(batch.mask))
    output, gradient = loss_and_gradient(config_of(name), logprobs, batch)
    assert output.loss.item() == 0.0
    assert not gradient.any()
    assert output.metrics.finalise()["trained_tokens"] == 0


@pytest.mark.parametrize("name", PRESETS)
def test_an_empty_micro_batch_adds_nothing(name):
    empty = torch.zeros(0, dtype=torch.float64)
    index, mask = torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.bool)
    batch = TokenBatch(index, mask, empty, empty, empty, 0, version_lag=index)
    normalizer = Normalizer(tokens=100, samples=10)
    output, gradient = loss_and_gradient(config_of(name), empty, batch, normalizer)
    assert output.loss.item() == 0.0
    assert gradient.shape == (0,)
    assert not output.metrics.sums.any()


def test_the_normalizer_may_be_numbers_or_tensors():
    logprobs, batch = random_batch()
    config = preset("dapo")
    tokens = 3 * int(batch.mask.sum())
    third = evaluate(config, logprobs, batch).loss / 3
    for count in (Normalizer(tokens, 1), Normalizer(torch.tensor(tokens), torch.tensor(1))):
        torch.testing.assert_close(evaluate(config, logprobs, batch, count).loss, third)


def test_samples_without_a_data_token_do_not_count():
    logprobs, batch = random_batch()
    keep, part = rows(batch, [0, 1, 2, 4])
    masked = replace(batch, mask=batch.mask & (batch.sample_index != 3))
    for name in PRESETS:
        expected = evaluate(config_of(name), logprobs[keep], part).loss
        torch.testing.assert_close(evaluate(config_of(name), logprobs, masked).loss, expected)


@pytest.mark.parametrize(
    ("aggregation", "factor"),
    [("token_mean", "1/tokens"), ("sequence_mean", "1/(T samples)"), ("constant", "1/(max)")],
)
def test_entropy_bonus_has_the_same_normalisation(aggregation, factor):
    logprobs, batch = random_batch()
    entropy = torch.where(batch.mask, 1.5, NAN).double().requires_grad_()
    overrides = {"aggregation": {"kind": aggregation, "max_tokens": MAX_TOKENS}}
    plain = evaluate(preset("grpo", overrides), logprobs, batch)
    config = preset("grpo", overrides | {"entropy_bonus": 0.01})
    output = evaluate(config, logprobs, replace(batch, entropy=entropy))
    output.loss.backward()

    lengths = torch.bincount(batch.sample_index[batch.mask]).double()
    share = {
        "1/tokens": 1 / lengths.sum().expand(len(logprobs)),
        "1/(T samples)": 1 / (5 * lengths[batch.sample_index]),
        "1/(max)": torch.full_like(logprobs, 1 / (5 * MAX_TOKENS)),
    }[factor]
    expected = torch.where(batch.mask, -0.01 * share, 0.0)
    torch.testing.assert_close(entropy.grad, expected)
    bonus = (expected[batch.mask] * 1.5).sum()
    torch.testing.assert_close(output.loss.detach(), plain.loss + bonus)
    assert output.metrics.finalise()["entropy"] == pytest.approx(1.5)


def test_low_precision_log_probabilities_are_evaluated_in_float32():
    logprobs, batch = random_batch()
    batch = replace(batch, old_logprobs=logprobs.bfloat16())
    output, gradient = loss_and_gradient(preset("dapo"), logprobs.bfloat16(), batch)
    assert output.loss.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("overrides", "changes", "sentence"),
    [
        ({}, {"old_logprobs": None}, "old_logprobs are missing"),
        ({"entropy_bonus": 0.1}, {}, "entropy is missing"),
        ({"aggregation": {"kind": "constant"}}, {}, "needs max_tokens"),
        ({}, {"mask": torch.ones(19)}, "mask must be bool"),
        ({}, {"advantages": torch.ones(5)}, r"advantages has shape \(5,\)"),
    ],
)
def test_a_batch_that_lacks_something_is_refused(overrides, changes, sentence):
    logprobs, batch = random_batch()
    with pytest.raises(ValueError, match=sentence):
        evaluate(preset("grpo", overrides), logprobs, replace(batch, **changes))


def test_cispo_needs_no_old_log_probabilities():
    logprobs, batch = random_batch()
    expected, gradient = loss_and_gradient(preset("cispo"), logprobs, batch)
    without = replace(batch, old_logprobs=None)
    output, without_gradient = loss_and_gradient(preset("cispo"), logprobs, without)
    assert torch.equal(without_gradient, gradient)
    assert output.loss.item() == expected.loss.item()
    assert "movement_k1" in expected.metrics.finalise()
    assert "movement_k1" not in output.metrics.finalise()
    assert set(output.fates.tolist()) == {TokenFate.OUTSIDE, TokenFate.TRAINED}
