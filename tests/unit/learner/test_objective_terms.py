"""KL, entropy and covariance terms: exact by enumeration at fixed prefixes, with the same Z."""

from dataclasses import replace

import pytest
import torch

from learner import kl
from learner.advantages import group_advantages
from learner.covariance import token_covariances
from learner.objective import Normalizer, TokenBatch, count_batch, evaluate, preset

NAN = float("nan")
SYMBOLS, LENGTH = 3, 2


def tables(count, seed=0):
    """Tabular policies over two symbols' prefixes: one row for (), one for each first symbol."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1 + SYMBOLS, SYMBOLS, generator=generator, dtype=torch.float64)


SAMPLE = torch.arange(SYMBOLS**LENGTH).repeat_interleave(LENGTH)
FIRST, SECOND = SAMPLE[::2] // SYMBOLS, SAMPLE[::2] % SYMBOLS
ROW = torch.stack([torch.zeros_like(FIRST), 1 + FIRST], 1).flatten()
SYMBOL = torch.stack([FIRST, SECOND], 1).flatten()


def of_tokens(table):
    return table.log_softmax(-1)[ROW, SYMBOL]


def chances(table):
    return of_tokens(table).view(-1, LENGTH).sum(1).exp()


def expected_gradient(config, policy, behavior, old, reference, advantages=None):
    """E over responses of the behavior policy of the loss's gradient by `policy`."""
    current = of_tokens(policy)
    leaf = current.detach().requires_grad_()
    zeros = torch.zeros_like(leaf).detach()
    batch = TokenBatch(
        SAMPLE,
        SAMPLE >= 0,
        of_tokens(behavior),
        of_tokens(old),
        zeros if advantages is None else advantages[SAMPLE],
        len(FIRST),
        reference_logprobs=of_tokens(reference),
    )
    evaluate(config, leaf, batch, Normalizer(1, 1)).loss.backward()
    return torch.autograd.grad(current, policy, leaf.grad * chances(behavior)[SAMPLE])[0]


def divergence_at_fixed_prefixes(policy, behavior, reference):
    """Σ over prefixes of b(prefix) KL(policy(.|prefix) || reference(.|prefix))."""
    own, other = policy.log_softmax(-1), reference.log_softmax(-1)
    per_row = (own.exp() * (own - other)).sum(-1)
    first = behavior.log_softmax(-1)[0].exp()
    return per_row[0] + (first.detach() * per_row[1:]).sum()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("anchor", ["old", "behavior"])
@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_the_kl_gradient_is_exact_at_fixed_prefixes(estimator, anchor, unit):
    policy, behavior, old, reference = tables(4)
    policy.requires_grad_()
    correction = {"weight": "token" if anchor == "old" else "none", "cap": None}
    overrides = {
        "kl": {"coefficient": 0.3, "estimator": estimator},
        "ratio": {"anchor": anchor, "unit": unit},
        "correction": correction,
        "aggregation": {"kind": "sequence_sum"},
    }
    got = expected_gradient(preset("dapo", overrides), policy, behavior, old, reference)
    divergence = divergence_at_fixed_prefixes(policy, behavior, reference)
    (expected,) = torch.autograd.grad(0.3 * divergence, policy)
    # Prefixes are met as often as the behavior policy meets them: only the token is corrected.
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-13)


def test_kl_in_the_reward_has_the_gradient_of_the_sequence_kl():
    policy, reference = tables(2, seed=1)
    policy.requires_grad_()
    penalties = kl.reward_penalties(
        of_tokens(policy), of_tokens(reference), torch.ones_like(SAMPLE, dtype=torch.bool), 0.3
    )
    returns = kl.penalty_per_sample(penalties, SAMPLE, len(FIRST))
    config = preset("dapo", {"clip": {"kind": "none"}, "aggregation": {"kind": "sequence_sum"}})
    fixed = policy.detach()
    got = expected_gradient(config, policy, fixed, fixed, reference, returns)
    own, other = of_tokens(policy), of_tokens(reference)
    log_ratios = (own - other).view(-1, LENGTH).sum(1)
    sequence_kl = (chances(policy) * log_ratios).sum()
    (expected,) = torch.autograd.grad(0.3 * sequence_kl, policy)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-13)
    # The term in the loss does not credit earlier tokens with what follows them.
    fixed_prefixes = divergence_at_fixed_prefixes(policy, fixed, reference)
    (other_gradient,) = torch.autograd.grad(0.3 * fixed_prefixes, policy)
    assert (got - other_gradient).abs().max() > 1e-3


