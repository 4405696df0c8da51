"""Advantages from rewards: group and batch baselines, and GAE. Pure tensor code.

Groups and samples are found by id, never by position, so that a missing sample cannot mix groups.
"""

import torch
from torch import Tensor

from learner.objective_config import AdvantageConfig, ObjectiveConfig
from learner.segments import segment_sum


def group_advantages(
    rewards: Tensor, group_ids: Tensor, config: ObjectiveConfig, valid: Tensor | None = None
) -> Tensor:
    """A = (reward - baseline) / (scale + eps), one per sample: float[S] from float[S], int64[S].

    `valid` (bool[S]) says which samples have a reward; the others are in no statistic and get 0,
    whatever their value. A group with one valid sample, or whose rewards are all equal, gets
    exactly 0 wherever a group statistic enters; so does the whole batch where a batch statistic
    enters. Statistics are of all samples given: call it before filtering, on the whole batch.
    Computed in float64, returned in the dtype of `rewards`, float32 where those are whole numbers.
    Raises ValueError for a critic, and for a valid sample whose reward is not finite.
    """
    choice = config.advantage
    if choice.baseline == "critic":
        raise ValueError("baseline 'critic' has advantages per token: they come from gae")
    if not rewards.is_floating_point():
        rewards = rewards.float()
    valid = torch.ones_like(group_ids, dtype=torch.bool) if valid is None else valid
    _refuse_non_finite(rewards, group_ids, valid)
    values = torch.where(valid, rewards, 0.0).double()
    _, groups = torch.unique(group_ids, return_inverse=True)
    counts = segment_sum(valid.double(), groups, groups.shape[0])[groups]
    centred = _centred(choice, values, valid, groups, counts)
    advantages = centred / _scale(choice, values, centred, valid, groups, counts)
    flat = ~valid
    if choice.per_group:
        flat = flat | ~_varies(values, valid, groups)
    if choice.baseline == "batch_mean" or choice.scale == "batch_std":
        flat = flat | ~_varies(values, valid, torch.zeros_like(groups))
    return torch.where(flat, 0.0, advantages).to(rewards.dtype)


def _refuse_non_finite(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> None:
    bad = (valid & ~rewards.isfinite()).nonzero().flatten()
    if len(bad):
        sample = int(bad[0])
        raise ValueError(
            f"sample {sample} of group {int(group_ids[sample])} has the reward "
            f"{float(rewards[sample])}, expected a finite number; mark a sample without a reward "
            "as not valid"
        )


def trainable_samples(group_ids: Tensor, valid: Tensor, config: ObjectiveConfig) -> Tensor:
    """bool[S]: valid samples, except that where a group statistic enters a group needs two."""
    if not config.advantage.per_group:
        return valid
    _, groups = torch.unique(group_ids, return_inverse=True)
    return valid & (segment_sum(valid.long(), groups, groups.shape[0])[groups] >= 2)


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    sample_index: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438): (advantages[N], returns[N]).

    All inputs are flat over tokens [N], each sample's tokens in time order. With the next unmasked
    token of the sample as t + 1, and value 0 after the last:

        A_t = r_t + gamma V_{t+1} - V_t + gamma lam A_{t+1},   return_t = A_t + V_t

    Masked tokens are no steps: their outputs are 0, their values may be anything, and a reward on
    one counts for the unmasked token before it (with none before it, for nothing). No whitening,
    and no gradient: both are targets. Raises ValueError for `gamma` or `lam` outside [0, 1].
    """
    for name, share in (("gamma", gamma), ("lam", lam)):
        if not 0 <= share <= 1:
            raise ValueError(f"{name} is {share}, expected a number in [0, 1]")
    order = torch.argsort(sample_index, stable=True)
    order_mask, order_index = mask[order], sample_index[order]
    steps = order[order_mask]
    samples = sample_index[steps]
    last = torch.ones_like(samples, dtype=torch.bool)
    last[:-1] = samples[1:] != samples[:-1]

    step_rewards = _rewards_of_steps(rewards[order], order_mask, order_index, samples)
    step_values = values[steps]
    next_values = torch.where(last, 0.0, step_values.roll(-1))
    deltas = step_rewards + gamma * next_values - step_values
    decay = torch.where(last, 0.0, torch.full_like(deltas, gamma * lam))
    step_advantages = _discounted_suffix_sums(deltas, decay)

    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages[steps] = step_advantages
    returns[steps] = step_advantages + step_values
    return advantages, returns


def token_rewards(
    outcomes: Tensor, penalties: Tensor | None, mask: Tensor, sample_index: Tensor
) -> Tensor:
    """Rewards per token [N] for `gae`: the sample's reward on its last unmasked token, and the
    `penalties` (float[N] or None; see `kl.reward_penalties`) where they are.

    `outcomes` float[S]; each sample's tokens in time order. A sample without an unmasked token has
    no place for its reward and loses it.
    """
    places = torch.arange(mask.shape[0], device=mask.device)
    last = torch.full_like(outcomes, -1, dtype=torch.int64).scatter_reduce(
        0, sample_index[mask], places[mask], "amax"
    )
    rewards = torch.zeros_like(mask, dtype=outcomes.dtype)
    rewards[last[last >= 0]] = outcomes[last >= 0]
    return rewards if penalties is None else rewards + penalties.to(rewards.dtype)


def whiten(advantages: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Advantages centred and divided by their standard deviation (n - 1) plus `eps`, over the
    unmasked tokens [N]; 0 outside. Of the whole batch: call it before anything is split.

    All equal, or fewer than two, gives exactly 0.
    """
    inside = advantages[mask].double()
    if inside.numel() < 2 or bool(inside.max() == inside.min()):
        return torch.zeros_like(advantages)
    scaled = (inside - inside.mean()) / (inside.std() + eps)
    result = torch.zeros_like(advantages)
    result[mask] = scaled.to(advantages.dtype)
    return result


