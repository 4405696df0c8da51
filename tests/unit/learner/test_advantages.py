"""Group and batch baselines against statistics.stdev and friends; GAE against its identities."""

import statistics

import pytest
import torch

from learner.advantages import gae, group_advantages, token_rewards, trainable_samples, whiten
from learner.config import PRESETS, expand

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 4.0], dtype=torch.float64)
GROUPS = torch.tensor([7, 3, 7, 3, 7, 3])
PER_SAMPLE = [name for name in PRESETS if name != "ppo"]


def advantages_of(name, rewards=REWARDS, groups=GROUPS, valid=None, **overrides):
    return group_advantages(rewards, groups, expand(name, overrides), valid)


def by_group(values, groups=GROUPS):
    members = {}
    for value, group in zip(values.tolist(), groups.tolist(), strict=True):
        members.setdefault(group, []).append(value)
    return members


def test_grpo_divides_by_the_groups_sample_standard_deviation():
    members = by_group(REWARDS)
    expected = [
        (r - statistics.mean(members[g])) / (statistics.stdev(members[g]) + 1e-6)
        for r, g in zip(REWARDS.tolist(), GROUPS.tolist(), strict=True)
    ]
    assert advantages_of("grpo").tolist() == pytest.approx(expected, rel=1e-12)


def test_ddof_0_uses_the_population_standard_deviation():
    got = advantages_of("grpo", advantage={"ddof": 0, "eps": 0.0})
    expected = 1.0 / statistics.pstdev([1.0, 0.0, 2.0])
    assert got[4].item() == pytest.approx(expected, rel=1e-12)


def test_dr_grpo_only_centres():
    expected = [0.0, -5 / 3, -1.0, -2 / 3, 1.0, 7 / 3]
    assert advantages_of("dr_grpo").tolist() == pytest.approx(expected, abs=1e-12)


def test_rloo_subtracts_the_mean_of_the_others():
    expected = [1 - 1, 0 - 2.5, 0 - 1.5, 1 - 2, 2 - 0.5, 4 - 0.5]
    assert advantages_of("rloo").tolist() == pytest.approx(expected, abs=1e-12)


def test_reinforce_pp_uses_batch_statistics():
    rewards = REWARDS.tolist()
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    expected = [(r - mean) / (std + 1e-6) for r in rewards]
    assert advantages_of("reinforce_pp").tolist() == pytest.approx(expected, rel=1e-12)


def test_batch_std_is_over_centred_values():
    got = advantages_of("grpo", advantage={"scale": "batch_std", "eps": 0.0})
    centred = advantages_of("dr_grpo")
    expected = centred / statistics.stdev(centred.tolist())
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


def test_no_baseline_and_no_scale_is_the_reward():
    got = advantages_of("grpo", advantage={"baseline": "none", "scale": "none"})
    assert got.tolist() == REWARDS.tolist()


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_equal_rewards_get_exactly_zero(name):
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.7, 0.7, 0.7], dtype=torch.float32)
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    if name == "reinforce_pp":
        rewards = torch.full((6,), 0.1)
    assert advantages_of(name, rewards, groups).tolist() == [0.0] * 6


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_a_group_of_one_gets_exactly_zero(name, eps):
    rewards, groups = torch.tensor([0.3, 1.0, 0.0]), torch.tensor([5, 1, 1])
    got = advantages_of(name, rewards, groups, advantage={"eps": eps})
    assert got[0].item() == 0.0
    assert got[1].item() > 0 > got[2].item()


def test_a_group_scale_without_a_group_baseline_is_finite_on_equal_rewards():
    rewards, groups = torch.tensor([1.0, 1.0, 0.0, 2.0]), torch.tensor([0, 0, 1, 1])
    got = advantages_of("grpo", rewards, groups, advantage={"baseline": "batch_mean", "eps": 0.0})
    assert got[:2].tolist() == [0.0, 0.0]
    assert torch.isfinite(got).all()


def test_a_batch_scale_is_finite_on_a_batch_of_equal_rewards():
    overrides = {"baseline": "none", "scale": "batch_std", "eps": 0.0}
    got = advantages_of("grpo", torch.ones(4), torch.zeros(4).long(), advantage=overrides)
    assert got.tolist() == [0.0] * 4


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_invalid_samples_are_out_of_the_statistics(name):
    valid = torch.tensor([True, True, False, True, True, True])
    rewards = REWARDS.clone()
    rewards[2] = float("nan")
    got = advantages_of(name, rewards, valid=valid)
    assert got[2].item() == 0.0
    without = advantages_of(name, REWARDS[valid], GROUPS[valid])
    torch.testing.assert_close(got[valid], without, rtol=1e-12, atol=1e-12)


