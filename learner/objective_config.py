"""The objective as data: five independent choices, and the presets that name usual combinations.

Knows no torch and no run: what a choice computes is in `learner.objective`, and what depends on
the run (its staleness bound, its response limit) is filled in by `ObjectiveConfig.for_run`.
"""

import difflib
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

NEEDS_CRITIC = "needs a critic (value model), which this version does not have"
NEEDS_REFERENCE = "needs a reference model, which this version does not have"

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
    "grpo": {
        "advantage": _GROUP_NORMALISED,
        "ratio": {"unit": "token"},
        "clip": {"kind": "ppo", "low": 0.2, "high": 0.2},
        "correction": "tis",
        "aggregation": {"kind": "sequence_mean"},
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


class _Config(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True
    )


class AdvantageConfig(_Config):
    """How rewards become advantages: (reward - baseline) / scale, one value per sample."""

    baseline: Literal["group_mean", "leave_one_out", "batch_mean", "none"] = "group_mean"
    """What is subtracted from a sample's reward."""
    scale: Literal["none", "group_std", "batch_std"] = "group_std"
    """What the centred reward is divided by; batch_std is taken over the centred values."""
    ddof: int = Field(default=1, ge=0, le=1)
    """Delta degrees of freedom of the standard deviations (1: divide by n - 1)."""
    eps: float = Field(default=1e-6, ge=0, allow_inf_nan=False)
    """Added to the standard deviation."""

    @field_validator("baseline", mode="before")
    @classmethod
    def _no_critic(cls, value: object) -> object:
        if value == "critic":
            raise ValueError(f"advantage.baseline 'critic' {NEEDS_CRITIC}")
        return value

    @property
    def per_group(self) -> bool:
        """Whether a statistic of the group enters, so that a group needs two scored samples."""
        return self.baseline in ("group_mean", "leave_one_out") or self.scale == "group_std"


class RatioConfig(_Config):
    """The log-ratio u that the clip acts on."""

    unit: Literal["token", "sequence", "sequence_pure"] = "token"
    """One ratio per token, or GSPO's one per sequence. `sequence` lets weights and masks act per
    token (GSPO's token form); `sequence_pure` takes only whole-sample weights and masks."""
    anchor: Literal["old", "step_start", "behavior"] = "old"
    """What the current policy is compared with: the learner under the version that sampled the
    token, the learner at the start of the batch, or the rollout engine at sampling."""


class ClipConfig(_Config):
    """How far a ratio may move before its gradient stops (ppo), or its weight is capped (cispo)."""

    kind: Literal["ppo", "cispo", "none"] = "ppo"
    """ppo bounds are distances from 1; cispo bounds are absolute; none leaves the ratio alone."""
    low: float = Field(default=0.2, ge=0, allow_inf_nan=False)
    """ppo: flat below 1 - low where the advantage is negative. cispo: smallest weight."""
    high: float = Field(default=0.2, ge=0, allow_inf_nan=False)
    """ppo: flat above 1 + high where the advantage is positive. cispo: largest weight."""
    dual: float | None = Field(default=None, allow_inf_nan=False)
    """ppo only: flat above this ratio where the advantage is negative; None is off."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.kind == "ppo" and self.low > 1:
            raise ValueError(f"clip.low {self.low} puts the lower bound 1 - low below 0")
        if self.kind == "cispo" and not self.low <= 1 <= self.high:
            raise ValueError(
                "clip.low and clip.high are absolute bounds for cispo and must enclose 1, "
                f"got [{self.low}, {self.high}]"
            )
        if self.dual is not None and self.kind != "ppo":
            raise ValueError(f"clip.dual belongs to clip.kind 'ppo', not {self.kind!r}")
        if self.dual is not None and self.dual <= 1:
            raise ValueError(f"clip.dual must be above 1, got {self.dual}")
        return self


class KeepInterval(_Config):
    """Tokens (or samples) whose engine-mismatch ratio lies outside are rejected."""

    statistic: Literal["token", "product", "geometric"]
    """Ratio of the token, or of its sample: product of the token ratios, or geometric mean."""
    low: float = Field(default=0.0, ge=0, le=1)
    """Smallest ratio kept, inclusive."""
    high: float | None = Field(default=None, ge=1)
    """Largest ratio kept, inclusive; None is no upper bound."""


class CorrectionConfig(_Config):
    """What is done about the mismatch p - b between the two engines under the same weights."""

    weight: Literal["none", "token", "product", "geometric"] = "none"
    """Importance weight: none, of the token, or of its sample (product, or geometric mean)."""
    cap: float | None = None
    """Largest weight (small ones are kept as they are); None is uncapped."""
    keep: tuple[KeepInterval, ...] = ()
    """Intervals of the mismatch ratio outside of which a token or sample is rejected."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """A sample with any token's mismatch ratio below this is rejected; None is off."""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        if value not in CORRECTIONS:
            raise ValueError(f"unknown correction {value!r}{_nearest(value, CORRECTIONS)}")
        return CORRECTIONS[value]

    @model_validator(mode="after")
    def _cap_is_truncation(self) -> Self:
        if self.cap is not None and not self.cap >= 1:
            raise ValueError(
                f"correction.cap {self.cap} is below 1 and would shrink samples that match exactly"
            )
        return self

    @property
    def statistics(self) -> frozenset[str]:
        """Every mismatch statistic in use: subset of {'token', 'product', 'geometric'}."""
        used = {interval.statistic for interval in self.keep} | {self.weight}
        return frozenset(used - {"none"})

    @property
    def needs_old(self) -> bool:
        """Whether the learner's log-probabilities at the sampling version enter."""
        return bool(self.statistics) or self.veto is not None


class AggregationConfig(_Config):
    """Sum over tokens to one number: token factor a and the denominator Z of the whole batch."""

    kind: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = "token_mean"
    """token_mean: a 1, Z tokens. sequence_mean: a 1/T, Z samples. sequence_sum: a 1, Z samples.
    constant: a 1, Z samples times max_tokens (Dr. GRPO)."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Length constant of `constant`, in tokens; None takes the run's response limit."""


class ObjectiveConfig(_Config):
    """A preset, expanded, with any field overridden; `ObjectiveConfig()` is plain grpo.

    Fields not given come from the preset, section by section and field by field; `correction` may
    be a name, which replaces the preset's whole correction.
    """

    preset: str = "grpo"
    """Name of the combination that the other fields start from."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Baseline and scale."""
    ratio: RatioConfig = RatioConfig()
    """Unit and anchor of the policy ratio."""
    clip: ClipConfig = ClipConfig()
    """Bounds on the policy ratio."""
    correction: CorrectionConfig = CorrectionConfig()
    """Engine-mismatch correction: a table, or one of tis, icepop, none."""
    aggregation: AggregationConfig = AggregationConfig()
    """How token losses become one number."""
    entropy_bonus: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Coefficient of the mean token entropy, added to what is maximised."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Largest lag, in versions, at which a token trains; None takes the run's bound."""
    dynamic_sampling: bool = False
    """Replace groups whose samples all had the same outcome, since they teach nothing."""
    overlong_window: float = Field(default=0.0, ge=0, le=1)
    """Last share of the response limit, over which the reward falls by up to 1; 0 is off."""
    mask_truncated: bool = False
    """Leave samples that were cut off by the length limit out of training."""

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        name = data.get("preset", "grpo")
        if name == "ppo":
            raise ValueError(f"objective.preset 'ppo' {NEEDS_CRITIC}")
        if name not in PRESETS:
            raise ValueError(f"unknown objective.preset {name!r}{_nearest(str(name), PRESETS)}")
        if "kl" in data:
            raise ValueError(f"objective.kl {NEEDS_REFERENCE}")
        return _merged(PRESETS[name], data)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.ratio.anchor == "behavior" and self.correction.weight != "none":
            raise ValueError(
                "ratio.anchor 'behavior' already holds the engine mismatch, so correction.weight "
                f"{self.correction.weight!r} would count it twice; set correction.weight to 'none' "
                "(keep intervals are fine)"
            )
        if self.ratio.unit == "sequence_pure" and "token" in self.correction.statistics:
            raise ValueError(
                "ratio.unit 'sequence_pure' takes only whole-sample weights and masks, and "
                "correction uses a token statistic; use ratio.unit 'sequence', or the product or "
                "geometric statistic"
            )
        return self

    @property
    def per_sequence(self) -> bool:
        """Whether the ratio or a mismatch statistic is of the whole sample, so that a sample with
        one stale token is stale as a whole."""
        return self.ratio.unit != "token" or bool(
            self.correction.statistics & {"product", "geometric"}
        )

    @property
    def needs_old(self) -> bool:
        """Whether `old_logprobs` must be computed at all."""
        return self.ratio.anchor != "behavior" or self.correction.needs_old

    def warnings(self) -> tuple[str, ...]:
        """Sentences about choices that are allowed but do nothing useful."""
        widest = max(self.clip.low, self.clip.high)
        if self.ratio.unit != "token" and self.clip.kind == "ppo" and widest > 0.05:
            return (
                f"clip {widest} on a sequence ratio practically never clips; "
                "GSPO's bounds are about 3e-4 and 4e-4",
            )
        return ()

    def for_run(
        self, *, max_staleness: int, max_response_tokens: int, samples_per_group: int
    ) -> "ObjectiveConfig":
        """This objective with the run's bounds filled in where it has none of its own.

        Raises ValueError when a group statistic is asked of groups of one, and when
        `max_staleness` was set here to something else than the run's.
        """
        if self.advantage.per_group and samples_per_group < 2:
            raise ValueError(
                f"advantage baseline {self.advantage.baseline!r} with scale "
                f"{self.advantage.scale!r} compares the samples of a group and needs at least two "
                f"samples per group, got {samples_per_group}"
            )
        if self.max_staleness not in (None, max_staleness):
            raise ValueError(
                f"objective.max_staleness {self.max_staleness} contradicts the run's max_staleness "
                f"{max_staleness}; set the run's only"
            )
        aggregation = self.aggregation
        if aggregation.kind == "constant" and aggregation.max_tokens is None:
            aggregation = aggregation.model_copy(update={"max_tokens": max_response_tokens})
        return self.model_copy(update={"max_staleness": max_staleness, "aggregation": aggregation})


def expand(name: str, overrides: Mapping[str, Any] | None = None) -> ObjectiveConfig:
    """The preset `name` with `overrides` (nested like the fields) applied.

    Raises pydantic's ValidationError (a ValueError) with one sentence per problem.
    """
    return ObjectiveConfig.model_validate({**(overrides or {}), "preset": name})


def _merged(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overrides.items():
        default = merged.get(key)
        if key == "correction" and isinstance(default, str):
            default = CORRECTIONS[default]
        if isinstance(default, Mapping) and isinstance(value, Mapping):
            value = {**default, **value}
        merged[key] = value
    return merged


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"
