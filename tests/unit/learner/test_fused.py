"""The compiled loops against the definition in torch, over whatever a config and a batch may be."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from learner import fused, fused_types
from learner.objective import TokenBatch, TokenFate, evaluate, preset
from learner.objective_metrics import SUM_STARTS, SUMS
from learner.presets import PRESETS
from learner.token_batch import TOKEN_FIELDS

NAN, INF = float("nan"), float("inf")
STATISTICS = ("token", "product", "geometric")
COUNTED = ("tokens", "samples", "fates", "histogram", "position_", "length_", "lag")


@st.composite
def configs(draw):
    statistic = st.sampled_from(STATISTICS)
    interval = st.fixed_dictionaries(
        {
            "statistic": statistic,
            "low": st.sampled_from([0.0, 0.5, 0.9]),
            "high": st.sampled_from([None, 1.1, 2.0]),
        }
    )
    correction = {
        "weight": draw(st.sampled_from(["none", *STATISTICS])),
        "cap": draw(st.sampled_from([None, 1.0, 2.0])),
        "keep": draw(st.lists(interval, max_size=2)),
        "veto": draw(st.sampled_from([None, 0.5])),
    }
    name = draw(st.sampled_from(sorted(PRESETS)))
    overrides = {"max_staleness": draw(st.sampled_from([None, 0, 2]))}
    overrides["aggregation"] = {"max_tokens": 10}
    if draw(st.booleans()):
        kinds = ["token_mean", "sequence_mean", "sequence_sum", "constant"]
        overrides["aggregation"]["kind"] = draw(st.sampled_from(kinds))
    if draw(st.booleans()):
        overrides["ratio"] = {
            "unit": draw(st.sampled_from(["token", "sequence", "sequence_pure"])),
            "anchor": draw(st.sampled_from(["old", "behavior"])),
        }
    choice = draw(st.sampled_from(["preset", "none", "tis", "icepop", "table"]))
    if choice != "preset":
        overrides["correction"] = correction if choice == "table" else choice
    clip = draw(st.sampled_from(["preset", "none", "cispo", "dual"]))
    if clip != "preset":
        overrides["clip"] = {
            "none": {"kind": "none"},
            "cispo": {"kind": "cispo", "low": 0.9, "high": 1.2},
            "dual": {"kind": "ppo", "low": 0.1, "high": 0.2, "dual": 1.5},
        }[clip]
    try:
        return preset(name, overrides)
    except ValueError:  # a combination that is refused
        return preset(name, {"aggregation": {"max_tokens": 10}})


@st.composite
def batches(draw):
    """Current log-probabilities and a batch in float32, with empty samples, lags, and anything
    where the masks are false."""
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=8))
    if draw(st.integers(0, 3)) == 0:
        lengths.append(draw(st.sampled_from([512, 1300])))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    size = len(index)
    spread = draw(st.sampled_from([0.0, 1e-4, 0.1, 1.0]))
    old = -3 * torch.rand(size, generator=generator) - 0.1
    current = old + spread * torch.randn(size, generator=generator)
    behavior = old - spread * torch.randn(size, generator=generator)
    mask = torch.rand(size, generator=generator) > draw(st.sampled_from([0.0, 0.2, 1.0]))
    advantages = torch.randn(len(lengths), generator=generator)
    advantages[:: draw(st.integers(1, 4))] *= draw(st.sampled_from([0.0, 1.0]))
    batch = TokenBatch(index, mask, behavior, old, advantages[index], len(lengths))
    if draw(st.booleans()):
        most = draw(st.sampled_from([2, 4, 12]))
        lag = torch.randint(0, most, (len(lengths),), generator=generator)[index]
        wander = torch.randint(0, 2, (size,), generator=generator)
        batch = replace(batch, version_lag=lag + wander * draw(st.integers(0, 1)))
    if draw(st.booleans()):
        batch = replace(
            batch,
            crossed=torch.rand(size, generator=generator) > 0.7,
            position=torch.arange(size),
            entropy=torch.rand(size, generator=generator),
        )
    filler = draw(st.sampled_from([0.0, NAN, INF, -INF, 1e30]))
    spoilt = {
        name: torch.where(mask, getattr(batch, name), filler)
        for name in ("behavior_logprobs", "old_logprobs", "advantages")
    }
    return torch.where(mask, current, filler), replace(batch, **spoilt)


def both(config, logprobs, batch):
    """(output, gradient) compiled, and as torch defines it."""
    results = []
    for compiled in (True, False):
        leaf = logprobs.clone().requires_grad_()
        output = evaluate(config, leaf, batch, compiled=compiled)
        output.loss.backward()
        results.append((output, leaf.grad))
    return results


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(configs(), batches(), st.booleans())
def test_loops_and_torch_agree(config, given_batch, without_old):
    logprobs, batch = given_batch
    if without_old and not config.needs_old:
        batch = replace(batch, old_logprobs=None)
    with torch.no_grad():
        applies = fused.contiguous_samples(config, logprobs, batch) is not None
    assert applies == bool(len(logprobs))
    (output, gradient), (expected, expected_gradient) = both(config, logprobs, batch)
    assert torch.equal(output.fates, expected.fates)
    current = logprobs
    largest = expected_gradient.nan_to_num(0, 0, 0).abs().sum().item() / max(len(logprobs), 1)
    # The pure sequence form sums the slopes of a sample in float32, one after the other.
    rtol = 1e-5 if config.ratio.unit == "sequence_pure" else 1e-6
    close(gradient, expected_gradient, rtol=rtol, atol=rtol * largest)
    # A loss is a sum that may cancel: it is known as well as what is added up.
    steepest = 1 + current[batch.mask].abs().sum().item() / max(len(current), 1)
    added = expected_gradient.nan_to_num(0, 0, 0).abs().sum().item() * steepest
    close(output.loss, expected.loss, rtol=1e-5, atol=1e-5 * added)
    check_sums(output.metrics, expected.metrics)


def close(actual, expected, **tolerances):
    torch.testing.assert_close(actual, expected, equal_nan=True, **tolerances)


def check_sums(got, wanted):
    assert torch.equal(got.maxima, wanted.maxima)
    trained = wanted.total("trained_tokens").item()
    for name, start in SUM_STARTS.items():
        own, other = (metrics.sums[start : start + SUMS[name]] for metrics in (got, wanted))
        if any(word in name for word in COUNTED):
            assert torch.equal(own, other), name
            continue
        scale = other.nan_to_num(0, 0, 0).abs().sum().item()
        if name == "mass_removed":
            scale = wanted.total("mass").nan_to_num(0, 0, 0).item()
        elif name in ("covariance", "loss"):
            scale = 10 * trained
        assert torch.allclose(own, other, rtol=1e-5, atol=1e-6 * scale, equal_nan=True), name


def long_batch(tokens=100_000):
    """Several parts, and responses of 1 to 700 tokens."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, 700, (tokens // 300,), generator=generator)
    index = torch.arange(len(lengths)).repeat_interleave(lengths)
    size = len(index)
    old = -3 * torch.rand(size, generator=generator)
    noise = torch.randn(2, size, generator=generator)
    batch = TokenBatch(
        index,
        torch.rand(size, generator=generator) > 0.1,
        old - 0.2 * noise[0],
        old,
        torch.randn(len(lengths), generator=generator)[index],
        len(lengths),
        # Of some samples only a few tokens are too old.
        version_lag=torch.randint(0, 5, (len(lengths),), generator=generator)[index]
        + (torch.rand(size, generator=generator) > 0.99),
        crossed=torch.rand(size, generator=generator) > 0.9,
        position=torch.arange(size) % 700,
        entropy=torch.rand(size, generator=generator),
    )
    return old + 0.1 * noise[1], batch