def test_one_valid_sample_of_a_group_gets_exactly_zero():
    valid = torch.tensor([True, True, False, True, False, True])
    assert advantages_of("grpo", valid=valid)[0].item() == 0.0


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_sample_order_does_not_matter(name):
    order = torch.tensor([3, 5, 0, 2, 4, 1])
    torch.testing.assert_close(
        advantages_of(name, REWARDS[order], GROUPS[order]), advantages_of(name)[order]
    )


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_a_reward_shift_does_not_matter(name):
    torch.testing.assert_close(advantages_of(name, REWARDS + 17.0), advantages_of(name))


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "reinforce_pp"])
def test_a_reward_scale_does_not_matter_where_normalised(name):
    exact = {"advantage": {"eps": 0.0}}
    torch.testing.assert_close(
        advantages_of(name, REWARDS * 250.0, **exact), advantages_of(name, **exact)
    )


def test_float32_rewards_give_float32_advantages():
    got = advantages_of("grpo", REWARDS.float())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), advantages_of("grpo"), rtol=1e-6, atol=0)


def test_whole_number_rewards_are_not_truncated():
    rewards, groups = torch.tensor([0, 1, 1]), torch.zeros(3).long()
    got = advantages_of("grpo", rewards, groups)
    assert got.dtype == torch.float32
    assert torch.equal(got, advantages_of("grpo", rewards.float(), groups))
    assert torch.equal(got, advantages_of("grpo", rewards.bool(), groups))
    assert got[0].item() < 0 < got[1].item()


@pytest.mark.parametrize("name", PER_SAMPLE)
@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_valid_sample_with_a_reward_that_is_not_finite_is_refused(name, reward):
    rewards = REWARDS.clone()
    rewards[3] = reward
    sentence = f"sample 3 of group 3 has the reward {reward}, expected a finite number; mark a"
    with pytest.raises(ValueError, match=sentence):
        advantages_of(name, rewards)
    valid = torch.arange(6) != 3
    assert advantages_of(name, rewards, valid=valid).isfinite().all()


def test_trainable_samples_need_a_second_scored_sample_only_under_a_group_statistic():
    valid = torch.tensor([True, True, False, True, False, True])
    assert trainable_samples(GROUPS, valid, expand("rloo")).tolist() == [
        False, True, False, True, False, True,
    ]  # fmt: skip
    assert torch.equal(trainable_samples(GROUPS, valid, expand("reinforce_pp")), valid)


def random_tokens(seed=0):
    generator = torch.Generator().manual_seed(seed)
    index = torch.tensor([0] * 5 + [1] * 1 + [2] * 9 + [3] * 4)
    rewards = torch.randn(19, generator=generator, dtype=torch.float64)
    values = torch.randn(19, generator=generator, dtype=torch.float64)
    mask = torch.rand(19, generator=generator) > 0.3
    return rewards, values, mask, index


def gae_by_loop(rewards, values, mask, index, gamma, lam):
    """The recursion, one sample and one token at a time."""
    advantages = [0.0] * len(rewards)
    for sample in set(index.tolist()):
        steps, earned = [], {}
        for t in (index == sample).nonzero().flatten().tolist():
            if mask[t]:
                steps.append(t)
            if steps:
                earned[steps[-1]] = earned.get(steps[-1], 0.0) + rewards[t].item()
        next_value = next_advantage = 0.0
        for t in reversed(steps):
            delta = earned[t] + gamma * next_value - values[t].item()
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[t].item()
            advantages[t] = next_advantage
    advantages = torch.tensor(advantages, dtype=torch.float64)
    return advantages, torch.where(mask, advantages + values, 0.0)


@pytest.mark.parametrize("seed", range(4))
def test_gae_equals_the_recursion(seed):
    tokens = random_tokens(seed)
    for got, expected in zip(gae(*tokens, 0.97, 0.9), gae_by_loop(*tokens, 0.97, 0.9), strict=True):
        torch.testing.assert_close(got, expected)


def test_gae_by_hand():
    rewards = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    values = torch.tensor([0.5, 0.25, 0.5], dtype=torch.float64)
    everything, sample = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.long)
    advantages, returns = gae(rewards, values, everything, sample, 0.5, 0.5)
    # deltas: 0.125 - 0.5 = -0.375; 0.25 - 0.25 = 0; 1 - 0.5 = 0.5, decay 0.25
    assert advantages.tolist() == [-0.375 + 0.25 * 0.125, 0.125, 0.5]
    assert returns.tolist() == [0.15625, 0.375, 1.0]


def test_gae_lambda_1_is_monte_carlo():
    rewards, values, _, index = random_tokens()
    mask = torch.ones_like(index, dtype=torch.bool)
    advantages, returns = gae(rewards, values, mask, index, 1.0, 1.0)
    for sample in range(4):
        own = index == sample
        to_go = rewards[own].flip(0).cumsum(0).flip(0)
        torch.testing.assert_close(returns[own], to_go)
        torch.testing.assert_close(advantages[own], to_go - values[own])


