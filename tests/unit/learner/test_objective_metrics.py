"""Reported numbers against their definitions, and the seeds of attribution: which part is off."""

import math
from dataclasses import replace

import pytest
import torch

from learner.objective import TokenBatch, evaluate, preset
from learner.objective_metrics import MAXIMA, Metrics


def shifted(movement, mismatch, config=None):
    """One-token responses with the given c - p and p - b."""
    size = len(movement)
    old = torch.linspace(-0.5, -3.0, size, dtype=torch.float64)
    logprobs = old + torch.tensor(movement, dtype=torch.float64)
    behavior = old - torch.tensor(mismatch, dtype=torch.float64)
    index = torch.arange(size)
    batch = TokenBatch(index, index >= 0, behavior, old, torch.ones_like(old), size)
    return evaluate(config or preset("dapo"), logprobs, batch).metrics.finalise()


@pytest.mark.parametrize("part", ["movement", "mismatch"])
def test_divergences_and_effective_sample_size(part):
    differences = [0.5, -1.0, 0.0, 2.0, 0.25]
    nothing = [0.0] * 5
    shifts = (differences, nothing) if part == "movement" else (nothing, differences)
    metrics = shifted(*shifts)
    weights = [math.exp(d) for d in differences]
    expected = {
        f"{part}_abs_mean": 3.75 / 5,
        f"{part}_abs_max": 2.0,
        f"{part}_k1": -1.75 / 5,
        f"{part}_k3": sum(math.exp(d) - 1 - d for d in differences) / 5,
        f"{part}_ess": sum(weights) ** 2 / (5 * sum(w * w for w in weights)),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    other = "mismatch" if part == "movement" else "movement"
    assert metrics[f"{other}_abs_max"] == 0.0
    assert metrics[f"{other}_ess"] == 1.0


def test_mean_log_ratios_add_up():
    both = shifted([0.3, -0.2, 0.1], [0.5, 0.0, -0.4])
    total = -(0.3 - 0.2 + 0.1 + 0.5 - 0.4) / 3
    assert both["movement_k1"] + both["mismatch_k1"] == pytest.approx(total)


def test_the_effective_sample_size_is_unclamped():
    metrics = shifted([0.0] * 4, [math.log(100.0), 0.0, 0.0, 0.0])
    assert metrics["mismatch_ess"] == pytest.approx(103**2 / (4 * 10003))
    assert metrics["weight_mean"] == pytest.approx((2 + 3) / 4)


def test_an_overflowing_ratio_is_the_only_effective_sample():
    assert shifted([0.0] * 4, [500.0, 0.0, 0.0, 0.0])["mismatch_ess"] == pytest.approx(1 / 4)


def test_clip_shares_are_of_trained_tokens():
    config = preset("dapo", {"correction": "icepop"})
    movement = [math.log(2.0), 0.0, math.log(2.0), 0.0]
    metrics = shifted(movement, [0.0, 0.0, 3.0, 0.0], config)
    assert metrics["trained_tokens"] == 3
    assert metrics["clip_high_share"] == pytest.approx(1 / 3)
    assert metrics["keep_high_share"] == pytest.approx(1 / 4)


def test_zeros_are_neutral_and_report_only_counts():
    metrics = Metrics.zeros().finalise()
    assert set(metrics.values()) == {0.0}
    assert "movement_k1" not in metrics
    assert "entropy" not in metrics
    assert "staleness_mean" not in metrics
    summed = Metrics.zeros()
    summed.sums[:] = torch.arange(len(summed.sums))
    summed.maxima[:] = torch.arange(len(summed.maxima))
    total = summed + Metrics.zeros()
    assert torch.equal(total.sums, summed.sums)
    assert torch.equal(total.maxima, summed.maxima)


def test_maxima_do_not_add_up():
    one = Metrics.pack({}, {"lag": torch.tensor(2)}, torch.device("cpu"))
    two = Metrics.pack({}, {"lag": torch.tensor(5)}, torch.device("cpu"))
    assert (one + two).maxima[list(MAXIMA).index("lag")] == 5


def test_gradient_mass_is_removed_in_order():
    """One-token responses; the weight is p / b, capped at 2. By hand, row by row."""
    rows = [  # ratio c / p, weight p / b, advantage, lag; mass and who takes it
        (1.0, 1.0, 1.0, 9),  # 1, stale: no weight
        (1.0, 1e-3, 2.0, 0),  # 0.002, veto
        (1.0, 10.0, 1.0, 0),  # 10, keep
        (1.0, 4.0, -1.0, 0),  # 4, of which the cap takes 2
        (0.5, 1.0, -3.0, 0),  # 3, clip low
        (2.0, 4.0, 1.0, 0),  # 4, the cap 2 and the clip the other 2
        (5.0, 1.0, -1.0, 0),  # 1, dual
        (1.0, 1.0, 0.0, 0),  # nothing
        (1.0, 1.0, 2.0, 0),  # 2, trained
    ]
    drift, weight, advantages, lag = torch.tensor(rows, dtype=torch.float64).T
    old = torch.full((9,), -2.0, dtype=torch.float64)
    index = torch.arange(9)
    batch = TokenBatch(
        index, index >= 0, old - weight.log(), old, advantages, 9, version_lag=lag.long()
    )
    keep = [{"statistic": "token", "low": 1e-4, "high": 5.0}]
    overrides = {
        "correction": {"cap": 2.0, "keep": keep, "veto": 0.01},
        "clip": {"dual": 3.0},
        "max_staleness": 2,
    }
    metrics = evaluate(preset("dapo", overrides), old + drift.log(), batch).metrics.finalise()
    total = 1 + 0.002 + 10 + 4 + 3 + 4 + 1 + 2
    removed = {"stale": 1, "veto": 0.002, "keep": 10, "cap": 4, "clip_low": 3, "clip_high": 2}
    removed |= {"clip_dual": 1, "clip_cov": 0}
    shares = {f"mass_removed/{name}": mass / total for name, mass in removed.items()}
    assert {name: metrics[name] for name in shares} == pytest.approx(shares, rel=1e-12)
    assert metrics["zero_advantage_share"] == pytest.approx(1 / 9)
    assert metrics["cap_share"] == pytest.approx(2 / 6)


def spread_out(size=4000):
    """Tokens of several lags, some of which crossed an update, in responses of 40."""
    generator = torch.Generator().manual_seed(4)
    old, movement, mismatch, advantages = torch.randn(4, size, generator=generator).double()
    index = torch.arange(size) // 40
    lag = torch.randint(0, 13, (size,), generator=generator)
    batch = TokenBatch(
        index,
        torch.rand(size, generator=generator) > 0.1,
        old - 0.1 * mismatch,
        old,
        advantages,
        size // 40,
        version_lag=lag,
        crossed=torch.rand(size, generator=generator) > 0.8,
        position=torch.arange(size) % 40,
    )
    return old + 0.01 * lag * movement, batch


BUCKETS = {"0": (0, 0), "1": (1, 1), "2": (2, 2), "3-4": (3, 4), "5-8": (5, 8), "9+": (9, 99)}


@pytest.mark.parametrize("bucket", [*BUCKETS, "crossed"])
def test_each_token_is_told_of_by_its_lag_or_that_it_crossed_an_update(bucket):
    logprobs, batch = spread_out()
    config = preset("dapo", {"max_staleness": 100})
    metrics = evaluate(config, logprobs, batch).metrics.finalise()
    own = batch.mask & (batch.crossed if bucket == "crossed" else ~batch.crossed)
    if bucket != "crossed":
        low, high = BUCKETS[bucket]
        own &= (batch.version_lag >= low) & (batch.version_lag <= high)
    name = bucket if bucket == "crossed" else f"lag_{bucket}"
    for part, values in (
        ("movement", logprobs - batch.old_logprobs),
        ("mismatch", batch.old_logprobs - batch.behavior_logprobs),
    ):
        d = values[own]
        weights = d.exp()
        expected = {
            "k1": -d.mean(),
            "k3": (weights - 1 - d).mean(),
            "abs_max": d.abs().max(),
            "ess": weights.sum() ** 2 / (len(d) * weights.square().sum()),
        }
        got = {statistic: metrics[f"{part}_{statistic}/{name}"] for statistic in expected}
        exact = {statistic: value.item() for statistic, value in expected.items()}
        assert got == pytest.approx(exact, rel=1e-9, abs=1e-12)
        for quantile, share in (("p50", 0.5), ("p99", 0.99)):
            exactly = d.abs().quantile(share).item()
            assert metrics[f"{part}_{quantile}/{name}"] == pytest.approx(exactly, rel=0.13)
    capped = (batch.old_logprobs - batch.behavior_logprobs)[own] > math.log(2)
    assert metrics[f"cap_share/{name}"] == pytest.approx(capped.double().mean().item())
    assert metrics[f"tokens/{name}"] == own.sum()


def test_shares_by_origin_of_what_the_correction_rejects():
    logprobs, batch = spread_out()
    keep = [{"statistic": "token", "low": 0.9, "high": 1.1}]
    overrides = {"correction": {"weight": "token", "cap": None, "keep": keep}, "max_staleness": 8}
    metrics = evaluate(preset("dapo", overrides), logprobs, batch).metrics.finalise()
    assert metrics["stale_share/lag_9+"] == 1.0
    own = batch.mask & ~batch.crossed & (batch.version_lag == 2)
    ratio = (batch.old_logprobs - batch.behavior_logprobs).exp()[own]
    assert metrics["keep_low_share/lag_2"] == pytest.approx((ratio < 0.9).double().mean().item())
    assert metrics["keep_high_share/lag_2"] == pytest.approx((ratio > 1.1).double().mean().item())


def test_masked_share_by_position_and_length():
    logprobs, batch = spread_out()
    # Tool tokens everywhere but in the first 20 places of half the responses.
    short = (batch.sample_index % 2 == 0) & (batch.position >= 10)
    stale = batch.position < 16
    batch = replace(batch, mask=~short, version_lag=torch.where(stale, 5, 0))
    config = preset("dapo", {"max_staleness": 2})
    metrics = evaluate(config, logprobs, batch).metrics.finalise()
    assert metrics["masked_share/position_0-15"] == 1.0
    assert metrics["masked_share/position_16-63"] == 0.0
    assert metrics["masked_share/length_0-15"] == 1.0
    assert metrics["masked_share/length_16-63"] == pytest.approx(16 / 40)


def test_a_long_batch_in_parts_is_the_same_as_in_one():
    """Contiguous samples are taken in parts, shuffled tokens in one; both must say the same."""
    size = 300_000
    generator = torch.Generator().manual_seed(6)
    old, movement, mismatch, advantages = torch.randn(4, size, generator=generator).double()
    index = torch.arange(size) // 37
    mask = torch.rand(size, generator=generator) > 0.1
    lag = torch.randint(0, 4, (size,), generator=generator)
    entropy = torch.rand(size, generator=generator).double()
    samples = int(index[-1]) + 1

    def part(order):
        fields = (index, mask, old - 0.1 * mismatch, old, advantages)
        tokens = [values[order] for values in fields]
        batch = TokenBatch(*tokens, samples, version_lag=lag[order], entropy=entropy[order])
        leaf = (old + 0.1 * movement)[order].requires_grad_()
        overrides = {"max_staleness": 2, "entropy_bonus": 0.1, "correction": "icepop"}
        output = evaluate(preset("grpo", overrides), leaf, batch)
        output.loss.backward()
        return output, leaf.grad

    whole, gradient = part(torch.arange(size))
    order = torch.randperm(size, generator=generator)
    shuffled, shuffled_gradient = part(order)
    torch.testing.assert_close(shuffled_gradient, gradient[order], rtol=1e-10, atol=1e-16)
    assert torch.equal(shuffled.fates, whole.fates[order])
    expected = whole.metrics.finalise()
    assert shuffled.metrics.finalise() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_without_diagnostics_the_gradient_is_the_same_and_the_counts_are_there():
    logprobs, batch = spread_out()
    config = preset("dapo", {"max_staleness": 8})
    gradients, metrics = [], []
    for diagnostics in (True, False):
        leaf = logprobs.clone().requires_grad_()
        output = evaluate(config, leaf, batch, diagnostics=diagnostics)
        output.loss.backward()
        gradients.append(leaf.grad)
        metrics.append(output.metrics.finalise())
    assert torch.equal(*gradients)
    assert {name: metrics[0][name] for name in metrics[1]} == metrics[1]
    assert set(metrics[1]) == {"loss", "tokens", "samples", "trained_tokens"} | {
        f"masked_tokens/{reason}" for reason in ("stale", "veto", "keep_low", "keep_high")
    }