def test_estimates_and_what_differentiating_them_would_give():
    logits, reference = tables(2, seed=2)[:, 0]
    logits.requires_grad_()
    own, other = logits.log_softmax(-1), reference.log_softmax(-1)
    weights = own.exp().detach()
    (exact,) = torch.autograd.grad((own.exp() * (own - other)).sum(), logits, retain_graph=True)
    (reverse,) = torch.autograd.grad((other.exp() * (other - own)).sum(), logits, retain_graph=True)
    true = (weights * (own - other)).sum()
    for kind, gradient in (("k1", 0 * exact), ("k2", exact), ("k3", reverse)):
        estimates = kl.estimate(kind, own - other)
        (naive,) = torch.autograd.grad((weights * estimates).sum(), logits, retain_graph=True)
        torch.testing.assert_close(naive, gradient, rtol=1e-10, atol=1e-13)
        if kind != "k2":
            torch.testing.assert_close((weights * estimates).sum(), true)


def small_batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    index = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2])
    mask = torch.tensor([1, 0, 1, 1, 1, 1, 1, 1]).bool()
    old, noise, far, drift = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)[index]
    old = old - 3
    batch = TokenBatch(
        index, mask, old - 0.1 * noise, old, advantages, 3, reference_logprobs=old + far
    )
    return old + 0.1 * drift, batch


def gradient_of(config, logprobs, batch, normalizer=None):
    leaf = logprobs.clone().requires_grad_()
    output = evaluate(config, leaf, batch, normalizer)
    output.loss.backward()
    return leaf.grad, output


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "constant"])
def test_kl_by_hand_with_the_same_normaliser(kind):
    logprobs, batch = small_batch()
    aggregation = {"aggregation": {"kind": kind, "max_tokens": 5}}
    plain, _ = gradient_of(preset("dapo", aggregation), logprobs, batch)
    terms = aggregation | {"kl": {"coefficient": 0.2}}
    got, output = gradient_of(preset("dapo", terms), logprobs, batch)
    ratio = (logprobs - batch.old_logprobs).exp()
    weight = (batch.old_logprobs - batch.behavior_logprobs).exp().clamp(max=2)
    distance = logprobs - batch.reference_logprobs
    share = {"token_mean": 1 / 7, "constant": 1 / 15}.get(kind)
    if share is None:
        share = 1 / (3 * torch.tensor([2.0, 1.0, 4.0]).double()[batch.sample_index])
    added = torch.where(batch.mask, 0.2 * ratio * weight * distance * share, 0.0)
    torch.testing.assert_close(got - plain, added, rtol=1e-10, atol=1e-14)
    reported = (torch.exp(-distance) - 1 + distance)[batch.mask].mean().item()
    assert output.metrics.finalise()["kl"] == pytest.approx(reported, rel=1e-12)


def test_kl_does_not_care_about_advantages_nor_about_padding():
    logprobs, batch = small_batch()
    config = preset("grpo", {"kl": {"coefficient": 0.2}})
    flat = replace(batch, advantages=torch.zeros_like(logprobs))
    gradient, _ = gradient_of(config, logprobs, flat)
    assert (gradient != 0).tolist() == batch.mask.tolist()
    spoilt = replace(flat, reference_logprobs=flat.reference_logprobs.masked_fill(~batch.mask, NAN))
    torch.testing.assert_close(gradient_of(config, logprobs, spoilt)[0], gradient)


def test_kl_is_zero_where_the_policy_is_the_reference():
    logprobs, batch = small_batch()
    same = replace(batch, reference_logprobs=logprobs, advantages=torch.zeros_like(logprobs))
    for estimator in ("k1", "k2", "k3"):
        config = preset("grpo", {"kl": {"coefficient": 1.0, "estimator": estimator}})
        gradient, output = gradient_of(config, logprobs, same)
        assert not gradient.any()
        assert output.metrics.finalise()["kl"] == 0.0


def test_a_missing_reference_is_refused_only_where_it_was_asked_for():
    logprobs, batch = small_batch()
    batch = replace(batch, reference_logprobs=None)
    with pytest.raises(ValueError, match="reference_logprobs are missing"):
        evaluate(preset("grpo", {"kl": {"coefficient": 0.1}}), logprobs, batch)
    assert "kl" not in evaluate(preset("grpo"), logprobs, batch).metrics.finalise()


@pytest.mark.parametrize(
    "overrides",
    [
        {"kl": {"coefficient": 0.2}},
        {"kl": {"coefficient": 0.2}, "correction": "icepop", "ratio": {"unit": "sequence"}},
        {"entropy_bonus": 0.1, "aggregation": {"kind": "token_mean"}},
    ],
    ids=str,
)
def test_terms_do_not_depend_on_the_split(overrides):
    logprobs, batch = small_batch()
    entropy = torch.linspace(0.1, 0.8, 8, dtype=torch.float64)
    config = preset("grpo", overrides)
    whole, output = gradient_of(config, logprobs, replace(batch, entropy=entropy))
    total, gradients = 0.0, []
    for low, high, first in ((0, 4, 0), (4, 8, 2)):
        part = TokenBatch(
            batch.sample_index[low:high] - first,
            batch.mask[low:high],
            batch.behavior_logprobs[low:high],
            batch.old_logprobs[low:high],
            batch.advantages[low:high],
            3 - first if first else 2,
            reference_logprobs=batch.reference_logprobs[low:high],
            entropy=entropy[low:high],
        )
        gradient, share = gradient_of(config, logprobs[low:high], part, count_batch(batch))
        gradients.append(gradient)
        total += share.loss.item()
    torch.testing.assert_close(torch.cat(gradients), whole, rtol=1e-12, atol=1e-15)
    assert total == pytest.approx(output.loss.item(), rel=1e-12)


