"""What may differ between a run and its continuation.

A resumed run does recorded steps again and goes on with the groups that were under way, so whatever
shapes samples or updates has to be what it was. Knows keys and values, not what they do.
"""

from collections.abc import Mapping
from typing import Any

from orchestrator.errors import Problem

CHANGEABLE = (
    "steps",
    "evaluation",
    "checkpoint",
    "metrics",
    "control",
    "autoscaler",
    "supervision",
    "rollout.workers",
    "rollout.cpus",
    "rollout.gpus",
    "rollout.resources",
    "rollout.start_timeout_s",
    "rollout.sync_timeout_s",
    "rollout.progress_timeout_s",
    "verifiers.workers",
    "verifiers.processes",
    "verifiers.cpus",
    "verifiers.resources",
    "verifiers.start_timeout_s",
    "learner.ranks",
    "learner.cpus",
    "learner.gpus",
    "learner.resources",
    "learner.start_timeout_s",
    "learner.step_timeout_s",
    "learner.save_timeout_s",
    "learner.collective_timeout_s",
)
"""Keys, and tables with all their keys: how long, on what, and how it is watched."""


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ between two resolved configurations: the old value and the new.

    A key that only one of them has is one that another version of Slipstream knows.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for name in now:
        if name not in before:
            continue
        key, old, new = f"{prefix}{name}", before[name], now[name]
        if isinstance(old, Mapping) and isinstance(new, Mapping) and key not in CHANGEABLE:
            found |= differences(old, new, f"{key}.")
        elif old != new:
            found[key] = (old, new)
    return found


def refusals(changes: Mapping[str, tuple[Any, Any]]) -> list[Problem]:
    """What keeps a run from being continued with these changes."""
    return [
        Problem(key, f"{new!r} is not what the run was started with", f"{old!r}")
        for key, (old, new) in changes.items()
        if not _changeable(key)
    ]


def _changeable(key: str) -> bool:
    return any(key == allowed or key.startswith(f"{allowed}.") for allowed in CHANGEABLE)