@pytest.mark.parametrize("name", [*PRESETS, "icepop"])
def test_a_batch_of_several_parts_agrees_and_repeats_bitwise(name):
    overrides = {"aggregation": {"max_tokens": 100}, "max_staleness": 3}
    if name == "icepop":
        name, overrides = "dapo", overrides | {"correction": "icepop"}
    config = preset(name, overrides)
    logprobs, batch = long_batch()
    (output, gradient), (expected, expected_gradient) = both(config, logprobs, batch)
    close(gradient, expected_gradient, rtol=1e-6, atol=1e-12)
    close(output.loss, expected.loss, rtol=1e-4, atol=1e-7)
    check_sums(output.metrics, expected.metrics)
    (again, gradient_again), _ = both(config, logprobs, batch)
    assert torch.equal(gradient, gradient_again)
    assert torch.equal(output.loss, again.loss)
    assert torch.equal(output.fates, again.fates)
    assert torch.equal(output.metrics.sums, again.metrics.sums)


def test_without_diagnostics_the_value_and_the_counts_are_the_same():
    logprobs, batch = long_batch()
    config = preset("grpo", {"max_staleness": 3})
    gradients, outputs = [], []
    for diagnostics in (True, False):
        leaf = logprobs.clone().requires_grad_()
        outputs.append(evaluate(config, leaf, batch, diagnostics=diagnostics))
        outputs[-1].loss.backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    full, few = (output.metrics.finalise() for output in outputs)
    assert {name: full[name] for name in few} == few


