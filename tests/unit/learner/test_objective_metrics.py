"""Reported numbers against their definitions, and the seeds of attribution: which part is off."""

import math

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
