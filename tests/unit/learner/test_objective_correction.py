"""Engine-mismatch correction, staleness mask, and that neither changes a denominator."""

from dataclasses import replace

import pytest
import torch

from learner.objective import TokenBatch, TokenFate, evaluate, fate_counts, preset

RATIOS = [0.1, 0.5, 1.0, 2.0, 5.0, 10.0]
LENGTHS = [3, 1, 2]
INDEX = torch.tensor([0, 0, 0, 1, 2, 2])
ADVANTAGES = torch.tensor([1.0, 1.0, 1.0, -0.5, 2.0, 2.0], dtype=torch.float64)


def mismatched(ratios, index=INDEX, advantages=ADVANTAGES):
    """c = p, and p / b as given: only the correction acts."""
    old = torch.linspace(-0.3, -2.1, len(ratios), dtype=torch.float64)
    behavior = old - torch.tensor(ratios, dtype=torch.float64).log()
    everything = torch.ones(len(ratios), dtype=torch.bool)
    samples = int(index.max()) + 1
    return old, TokenBatch(index, everything, behavior, old, advantages, samples)


def gradient_of(config, logprobs, batch):
    leaf = logprobs.clone().requires_grad_()
    output = evaluate(config, leaf, batch)
    output.loss.backward()
    return leaf.grad, output


def token_weights(correction, ratios):
    """Weight that each of several one-token responses gets: -gradient x Z / A."""
    logprobs, batch = mismatched(
        ratios, torch.arange(len(ratios)), torch.ones(len(ratios), dtype=torch.float64)
    )
    gradient, output = gradient_of(preset("dapo", {"correction": correction}), logprobs, batch)
    return (-gradient * len(ratios)).tolist(), output.metrics.finalise()


def test_tis_caps_from_above_and_keeps_small_weights():
    weights, metrics = token_weights("tis", RATIOS)
    assert weights == pytest.approx([0.1, 0.5, 1.0, 2.0, 2.0, 2.0], rel=1e-12)
    assert metrics["cap_share"] == pytest.approx(2 / 6)
    assert metrics["trained_tokens"] == 6
    assert metrics["weight_mean"] == pytest.approx(7.6 / 6)


def test_icepop_zeroes_outside_its_inclusive_interval_and_caps_nothing():
    weights, metrics = token_weights("icepop", RATIOS)
    assert weights == pytest.approx([0.0, 0.5, 1.0, 2.0, 5.0, 0.0], rel=1e-12)
    assert (metrics["keep_low_share"], metrics["keep_high_share"]) == (1 / 6, 1 / 6)
    assert metrics["trained_tokens"] == 4
    assert metrics["cap_share"] == 0.0


def test_no_correction_leaves_every_weight_at_1():
    weights, metrics = token_weights("none", RATIOS)
    assert weights == pytest.approx([1.0] * 6, rel=1e-12)
    assert metrics["weight_mean"] == 1.0


def test_weight_and_keep_are_separate_choices():
    keep_only = {"weight": "none", "keep": [{"statistic": "token", "low": 0.5, "high": 5.0}]}
    assert token_weights(keep_only, RATIOS)[0] == pytest.approx([0, 1, 1, 1, 1, 0], rel=1e-12)
    both = {"weight": "token", "cap": 3.0, "keep": [{"statistic": "token", "high": 5.0}]}
    assert token_weights(both, RATIOS)[0] == pytest.approx([0.1, 0.5, 1, 2, 3, 0], rel=1e-12)


def test_product_and_geometric_weights_are_of_the_sample():
    ratios = [2.0, 3.0, 0.5, 0.25, 4.0, 9.0]
    logprobs, batch = mismatched(ratios)
    for weight, expected in (
        ("product", [3.0, 3.0, 3.0, 0.25, 36.0, 36.0]),
        ("geometric", [3 ** (1 / 3)] * 3 + [0.25] + [6.0, 6.0]),
    ):
        correction = {"weight": weight, "cap": None}
        gradient, _ = gradient_of(preset("dapo", {"correction": correction}), logprobs, batch)
        assert (-gradient * 6 / ADVANTAGES).tolist() == pytest.approx(expected, rel=1e-12)
    capped = preset("dapo", {"correction": {"weight": "product", "cap": 5.0}})
    gradient, output = gradient_of(capped, logprobs, batch)
    assert (-gradient * 6 / ADVANTAGES)[4:].tolist() == pytest.approx([5.0, 5.0])
    assert output.metrics.finalise()["cap_share"] == pytest.approx(2 / 6)


