"""What the verdicts of a batch say about it, from the request alone: every rank knows all of it.

No torch. Statistics are of the samples with an ok verdict, before shaping and masking.
"""

from collections.abc import Sequence

import numpy as np

from learner.batch import GroupEntry


def outcome_summary(groups: Sequence[GroupEntry]) -> dict[str, float]:
    """Means, shares and lengths (tokens) by outcome; what no sample tells of is absent.

    An outcome of None falls back to the unshaped reward, as everywhere. Right is an outcome of 1,
    wrong one of 0; a group counts as all right or all wrong if every scored sample in it is.
    `truncated_share` is of all samples, scored or not.
    """
    outcomes = [np.array(_known(group), np.float64) for group in groups]
    scored = np.concatenate([np.zeros(0), *outcomes])
    truncated = np.array([cut for group in groups for cut in group.truncated], bool)
    summary = {}
    if truncated.size:
        summary["truncated_share"] = float(truncated.mean())
    if not scored.size:
        return summary
    rewards = [r for group in groups for r, ok in zip(group.rewards, group.ok, strict=True) if ok]
    summary["reward_mean"] = float(np.mean([reward for reward in rewards if reward is not None]))
    summary["outcome_mean"] = float(scored.mean())
    judged = [values for values in outcomes if values.size]
    for name, value in (("right", 1.0), ("wrong", 0.0)):
        summary[f"groups_all_{name}"] = float(sum(bool((v == value).all()) for v in judged))
    lengths = np.array([n for group in groups for n in _scored_lengths(group)], np.float64)
    for name, chosen in (("right", scored == 1.0), ("wrong", scored == 0.0)):
        if chosen.any():
            summary[f"length_mean_{name}"] = float(lengths[chosen].mean())
    return summary


def _known(group: GroupEntry) -> list[float]:
    rows = zip(group.outcomes, group.rewards, group.ok, strict=True)
    values = [reward if outcome is None else outcome for outcome, reward, ok in rows if ok]
    return [value for value in values if value is not None]


def _scored_lengths(group: GroupEntry) -> list[int]:
    rows = zip(group.response_tokens, group.outcomes, group.rewards, group.ok, strict=True)
    return [n for n, outcome, reward, ok in rows if ok and (outcome, reward) != (None, None)]