def test_the_entropy_identity_and_its_diagnostic():
    """dH/dη of p exp(ηA) / Z at η = 0 is -Cov(log p, A) (Cui et al. 2025)."""
    probabilities = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    step = torch.zeros((), dtype=torch.float64, requires_grad=True)
    logprobs = (probabilities.log() + step * advantages).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum()
    (slope,) = torch.autograd.grad(entropy, step)
    # The sample holds every symbol as often as its probability says.
    symbols = torch.tensor([0, 0, 1, 2])
    own = probabilities.log()[symbols]
    index = torch.arange(4)
    batch = TokenBatch(index, index >= 0, own, own, advantages[symbols], 4)
    measured = evaluate(preset("dapo"), own, batch).metrics.finalise()["logprob_advantage_cov"]
    assert measured == pytest.approx(-slope.item(), rel=1e-12)
    per_token = token_covariances(own, advantages[symbols], index >= 0)
    assert per_token.mean().item() == pytest.approx(measured, rel=1e-12)


def covariance_batch(size=200):
    generator = torch.Generator().manual_seed(5)
    old, drift, advantages = torch.randn(3, size, generator=generator, dtype=torch.float64)
    index = torch.arange(size)
    old = 2 * old - 4
    return old + 0.05 * drift, TokenBatch(index, index >= 3, old, old, advantages, size)


def test_clip_cov_takes_the_gradient_of_a_share_of_the_tokens_in_its_interval():
    logprobs, batch = covariance_batch()
    plain, _ = gradient_of(preset("dapo"), logprobs, batch)
    choice = {"kind": "clip", "share": 0.05, "low": 0.5, "high": 5.0}
    got, output = gradient_of(preset("dapo", {"covariance": choice}), logprobs, batch)
    taken = got != plain
    assert taken.sum() == int(0.05 * 197)
    assert not got[taken].any()
    covariance = token_covariances(logprobs, batch.advantages, batch.mask)
    assert ((covariance[taken] >= 0.5) & (covariance[taken] <= 5.0)).all()
    metrics = output.metrics.finalise()
    assert metrics["clip_cov_share"] == pytest.approx(9 / 197)
    assert metrics["mass_removed/clip_cov"] > 0


def test_kl_cov_holds_the_largest_covariances_to_the_old_policy():
    logprobs, batch = covariance_batch()
    plain, _ = gradient_of(preset("dapo"), logprobs, batch)
    choice = {"kind": "kl", "share": 0.05, "coefficient": 2.0}
    got, _ = gradient_of(preset("dapo", {"covariance": choice}), logprobs, batch)
    covariance = token_covariances(logprobs, batch.advantages, batch.mask)
    chosen = torch.zeros_like(batch.mask)
    chosen[covariance.argsort()[-9:]] = True
    moved = logprobs - batch.old_logprobs
    added = torch.where(chosen, 2.0 * moved.exp() * moved / 197, 0.0)
    torch.testing.assert_close(got - plain, added, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("kind", ["clip", "kl"])
def test_the_choice_of_tokens_does_not_depend_on_their_order(kind):
    logprobs, batch = covariance_batch()
    config = preset("dapo", {"covariance": {"kind": kind, "share": 0.05, "low": 0.2}})
    whole, _ = gradient_of(config, logprobs, batch)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(2))
    moved = TokenBatch(
        batch.sample_index,
        batch.mask[order],
        batch.behavior_logprobs[order],
        batch.old_logprobs[order],
        batch.advantages[order],
        200,
    )
    torch.testing.assert_close(gradient_of(config, logprobs[order], moved)[0], whole[order])


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["none", "group_std", "batch_std"])
def test_equal_rewards_give_no_gradient_under_a_group_baseline(kind, baseline, scale):
    logprobs, batch = small_batch()
    overrides = {
        "advantage": {"baseline": baseline, "scale": scale, "eps": 0.0},
        "aggregation": {"kind": kind, "max_tokens": 5},
    }
    config = preset("grpo", overrides)
    rewards = torch.tensor([0.1, 0.1, 0.1], dtype=torch.float64)
    advantages = group_advantages(rewards, torch.zeros(3, dtype=torch.int64), config)
    equal = replace(batch, advantages=advantages[batch.sample_index])
    gradient, output = gradient_of(config, logprobs, replace(equal, reference_logprobs=None))
    assert output.loss.item() == 0.0
    assert not gradient.any()
