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

    advantages float32 [S]; `optimizer_steps` holds one micro-batch plan per optimizer step, over
    the samples that train; `left_out` maps each other sample to the reason.
    """

    advantages: np.ndarray
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
    max_response_tokens: int,
) -> BatchPlan:
    """Plan one batch. Statistics are of all scored samples; masking comes after them."""
    groups = request.groups
    sizes = [len(group.sample_ids) for group in groups]
    group_of = np.repeat(np.arange(len(groups)), sizes)
    lengths = _column([group.response_tokens for group in groups], np.int64)
    ok = _column([group.ok for group in groups], np.bool_)
    truncated = _column([group.truncated for group in groups], np.bool_)
    rewards = shaped_rewards(
        [reward for group in groups for reward in group.rewards],
        lengths,
        [FinishReason.LENGTH if cut else FinishReason.STOP for cut in truncated],
        objective,
        max_response_tokens,
    )
    ids, valid = torch.from_numpy(group_of), torch.from_numpy(ok)
    advantages = group_advantages(torch.from_numpy(rewards), ids, objective, valid)
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
        advantages.to(torch.float32).numpy(),
        group_of,
        np.concatenate([np.zeros(0, np.int64), *(np.arange(size) for size in sizes)]),
        plans,
        left_out,
    )


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