@pytest.mark.parametrize(
    ("interval", "kept"),
    [
        ({"statistic": "geometric", "low": 0.5, "high": 2.0}, [True, False, False]),
        ({"statistic": "product", "low": 0.25, "high": 3.0}, [True, True, False]),
        ({"statistic": "product", "low": 0.25, "high": 36.0}, [True, True, True]),
        ({"statistic": "product", "low": 0.3, "high": 2.9}, [False, False, False]),
    ],
)
def test_sample_intervals_reject_whole_samples(interval, kept):
    logprobs, batch = mismatched([2.0, 3.0, 0.5, 0.25, 4.0, 9.0])
    correction = {"weight": "none", "keep": [interval]}
    gradient, _ = gradient_of(preset("grpo", {"correction": correction}), logprobs, batch)
    assert (gradient != 0).tolist() == torch.tensor(kept)[INDEX].tolist()


def test_veto_drops_the_sample_of_one_impossible_token():
    logprobs, batch = mismatched([1.0, 1e-4, 1.0, 1e-3, 2.0, 2.0])
    config = preset("dapo", {"correction": {"weight": "none", "veto": 1e-3}})
    gradient, output = gradient_of(config, logprobs, batch)
    assert (gradient != 0).tolist() == [False, False, False, True, True, True]
    assert output.fates.tolist() == [TokenFate.VETO] * 3 + [TokenFate.TRAINED] * 3
    assert output.metrics.finalise()["masked_tokens/veto"] == 3


