"""Credit: the advantage of each response token of a batch, whatever its baseline is.

Per-sample baselines need the rewards of the whole batch, which every rank has; a critic needs
values, which each rank has for its own rows. What crosses ranks here are sums only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from learner.advantages import gae, token_rewards
from learner.batch import StepRequest
from learner.collective import Collective
from learner.kl import penalty_per_sample
from learner.objective_config import ObjectiveConfig
from learner.plan import BatchPlan, sample_advantages
from learner.rows import Rows, response_index

_WHITENING_EPS = 1e-8


@dataclass(frozen=True, eq=False)
class Credit:
    """float32, flat over the response tokens of a rank's rows; NaN where it trains on nothing.

    `returns` and `values` are None without a critic.
    """

    advantages: np.ndarray
    returns: np.ndarray | None = None
    values: np.ndarray | None = None


def sample_credit(
    request: StepRequest,
    plan: BatchPlan,
    rows: Rows,
    row_of: dict[int, int],
    objective: ObjectiveConfig,
    max_response_tokens: int,
    penalties: np.ndarray | None,
    ranks: Collective,
) -> Credit:
    """One advantage per sample. `penalties` (see `kl.reward_penalties`; None without a KL in the
    reward) enter as their sum over each sample. All ranks call."""
    samples, members = _pairs(row_of)
    lengths = rows.response_lengths[members]
    of_rewards = None
    if penalties is not None:
        owner = torch.from_numpy(np.repeat(samples, lengths))
        own = torch.from_numpy(penalties[response_index(rows, members)]).double()
        sums = penalty_per_sample(own, owner, len(plan.group_of))
        of_rewards = ranks.sum(sums.to(ranks.device)).cpu().numpy()
    of_samples = sample_advantages(request, objective, max_response_tokens, of_rewards)
    per_token = np.full(len(rows.behavior), np.nan, np.float32)
    per_token[response_index(rows, members)] = np.repeat(of_samples[samples], lengths)
    return Credit(per_token)


def critic_credit(
    rewards: np.ndarray,
    rows: Rows,
    row_of: dict[int, int],
    objective: ObjectiveConfig,
    values: np.ndarray,
    penalties: np.ndarray | None,
    ranks: Collective,
) -> Credit:
    """GAE over this rank's rows from the shaped `rewards` (float64[S]) and `values` (as in Credit),
    whitened over the whole batch where the objective says so. `penalties` (see
    `kl.reward_penalties`) are each token's own. All ranks call."""
    samples, members = _pairs(row_of)
    index = response_index(rows, members)
    owner = torch.from_numpy(np.repeat(np.arange(len(members)), rows.response_lengths[members]))
    mask = rows.mask[index]
    own_penalties = None if penalties is None else torch.from_numpy(penalties[index])
    advantages, returns = gae(
        token_rewards(
            torch.from_numpy(rewards[samples]), own_penalties, torch.from_numpy(mask), owner
        ),
        torch.from_numpy(values[index].astype(np.float64)),
        torch.from_numpy(mask),
        owner,
        objective.critic.gamma,
        objective.critic.lam,
    )
    own = advantages.numpy()
    if objective.critic.whiten:
        own = _whitened(own, mask, ranks)
    found = [np.full(len(rows.behavior), np.nan, np.float32) for _ in range(2)]
    found[0][index], found[1][index] = own, returns.numpy()
    return Credit(found[0], found[1], values)


def _whitened(advantages: np.ndarray, mask: np.ndarray, ranks: Collective) -> np.ndarray:
    """Mean 0 and variance 1 over the masked tokens of all ranks."""
    inside = advantages[mask]
    moments = torch.tensor([len(inside), inside.sum(), np.square(inside).sum()])
    count, total, squares = ranks.sum(moments.double().to(ranks.device)).tolist()
    if count < 2:
        return advantages
    mean = total / count
    variance = max(0.0, squares / count - mean * mean) * count / (count - 1)
    return (advantages - mean) / (variance**0.5 + _WHITENING_EPS)


def _pairs(row_of: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Samples of the batch and their rows, in one order."""
    pairs: Sequence[tuple[int, int]] = sorted(row_of.items())
    array = np.array(pairs, np.int64).reshape(-1, 2)
    return array[:, 0], array[:, 1]
