"""The compiled loops against the definition in torch, over whatever a config and a batch may be."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from learner import fused, fused_types
from learner.objective import (
    TokenBatch,
    TokenFate,
    count_batch,
    evaluate,
    fate_counts,
    preset,
)
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


def usable(config, batch):
    """The config, without a staleness bound where the batch has no lags."""
    return (
        config
        if batch.version_lag is not None
        else config.model_copy(update={"max_staleness": None})
    )


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
    stray = draw(st.sampled_from([None, -1, len(lengths), 99]))
    if stray is not None:
        spoilt["sample_index"] = torch.where(mask, index, stray)
    if draw(st.booleans()):
        reference = old + 0.1 * torch.randn(size, generator=generator)
        spoilt["reference_logprobs"] = torch.where(mask, reference, filler)
    return torch.where(mask, current, filler), replace(batch, **spoilt)


def without_kl_in_loss(config):
    return config.model_copy(update={"kl": config.kl.model_copy(update={"coefficient": 0.0})})


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
    config = without_kl_in_loss(usable(config, batch))
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
        overrides["kl"] = {"coefficient": 0.1}
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


@pytest.mark.parametrize("kl", [{"coefficient": 0.0}, {"coefficient": 0.1, "place": "reward"}])
def test_a_reference_that_is_only_reported_is_no_reason_for_torch(kl):
    logprobs, batch = long_batch(3_000)
    batch = replace(batch, reference_logprobs=batch.old_logprobs - 0.3)
    config = preset("grpo", {"max_staleness": 3, "kl": kl})
    assert fused.contiguous_samples(config, logprobs, batch) is not None
    (output, gradient), (expected, expected_gradient) = both(config, logprobs, batch)
    close(gradient, expected_gradient, rtol=1e-6, atol=1e-12)
    got, wanted = (one.metrics.finalise() for one in (output, expected))
    assert got["kl"] == pytest.approx(wanted["kl"], rel=1e-5)
    assert got.keys() == wanted.keys()


def four(current, old, behavior, advantage):
    """Four samples of one token each, all alike: log-probabilities and batch."""
    index = torch.arange(4)
    columns = [torch.full((4,), float(value)) for value in (behavior, old, advantage)]
    return torch.full((4,), float(current)), TokenBatch(index, index >= 0, *columns, 4)


def test_an_infinite_weight_of_a_zero_advantage_leaves_exactly_nothing():
    index = torch.arange(8).repeat_interleave(1800)
    old = torch.full((len(index),), -1.0)
    batch = TokenBatch(index, index >= 0, old - 0.05, old, torch.zeros(len(index)), 8)
    config = preset("grpo", {"correction": {"weight": "product", "cap": None}})
    for output, gradient in both(config, old, batch):
        assert output.loss.item() == 0.0
        assert torch.equal(gradient, torch.zeros_like(gradient))
        assert output.metrics.total("mass").item() == 0.0


@pytest.mark.parametrize(("clip", "advantage"), [("ppo", -1.0), ("none", 1.0), ("none", -1.0)])
def test_a_weight_that_underflows_and_a_ratio_that_overflows_have_a_product(clip, advantage):
    logprobs, batch = four(-0.5, -1e4, 0.0, advantage)
    config = preset("grpo", {"clip": {"kind": clip}})
    for output, gradient in both(config, logprobs, batch):
        product = advantage * torch.tensor(-0.5).exp()
        close(output.loss, -product, rtol=1e-6, atol=0)
        close(gradient, (-product / 4).expand(4), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("clip", "ratio", "advantage", "value"),
    [
        ({}, 50.0, 1.0, 1.2),
        ({}, 0.02, -1.0, -0.8),
        ({"dual": 3.0}, 50.0, -1.0, -3.0),
        ({"kind": "cispo", "low": 0.5, "high": 5.0}, 50.0, 1.0, 5.0),
    ],
)
def test_a_flat_token_has_the_value_of_the_bound_itself(clip, ratio, advantage, value):
    logprobs, batch = four(torch.tensor(ratio).log() - 9, -9, -9, advantage)
    for output, gradient in both(preset("grpo", {"clip": clip}), logprobs, batch):
        found = -4 * gradient if "kind" in clip else -output.loss.expand(4)
        close(found, torch.full((4,), value), rtol=2e-7, atol=0)


@pytest.mark.parametrize("name", ["current", "old_logprobs", "behavior_logprobs"])
def test_a_nan_inside_the_mask_reaches_the_same_maxima_and_names(name):
    logprobs, batch = long_batch(3_000)
    place = batch.mask.nonzero()[5]
    if name == "current":
        logprobs[place] = NAN
    else:
        values = getattr(batch, name).clone()
        values[place] = NAN
        batch = replace(batch, **{name: values})
    config = preset("grpo", {"max_staleness": 9})
    (output, _), (expected, _) = both(config, logprobs, batch)
    close(output.metrics.maxima, expected.metrics.maxima, rtol=0, atol=0)
    got, wanted = (one.metrics.finalise() for one in (output, expected))
    assert got.keys() == wanted.keys()
    part = "mismatch" if name == "behavior_logprobs" else "movement"
    for metrics in (got, wanted):
        assert torch.tensor(metrics[f"{part}_abs_max"]).isnan()


@pytest.mark.parametrize("constant", [-0.7, -0.3, -1.1, -2.3])
def test_a_spread_that_is_only_rounding_has_no_correlation_on_either_way(constant):
    logprobs, batch = long_batch(3_000)
    batch = replace(batch, old_logprobs=torch.full_like(logprobs, constant))
    for output, _ in both(preset("grpo"), logprobs, batch):
        assert "mismatch_old_slope" not in output.metrics.finalise()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("stray", [-1, 9, 99])
def test_masked_tokens_may_name_any_sample_and_others_only_one_that_exists(compiled, stray):
    logprobs, batch = long_batch(3_000)
    index, places = batch.sample_index.clone(), (~batch.mask).nonzero().flatten()
    index[places] = stray if stray != 9 else batch.num_samples
    config = preset("gspo", {"max_staleness": 3})
    moved = replace(batch, sample_index=index)
    outputs = [evaluate(config, logprobs, one, compiled=compiled) for one in (batch, moved)]
    assert torch.equal(outputs[0].loss, outputs[1].loss)
    assert torch.equal(outputs[0].fates, outputs[1].fates)
    close(outputs[0].metrics.sums, outputs[1].metrics.sums, rtol=1e-6, atol=1e-9)
    assert count_batch(moved).samples == count_batch(batch).samples
    counts = [fate_counts(outputs[0].fates, one.sample_index, 10)[:, 1:] for one in (batch, moved)]
    assert torch.equal(*counts)
    index[batch.mask.nonzero()[7]] = stray if stray != 9 else batch.num_samples
    sentence = r"sample_index of token \d+ is -?\d+, expected one of \[0, 10\)"
    with pytest.raises(ValueError, match=sentence):
        evaluate(config, logprobs, moved, compiled=compiled)


def test_a_batch_that_is_all_masked_may_have_no_samples():
    logprobs, batch = four(-1, -1, -1, 1)
    batch = replace(batch, mask=batch.mask & False, sample_index=-batch.sample_index, num_samples=0)
    for output, gradient in both(preset("grpo"), logprobs, batch):
        assert output.loss.item() == 0.0
        assert torch.equal(gradient, torch.zeros(4))


@pytest.mark.parametrize("name", ["sample_index", "version_lag", "position"])
def test_a_field_of_whole_numbers_in_floating_point_is_refused(name):
    logprobs, batch = long_batch(3_000)
    batch = replace(batch, **{name: getattr(batch, name).float()})
    with pytest.raises(ValueError, match=rf"{name} is torch.float32, expected whole numbers"):
        evaluate(preset("grpo"), logprobs, batch)


def test_a_staleness_bound_without_lags_is_refused():
    logprobs, batch = long_batch(3_000)
    batch = replace(batch, version_lag=None)
    evaluate(preset("grpo"), logprobs, batch)
    with pytest.raises(ValueError, match="version_lag is missing, and max_staleness 2 needs it"):
        evaluate(preset("grpo", {"max_staleness": 2}), logprobs, batch)


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