def views(batch, order):
    """The batch with its tokens in `order`, every field a view of another stride."""
    changed = {}
    for name in TOKEN_FIELDS:
        if (values := getattr(batch, name)) is not None:
            changed[name] = torch.stack([values[order], values[order]], dim=1)[:, 0]
    return replace(batch, **changed)


def test_strides_and_other_types_do_not_matter():
    logprobs, batch = long_batch(3_000)
    config = preset("dapo", {"max_staleness": 3})
    everyone = torch.arange(len(logprobs))
    strided = replace(views(batch, everyone), advantages=batch.advantages.double())
    (output, gradient), _ = both(config, logprobs, batch)
    (other, other_gradient), _ = both(config, logprobs, strided)
    assert torch.equal(gradient, other_gradient)
    assert torch.equal(output.metrics.sums, other.metrics.sums)
    (low, low_gradient), (expected, expected_gradient) = both(config, logprobs.bfloat16(), batch)
    assert low_gradient.dtype == torch.bfloat16
    close(low.loss, expected.loss, rtol=1e-5, atol=1e-7)
    close(low_gradient, expected_gradient, rtol=1e-2, atol=1e-9)


@pytest.mark.parametrize(
    "change",
    ["shuffled", "float64", "reference", "entropy bonus", "covariance", "index beyond the samples"],
)
def test_what_the_loops_cannot_take_is_left_to_torch(change):
    logprobs, batch = long_batch(3_000)
    overrides = {"max_staleness": 3}
    if change == "shuffled":
        order = torch.randperm(len(logprobs), generator=torch.Generator().manual_seed(0))
        logprobs, batch = logprobs[order], views(batch, order)
    elif change == "float64":
        logprobs = logprobs.double()
    elif change == "reference":
        batch = replace(batch, reference_logprobs=batch.old_logprobs)
    elif change == "entropy bonus":
        overrides["entropy_bonus"] = 0.1
    elif change == "covariance":
        overrides["covariance"] = {"kind": "kl"}
    else:
        batch = replace(batch, num_samples=3)
    config = preset("dapo", overrides)
    assert fused.contiguous_samples(config, logprobs, batch) is None


@pytest.mark.parametrize("correction", ["tis", "none", {"keep": []}])
def test_a_non_finite_log_probability_inside_the_mask_is_not_hidden(correction):
    logprobs, batch = long_batch(3_000)
    logprobs[batch.mask.nonzero()[0]] = NAN
    config = preset("grpo", {"correction": correction})
    assert evaluate(config, logprobs, batch, compiled=True).loss.isnan()


def test_few_tokens_are_left_to_torch_without_importing_numba():
    code = (
        "import sys, torch; from learner.objective import TokenBatch, evaluate, preset\n"
        "one = torch.zeros(9); index = torch.arange(9)\n"
        "evaluate(preset('grpo'), one, TokenBatch(index, index >= 0, one, one, one, 9))\n"
        "assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_loops_know_the_codes_of_fates():
    for fate in TokenFate:
        assert getattr(fused_types, fate.name) == fate