def test_gae_lambda_0_is_the_one_step_error():
    rewards, values, _, index = random_tokens()
    mask = torch.ones_like(index, dtype=torch.bool)
    advantages, _ = gae(rewards, values, mask, index, 0.9, 0.0)
    for sample in range(4):
        own = index == sample
        following = torch.cat([values[own][1:], torch.zeros(1, dtype=torch.float64)])
        torch.testing.assert_close(advantages[own], rewards[own] + 0.9 * following - values[own])


def test_gae_skips_tool_tokens_and_moves_their_reward_back():
    nan = float("nan")
    mask = torch.tensor([False, True, False, False, True])
    rewards = torch.tensor([9.0, 0.0, 1.0, 0.0, 2.0], dtype=torch.float64)
    values = torch.tensor([nan, 0.5, nan, nan, 0.25], dtype=torch.float64)
    sample = torch.zeros(5, dtype=torch.long)
    advantages, returns = gae(rewards, values, mask, sample, 0.9, 0.8)
    short = gae(
        torch.tensor([1.0, 2.0], dtype=torch.float64),
        torch.tensor([0.5, 0.25], dtype=torch.float64),
        torch.ones(2, dtype=torch.bool),
        torch.zeros(2, dtype=torch.long),
        0.9,
        0.8,
    )
    torch.testing.assert_close(advantages[mask], short[0])
    torch.testing.assert_close(returns[mask], short[1])
    assert advantages[~mask].tolist() == returns[~mask].tolist() == [0.0, 0.0, 0.0]


def test_gae_samples_may_lie_in_any_order():
    rewards, values, mask, index = random_tokens()
    order = torch.argsort((index + 2) % 4, stable=True)
    moved = gae(rewards[order], values[order], mask[order], index[order], 0.9, 0.8)
    for got, expected in zip(moved, gae(rewards, values, mask, index, 0.9, 0.8), strict=True):
        torch.testing.assert_close(got, expected[order])


@pytest.mark.parametrize(("name", "value"), [("gamma", 1.1), ("lam", -0.1), ("lam", float("nan"))])
def test_gae_refuses_a_discount_outside_0_and_1(name, value):
    with pytest.raises(ValueError, match=rf"{name} is {value}, expected a number in \[0, 1\]"):
        gae(*random_tokens(), **{"gamma": 0.9, "lam": 0.8, name: value})


def test_gae_has_no_gradient():
    rewards, values, mask, index = random_tokens()
    values.requires_grad_()
    assert not any(found.requires_grad for found in gae(rewards, values, mask, index, 0.9, 0.8))


def test_gae_of_nothing():
    nothing = torch.zeros(3, dtype=torch.bool)
    advantages, returns = gae(
        torch.ones(3), torch.ones(3), nothing, torch.zeros(3).long(), 1.0, 1.0
    )
    assert advantages.tolist() == returns.tolist() == [0.0, 0.0, 0.0]


def test_gae_of_100_000_samples_equals_that_of_a_few():
    index = torch.arange(100_000).repeat_interleave(3)
    generator = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(2, len(index), generator=generator, dtype=torch.float64)
    everything = torch.ones_like(index, dtype=torch.bool)
    whole = gae(rewards, values, everything, index, 0.9, 0.8)
    some = slice(300, 330)
    part = gae(rewards[some], values[some], everything[some], index[some], 0.9, 0.8)
    for got, expected in zip(whole, part, strict=True):
        torch.testing.assert_close(got[some], expected)


def test_an_outcome_is_the_reward_of_the_last_unmasked_token():
    index = torch.tensor([0, 0, 0, 1, 1, 2])
    mask = torch.tensor([True, True, False, True, True, False])
    outcomes = torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64)
    assert token_rewards(outcomes, None, mask, index).tolist() == [0.0, 1.0, 0.0, 0.0, -2.0, 0.0]
    penalties = torch.tensor([0.5, 0.25, 0.0, 0.0, 0.125, 0.0], dtype=torch.float64)
    got = token_rewards(outcomes, penalties, mask, index)
    assert got.tolist() == [0.5, 1.25, 0.0, 0.0, -1.875, 0.0]


def test_whitening_is_over_the_unmasked_tokens():
    mask = torch.tensor([True, False, True, True])
    got = whiten(torch.tensor([1.0, float("nan"), 2.0, 6.0], dtype=torch.float64), mask, eps=0.0)
    std = statistics.stdev([1.0, 2.0, 6.0])
    assert got.tolist() == pytest.approx([-2 / std, 0.0, -1 / std, 3 / std])


@pytest.mark.parametrize("count", [0, 1, 4])
def test_equal_advantages_are_whitened_to_exactly_zero(count):
    mask = torch.arange(5) < count
    assert whiten(torch.full((5,), 0.1), mask).tolist() == [0.0] * 5


def test_a_critic_has_no_advantages_per_sample():
    with pytest.raises(ValueError, match="they come from gae"):
        advantages_of("ppo")