def _centred(
    choice: AdvantageConfig, values: Tensor, valid: Tensor, groups: Tensor, counts: Tensor
) -> Tensor:
    if choice.baseline == "none":
        return values
    if choice.baseline == "batch_mean":
        return torch.where(valid, values - values.sum() / valid.sum().clamp(min=1), 0.0)
    mean = segment_sum(values, groups, groups.shape[0])[groups] / counts.clamp(min=1)
    centred = torch.where(valid, values - mean, 0.0)
    if choice.baseline == "leave_one_out":
        # r - mean of the others = (r - mean of all) n / (n - 1)
        centred = centred * counts / (counts - 1).clamp(min=1)
    return centred


def _scale(
    choice: AdvantageConfig,
    values: Tensor,
    centred: Tensor,
    valid: Tensor,
    groups: Tensor,
    counts: Tensor,
) -> Tensor:
    if choice.scale == "none":
        return torch.ones_like(values)
    if choice.scale == "group_std":
        mean = segment_sum(values, groups, groups.shape[0])[groups] / counts.clamp(min=1)
        squares = torch.where(valid, values - mean, 0.0).square()
        total = segment_sum(squares, groups, groups.shape[0])[groups]
    else:
        counts = valid.sum().double()
        mean = centred.sum() / counts.clamp(min=1)
        total = torch.where(valid, centred - mean, 0.0).square().sum()
    return (total / (counts - choice.ddof).clamp(min=1)).sqrt() + choice.eps


def _varies(values: Tensor, valid: Tensor, groups: Tensor) -> Tensor:
    """bool[S]: the sample's group has two valid samples with different values."""
    infinity = float("inf")
    low = values.new_full(groups.shape, infinity).scatter_reduce(
        0, groups, torch.where(valid, values, infinity), "amin"
    )
    high = values.new_full(groups.shape, -infinity).scatter_reduce(
        0, groups, torch.where(valid, values, -infinity), "amax"
    )
    return (high > low)[groups]


def _rewards_of_steps(rewards: Tensor, mask: Tensor, index: Tensor, samples: Tensor) -> Tensor:
    """Rewards [steps], those on masked tokens moved to the unmasked token of the sample before."""
    if samples.numel() == 0:
        return rewards[:0]
    step = torch.cumsum(mask, 0) - 1
    earned = (step >= 0) & (samples[step.clamp(min=0)] == index)
    return segment_sum(rewards[earned], step[earned], samples.shape[0])


def _discounted_suffix_sums(values: Tensor, decay: Tensor) -> Tensor:
    """x_t = values_t + decay_t x_{t+1} over the flat axis, by doubling: log2(N) passes at most.

    A decay of 0 ends a segment (the last value's must be 0), so the number of passes follows the
    longest segment.
    """
    sums, reach = values.clone(), 1
    while bool(decay.any()):
        sums[:-reach] += decay[:-reach] * sums[reach:]
        decay = torch.cat([decay[:-reach] * decay[reach:], decay.new_zeros(reach)])
        reach *= 2
    return sums
