"""What happens to rewards before advantages: over-long shaping, and the zero-variance test.

No torch, since the orchestrator judges groups for dynamic sampling without torch.
"""

from collections.abc import Sequence

import numpy as np

from actors.trajectory import FinishReason
from learner.batch import GroupEntry
from learner.objective_config import ObjectiveConfig


def shaped_rewards(
    rewards: Sequence[float | None] | np.ndarray,
    lengths: Sequence[int] | np.ndarray,
    finish: Sequence[str],
    config: ObjectiveConfig,
    max_tokens: int,
) -> np.ndarray:
    """float64[S]: rewards less DAPO's soft over-long penalty (arXiv 2503.14476, section 3.4).

    `lengths` are response tokens, `max_tokens` the response limit. Over the last
    `config.overlong_window` of the limit the penalty grows linearly from 0 to 1; a sample that was
    cut off has the whole of it, however short the limit was that ended it. A missing reward (None)
    is NaN and stays so.
    """
    shaped = np.array([np.nan if reward is None else reward for reward in rewards], np.float64)
    if config.overlong_window == 0:
        return shaped
    window = config.overlong_window * max_tokens
    excess = np.asarray(lengths, np.float64) - (max_tokens - window)
    penalty = np.clip(excess / window, 0.0, 1.0)
    cut_off = np.array([reason == FinishReason.LENGTH for reason in finish], bool)
    return shaped - np.where(cut_off, 1.0, penalty)


def zero_variance(
    outcomes: Sequence[float | None],
    rewards: Sequence[float | None],
    tol: float = 1e-6,
) -> bool:
    """Whether a group has nothing to compare: outcomes within `tol`, or fewer than two of them.

    `outcomes` are before shaping; one that is None falls back to its unshaped reward, and a sample
    with neither (no ok verdict) does not count.
    """
    values = [
        reward if outcome is None else outcome
        for outcome, reward in zip(outcomes, rewards, strict=True)
    ]
    known = [value for value in values if value is not None]
    return len(known) < 2 or max(known) - min(known) <= tol


def uninformative(objective: ObjectiveConfig, entry: GroupEntry) -> str:
    """Why a group cannot contribute to a step, as a short code; empty if it can."""
    needed = 2 if objective.advantage.per_group else 1
    if sum(entry.ok) < needed:
        return "unscored"
    if objective.dynamic_sampling and zero_variance(entry.outcomes, entry.rewards):
        return "zero_variance"
    return ""
