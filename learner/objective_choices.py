"""The objective's choices, one table each; what a choice computes is in the module of its name.

Knows no torch, no presets and no run.
"""

import difflib
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from learner.presets import CORRECTIONS


class Table(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True
    )


class AdvantageConfig(Table):
    """How rewards become advantages: (reward - baseline) / scale, one value per sample."""

    baseline: Literal["group_mean", "leave_one_out", "batch_mean", "none", "critic"] = "group_mean"
    """What is subtracted from a sample's reward; critic is a value per token, by GAE."""
    scale: Literal["none", "group_std", "batch_std"] = "group_std"
    """What the centred reward is divided by; batch_std is taken over the centred values."""
    ddof: int = Field(default=1, ge=0, le=1)
    """Delta degrees of freedom of the standard deviations (1: divide by n - 1)."""
    eps: float = Field(default=1e-6, ge=0, allow_inf_nan=False)
    """Added to the standard deviation."""

    @model_validator(mode="after")
    def _critic_scales_nothing(self) -> Self:
        if self.baseline == "critic" and self.scale != "none":
            raise ValueError(
                f"advantage.scale {self.scale!r} is of rewards per sample, and baseline 'critic' "
                "has advantages per token; set scale to 'none' (critic.whiten normalises them)"
            )
        return self

    @property
    def per_group(self) -> bool:
        """Whether a statistic of the group enters, so that a group needs two scored samples."""
        return self.baseline in ("group_mean", "leave_one_out") or self.scale == "group_std"


class RatioConfig(Table):
    """The log-ratio u that the clip acts on."""

    unit: Literal["token", "sequence", "sequence_pure"] = "token"
    """One ratio per token, or GSPO's one per sequence. `sequence` lets weights and masks act per
    token (GSPO's token form); `sequence_pure` takes only whole-sample weights and masks."""
    anchor: Literal["old", "step_start", "behavior"] = "old"
    """What the current policy is compared with: the learner under the version that sampled the
    token, the learner at the start of the batch, or the rollout engine at sampling."""


class ClipConfig(Table):
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


class KeepInterval(Table):
    """Tokens (or samples) whose engine-mismatch ratio lies outside are rejected."""

    statistic: Literal["token", "product", "geometric"]
    """Ratio of the token, or of its sample: product of the token ratios, or geometric mean."""
    low: float = Field(default=0.0, ge=0, le=1)
    """Smallest ratio kept, inclusive."""
    high: float | None = Field(default=None, ge=1)
    """Largest ratio kept, inclusive; None is no upper bound."""


class CorrectionConfig(Table):
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
            raise ValueError(f"unknown correction {value!r}{nearest(value, CORRECTIONS)}")
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


class AggregationConfig(Table):
    """Sum over tokens to one number: token factor a and the denominator Z of the whole batch."""

    kind: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = "token_mean"
    """token_mean: a 1, Z tokens. sequence_mean: a 1/T, Z samples. sequence_sum: a 1, Z samples.
    constant: a 1, Z samples times max_tokens (Dr. GRPO)."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Length constant of `constant`, in tokens; None takes the run's response limit."""


class CriticConfig(Table):
    """Generalised advantage estimation and the value loss; read where the baseline is a critic."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """GAE's lambda: 1 is Monte Carlo, 0 the one-step error."""
    whiten: bool = True
    """Centre and scale the advantages over the tokens of the batch."""
    value_clip: float | None = Field(default=0.2, gt=0, allow_inf_nan=False)
    """How far a value may move from the one its batch started with; None does not clip."""


class KLConfig(Table):
    """KL divergence to a frozen reference model."""

    coefficient: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the divergence; 0 is off."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Which estimate is reported; the gradient of place `loss` is the same for all three."""
    place: Literal["loss", "reward"] = "loss"
    """loss: exact at fixed prefixes. reward: p - f per token, the gradient of the sequence KL."""


class CovarianceConfig(Table):
    """Restraint of the tokens with the largest covariance of log-probability and advantage, which
    are the ones that use up entropy (Cui et al. 2025, arXiv 2505.22617)."""

    kind: Literal["none", "clip", "kl"] = "none"
    """clip (Clip-Cov): some tokens within [low, high] lose their gradient. kl (KL-Cov): the largest
    are held to the old policy."""
    share: float = Field(default=2e-4, gt=0, le=1)
    """Share of the tokens that is chosen; rounded down, so a small micro-batch may have none."""
    low: float = Field(default=1.0, allow_inf_nan=False)
    """clip: smallest covariance that is chosen from."""
    high: float = Field(default=5.0, allow_inf_nan=False)
    """clip: largest covariance that is chosen from."""
    coefficient: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """kl: weight of the divergence from the old policy at the chosen tokens."""

    @model_validator(mode="after")
    def _interval(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"covariance.low {self.low} is above covariance.high {self.high}")
        return self


def nearest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"