def test_statistics_are_over_the_data_mask():
    ratios = [2.0, 1e-9, 0.5, 1.0, 1.0, 1.0]
    logprobs, batch = mismatched(ratios)
    batch = replace(batch, mask=torch.tensor([True, False, True, True, True, True]))
    correction = {"weight": "product", "veto": 0.1}
    gradient, output = gradient_of(preset("dapo", {"correction": correction}), logprobs, batch)
    assert (-gradient * 5 / ADVANTAGES).tolist() == pytest.approx([1.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    assert output.metrics.finalise()["masked_tokens/veto"] == 0


def test_gspo_with_icepop_keeps_the_gradient_of_the_other_tokens():
    old = torch.full((4,), -1.0, dtype=torch.float64)
    ratios = torch.tensor([1.1, 20.0, 0.8, 1.0], dtype=torch.float64)
    drift = torch.tensor([2.0, 1.2, 0.4, 1.05], dtype=torch.float64)
    index = torch.tensor([0, 0, 0, 1])
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    batch = TokenBatch(index, index >= 0, old - ratios.log(), old, advantages, 2)
    config = preset("gspo", {"correction": "icepop", "clip": {"low": 0.3, "high": 0.3}})
    gradient, output = gradient_of(config, old + drift.log(), batch)
    # s and T come from all three tokens, the rejected one included
    s = (2.0 * 1.2 * 0.4) ** (1 / 3)
    expected = [-s * 1.1 / 3 / 2, 0.0, -s * 0.8 / 3 / 2, 1.05 / 2]
    assert gradient.tolist() == pytest.approx(expected, rel=1e-12)
    fates = [TokenFate.TRAINED, TokenFate.KEEP_HIGH, TokenFate.TRAINED, TokenFate.TRAINED]
    assert output.fates.tolist() == fates


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
@pytest.mark.parametrize(
    ("correction", "lag"),
    [
        ("icepop", [0] * 6),
        ({"weight": "none", "veto": 0.4}, [0] * 6),
        ("none", [3, 0, 0, 0, 5, 0]),
        ("none", [9] * 3 + [0] * 3),
    ],
)
def test_policy_masks_never_change_a_denominator(correction, lag, aggregation):
    logprobs, batch = mismatched([1.0, 0.3, 1.0, 1.0, 1.0, 0.2])
    batch = replace(batch, version_lag=torch.tensor(lag))
    overrides = {"aggregation": {"kind": aggregation, "max_tokens": 7}, "max_staleness": 2}
    plain = preset("grpo", overrides | {"correction": "none", "max_staleness": 9})
    unmasked, _ = gradient_of(plain, logprobs, batch)
    config = preset("grpo", overrides | {"correction": correction})
    gradient, output = gradient_of(config, logprobs, batch)
    trained = output.fates == TokenFate.TRAINED
    assert 0 < trained.sum() < 6
    assert torch.equal(gradient[~trained], torch.zeros_like(gradient[~trained]))
    torch.testing.assert_close(gradient[trained], unmasked[trained], rtol=1e-12, atol=0)


def test_stale_tokens_do_not_train_and_their_old_logprobs_are_never_read():
    logprobs, batch = mismatched([1.0] * 6)
    lag = torch.tensor([0, 3, 2, 2, 3, 1])
    old = torch.where(lag > 2, float("nan"), batch.old_logprobs)
    batch = replace(batch, version_lag=lag, old_logprobs=old)
    gradient, output = gradient_of(preset("grpo", {"max_staleness": 2}), logprobs, batch)
    assert torch.isfinite(gradient).all()
    assert (gradient != 0).tolist() == [True, False, True, True, False, True]
    metrics = output.metrics.finalise()
    assert metrics["masked_tokens/stale"] == 2
    assert metrics["stale_share"] == pytest.approx(2 / 6)
    assert metrics["staleness_max"] == 2
    assert metrics["staleness_mean"] == pytest.approx((0 + 2 + 2 + 1) / 4)


@pytest.mark.parametrize(
    "overrides",
    [
        {"ratio": {"unit": "sequence"}},
        {"ratio": {"unit": "sequence_pure"}, "correction": "none"},
        {"correction": {"weight": "product"}},
        {"correction": {"keep": [{"statistic": "geometric", "low": 0.5}]}},
    ],
)
def test_one_stale_token_makes_its_sample_stale_where_anything_is_per_sequence(overrides):
    logprobs, batch = mismatched([1.0] * 6)
    lag = torch.tensor([0, 3, 0, 0, 0, 0])
    old = torch.where(lag > 2, float("nan"), batch.old_logprobs)
    batch = replace(batch, version_lag=lag, old_logprobs=old)
    config = preset("grpo", {"max_staleness": 2, **overrides})
    gradient, output = gradient_of(config, logprobs, batch)
    assert (gradient != 0).tolist() == [False, False, False, True, True, True]
    assert output.fates.tolist() == [TokenFate.STALE] * 3 + [TokenFate.TRAINED] * 3


def test_a_stale_tool_token_makes_nothing_stale():
    logprobs, batch = mismatched([1.0] * 6)
    mask = torch.tensor([True, False, True, True, True, True])
    batch = replace(batch, mask=mask, version_lag=torch.tensor([0, 9, 0, 0, 0, 0]))
    config = preset("gspo", {"max_staleness": 0})
    _, output = gradient_of(config, logprobs, batch)
    assert output.metrics.finalise()["trained_tokens"] == 5


def test_staleness_applies_to_a_behavior_anchor_too():
    logprobs, batch = mismatched([1.0] * 6)
    lag = torch.tensor([0, 1, 0, 0, 0, 0])
    batch = replace(batch, old_logprobs=None, version_lag=lag)
    gradient, _ = gradient_of(preset("cispo", {"max_staleness": 0}), logprobs, batch)
    assert (gradient != 0).tolist() == [True, False, True, True, True, True]


def test_without_a_bound_no_lag_is_too_old():
    logprobs, batch = mismatched([1.0] * 6)
    batch = replace(batch, version_lag=torch.full((6,), 1000))
    assert gradient_of(preset("grpo"), logprobs, batch)[1].metrics.finalise()["stale_share"] == 0.0


def test_the_first_reason_in_order_is_reported():
    logprobs, batch = mismatched([1e-3, 9.0, 0.1, 9.0, 0.1, 1.0])
    batch = replace(batch, version_lag=torch.tensor([0, 0, 5, 0, 0, 0]))
    keep = [{"statistic": "token", "low": 0.5, "high": 5.0}]
    correction = {"weight": "token", "cap": None, "keep": keep, "veto": 0.01}
    config = preset("grpo", {"correction": correction, "max_staleness": 2})
    _, output = gradient_of(config, logprobs, batch)
    assert output.fates.tolist() == [
        TokenFate.VETO,
        TokenFate.VETO,
        TokenFate.STALE,
        TokenFate.KEEP_HIGH,
        TokenFate.KEEP_LOW,
        TokenFate.TRAINED,
    ]
    counts = fate_counts(output.fates, INDEX, 3)
    assert counts[0].tolist() == [0, 0, 1, 2, 0, 0]
    assert counts[2].tolist() == [0, 1, 0, 0, 1, 0]
    assert counts.sum(1).tolist() == LENGTHS
    metrics = output.metrics.finalise()
    for fate in ("stale", "veto", "keep_low", "keep_high"):
        assert metrics[f"masked_tokens/{fate}"] == counts[:, TokenFate[fate.upper()]].sum()


def test_behavior_anchor_sees_the_whole_ratio_and_old_anchor_only_the_movement():
    old = torch.tensor([-1.0], dtype=torch.float64)
    batch = TokenBatch(
        torch.tensor([0]),
        torch.tensor([True]),
        old - torch.tensor(1.5).double().log(),
        old,
        torch.tensor([1.0], dtype=torch.float64),
        1,
    )
    logprobs = old + torch.tensor(1.1).double().log()
    no_clip = {"clip": {"kind": "none"}, "correction": "none"}
    anchored = {
        anchor: evaluate(preset("grpo", no_clip | {"ratio": {"anchor": anchor}}), logprobs, batch)
        for anchor in ("old", "step_start", "behavior")
    }
    losses = {anchor: output.loss.item() for anchor, output in anchored.items()}
    assert losses == pytest.approx({"old": -1.1, "step_start": -1.1, "behavior": -1.65})
