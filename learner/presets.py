"""The presets of the objective and the named corrections, as data. Knows no model and no torch."""

from typing import Any

CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {"weight": "none", "cap": None, "keep": [], "veto": None},
    "tis": {"weight": "token", "cap": 2.0, "keep": [], "veto": None},
    "icepop": {
        "weight": "token",
        "cap": None,
        "keep": [{"statistic": "token", "low": 0.5, "high": 5.0}],
        "veto": None,
    },
}

_GROUP_NORMALISED = {"baseline": "group_mean", "scale": "group_std"}

PRESETS: dict[str, dict[str, Any]] = {
    "ppo": {
        "advantage": {"baseline": "critic", "scale": "none"},
        "critic": {"gamma": 1.0, "lam": 0.95},
        "ratio": {"unit": "token"},
        "clip": {"kind": "ppo", "low": 0.2, "high": 0.2},
        "correction": "tis",
        "aggregation": {"kind": "token_mean"},
    },
    "grpo": {
        "advantage": _GROUP_NORMALISED,
        "ratio": {"unit": "token"},
        "clip": {"kind": "ppo", "low": 0.2, "high": 0.2},
        "correction": "tis",
        "aggregation": {"kind": "sequence_mean"},
        "kl": {"coefficient": 0.001},
    },
    "dr_grpo": {
        "advantage": {"baseline": "group_mean", "scale": "none"},
        "ratio": {"unit": "token"},
        "clip": {"kind": "ppo", "low": 0.2, "high": 0.2},
        "correction": "tis",
        "aggregation": {"kind": "constant"},
    },
    "dapo": {
        "advantage": _GROUP_NORMALISED,
        "ratio": {"unit": "token"},
        "clip": {"kind": "ppo", "low": 0.2, "high": 0.28},
        "correction": "tis",
        "aggregation": {"kind": "token_mean"},
        "dynamic_sampling": True,
        "overlong_window": 0.2,
    },
    "gspo": {
        "advantage": _GROUP_NORMALISED,
        "ratio": {"unit": "sequence"},
        "clip": {"kind": "ppo", "low": 3e-4, "high": 4e-4},
        "correction": "tis",
        "aggregation": {"kind": "sequence_mean"},
    },
    "cispo": {
        "advantage": _GROUP_NORMALISED,
        "ratio": {"unit": "token", "anchor": "behavior"},
        "clip": {"kind": "cispo", "low": 0.0, "high": 5.0},
        "correction": "none",
        "aggregation": {"kind": "token_mean"},
    },
    "rloo": {
        "advantage": {"baseline": "leave_one_out", "scale": "none"},
        "ratio": {"unit": "token"},
        "clip": {"kind": "ppo", "low": 0.2, "high": 0.2},
        "correction": "tis",
        "aggregation": {"kind": "token_mean"},
    },
    "reinforce_pp": {
        "advantage": {"baseline": "batch_mean", "scale": "batch_std"},
        "ratio": {"unit": "token"},
        "clip": {"kind": "ppo", "low": 0.2, "high": 0.2},
        "correction": "tis",
        "aggregation": {"kind": "token_mean"},
    },
}
