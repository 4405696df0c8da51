"""From a step request to work: advantages, which samples train, and who trains them when.

Every rank computes all of it from the request alone, so that nothing has to be communicated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from actors.trajectory import FinishReason
from learner.advantages import group_advantages, trainable_samples
from learner.batch import SampleFate, StepRequest
from learner.objective_config import ObjectiveConfig
from learner.packing import Plan, plan_micro_batches
from learner.rewards import shaped_rewards


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """Samples are numbered through the groups of the request, in order.

    `optimizer_steps` holds one micro-batch plan per optimizer step, over the samples that train;
    `left_out` maps each other sample to the reason.
    """

    group_of: np.ndarray
    row_of: np.ndarray
    optimizer_steps: list[Plan]
    left_out: dict[int, str]

    def own_samples(self, rank: int) -> list[int]:
        """Samples that this rank trains on, over all optimizer steps."""
        return [i for plan in self.optimizer_steps for batch in plan[rank] for i in batch]


def plan_batch(
    request: StepRequest,
    objective: ObjectiveConfig,
    *,
    ranks: int,
    token_budget: int,
    optimizer_steps: int,
) -> BatchPlan:
    """Plan one batch."""
    groups = request.groups
    sizes = [len(group.sample_ids) for group in groups]
    group_of = np.repeat(np.arange(len(groups)), sizes)
    lengths = _column([group.response_tokens for group in groups], np.int64)
    ok = _column([group.ok for group in groups], np.bool_)
    truncated = _column([group.truncated for group in groups], np.bool_)
    ids, valid = torch.from_numpy(group_of), torch.from_numpy(ok)
    trainable = trainable_samples(ids, valid, objective).numpy()
    left_out = {}
    for index in range(len(ok)):
        if not ok[index]:
            left_out[index] = "unscored"
        elif not trainable[index]:
            left_out[index] = "lone"
        elif truncated[index] and objective.mask_truncated:
            left_out[index] = "truncated"
        elif not lengths[index]:
            left_out[index] = "empty"
    prompts = np.array([group.prompt_tokens for group in groups], np.int64)[group_of]
    fed = prompts + lengths - 1
    plans = [
        _plan_share(share, group_of, left_out, fed, ranks, token_budget)
        for share in np.array_split(np.arange(len(groups)), optimizer_steps)
    ]
    return BatchPlan(
        group_of,
        np.concatenate([np.zeros(0, np.int64), *(np.arange(size) for size in sizes)]),
        plans,
        left_out,
    )


def batch_rewards(
    request: StepRequest, objective: ObjectiveConfig, max_response_tokens: int
) -> np.ndarray:
    """float64 [S]: rewards after over-long shaping; NaN without an ok verdict."""
    groups = request.groups
    truncated = [cut for group in groups for cut in group.truncated]
    return shaped_rewards(
        [reward for group in groups for reward in group.rewards],
        _column([group.response_tokens for group in groups], np.int64),
        [FinishReason.LENGTH if cut else FinishReason.STOP for cut in truncated],
        objective,
        max_response_tokens,
    )


def sample_advantages(
    request: StepRequest,
    objective: ObjectiveConfig,
    max_response_tokens: int,
    penalties: np.ndarray | None = None,
) -> np.ndarray:
    """float32 [S]: one advantage per sample, from rewards plus `penalties` (float64 [S]).

    Statistics are of all scored samples; what is left out of training is left out after them.
    """
    groups = request.groups
    rewards = batch_rewards(request, objective, max_response_tokens)
    if penalties is not None:
        rewards = rewards + penalties
    ids = np.repeat(np.arange(len(groups)), [len(group.sample_ids) for group in groups])
    ok = _column([group.ok for group in groups], np.bool_)
    advantages = group_advantages(
        torch.from_numpy(rewards), torch.from_numpy(ids), objective, torch.from_numpy(ok)
    )
    return advantages.to(torch.float32).numpy()


def left_out_fates(request: StepRequest, plan: BatchPlan) -> list[SampleFate]:
    """Fates of the samples that no rank trains on."""
    fates = []
    for index, reason in plan.left_out.items():
        group, row = request.groups[plan.group_of[index]], plan.row_of[index]
        tokens = group.response_tokens[row]
        fates.append(SampleFate(group.sample_ids[row], 0, {reason: tokens} if tokens else {}))
    return fates


def _plan_share(
    share: np.ndarray,
    group_of: np.ndarray,
    left_out: dict[int, str],
    fed: np.ndarray,
    ranks: int,
    token_budget: int,
) -> Plan:
    inside = np.flatnonzero(np.isin(group_of, share))
    members = [index for index in inside.tolist() if index not in left_out]
    plan = plan_micro_batches(fed[members].tolist(), ranks, token_budget)
    return [[[members[i] for i in batch] for batch in batches] for batches in plan]


def _column(parts: Sequence[Sequence[object]], dtype: type[np.generic]) -> np.ndarray:
    return np.array([value for part in parts for value in part], dtype)
