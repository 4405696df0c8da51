"""Which part of c - b is out of its usual range, why, and what to change: a pure function.

The movement c - p tells of staleness and step size, the mismatch p - b of the two engines. What
the mismatch looks like tells more, since tokens are sampled from the distribution that b ought to
belong to: then E[exp(p - b)] is 1, and rounding is independent of p. A temperature makes p - b
follow p in proportion; log-probabilities of other tokens make p - b follow p one to one; a
constant leaves only a shift. What is left is rounding where it is small, other weights where it
is large. Of two causes at once the larger is named first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

USUAL_MISMATCH = {"float32": 2e-3, "float16": 1e-2, "bfloat16": 5e-2, "fp8": 1.5e-1}
"""Largest usual mean |p - b| in nats per token, by the coarser dtype of the two engines."""
USUAL_MOVEMENT = 1e-2
"""Largest usual k3 of c - p, in nats per token: PPO's customary target for early stopping."""
_LARGEST_ROUNDING = 5e-2
_PROPORTIONAL = 0.8
_ONE_TO_ONE = 0.7
_ALL_OF_IT = 0.9


class Cause(StrEnum):
    """What a finding is put down to."""

    STALENESS = "staleness"
    PRECISION = "precision"
    TEMPERATURE = "temperature"
    OLD_WEIGHTS = "old_weights"
    OTHER_TOKENS = "other_tokens"
    OFFSET = "offset"


_REMEDIES = {
    Cause.STALENESS: "lower the staleness bound (max_staleness) or the learning rate",
    Cause.PRECISION: "the engines round differently: bring the rollout engine's precision (dtype, "
    "quantised cache or weights) closer to the learner's",
    Cause.TEMPERATURE: "it follows the log-probability itself: check the engine's sampling "
    "settings, above all the temperature, and that it logs what it sampled from",
    Cause.OLD_WEIGHTS: "too large for rounding: the rollout engine's weights are not those of the "
    "version that its tokens name; check the engine's weight updates",
    Cause.OTHER_TOKENS: "the logged log-probabilities do not belong to the sampled tokens: look "
    "for a shift by one in the engine's output",
    Cause.OFFSET: "all log-probabilities are off by the same amount: the engine does not "
    "normalise what it logs as it samples; check its sampling settings",
}


@dataclass(frozen=True)
class Finding:
    """Something out of its usual range. `excess` is measured over usual (above 1)."""

    cause: Cause
    excess: float
    sentence: str


def diagnose(metrics: Mapping[str, float], dtype: str) -> tuple[Finding, ...]:
    """Findings from the finalised metrics of a step, largest excess first; () where all is usual.

    `dtype` is the coarser one of the two engines. Small differences of weights look like rounding
    and are called so. What was not measured is not judged. Raises ValueError for an unknown dtype.
    """
    if dtype not in USUAL_MISMATCH:
        raise ValueError(f"unknown dtype {dtype!r}; known are {', '.join(USUAL_MISMATCH)}")
    findings = []
    usual, measured = USUAL_MISMATCH[dtype], _mismatch(metrics)
    if measured is not None and not measured <= usual:
        cause = _cause_of_mismatch(metrics, measured, usual)
        sentence = (
            f"engine mismatch is out of its usual range: mean |old - behavior| {measured:.2g} nats "
            f"per token, usually at most {usual:.2g} in {dtype}; {_REMEDIES[cause]}"
        )
        findings.append(Finding(cause, measured / usual, sentence))
    moved = metrics.get("movement_k3")
    if moved is not None and not moved <= USUAL_MOVEMENT:
        sentence = (
            f"staleness is out of its usual range: the policy moved by {moved:.2g} nats per token "
            f"since sampling, usually at most {USUAL_MOVEMENT:.2g}; {_REMEDIES[Cause.STALENESS]}"
        )
        findings.append(Finding(Cause.STALENESS, moved / USUAL_MOVEMENT, sentence))
    return tuple(sorted(findings, key=lambda finding: -finding.excess))


def coarser(one: str, other: str) -> str:
    """The one of two dtypes by which engines usually differ more."""
    return max(one, other, key=lambda dtype: USUAL_MISMATCH[dtype])


def _mismatch(metrics: Mapping[str, float]) -> float | None:
    """Mean |p - b|, without the tokens sampled after an update in mid-generation where origins are
    known: those had keys and values of older weights, so that they differ is no fault."""
    name = "mismatch_abs_mean"
    means = {key.removeprefix(f"{name}/"): metrics[key] for key in metrics if f"{name}/" in key}
    if not means:
        return metrics.get(name)
    means.pop("crossed", None)
    tokens = {origin: metrics[f"tokens/{origin}"] for origin in means}
    total = sum(tokens.values())
    return sum(tokens[o] * mean for o, mean in means.items()) / total if total else None


def _cause_of_mismatch(metrics: Mapping[str, float], measured: float, usual: float) -> Cause:
    if metrics.get("mismatch_old_slope", 0.0) > _ONE_TO_ONE:
        return Cause.OTHER_TOKENS
    if abs(metrics.get("mismatch_old_correlation", 0.0)) > _PROPORTIONAL:
        return Cause.TEMPERATURE
    if abs(metrics.get("mismatch_k1", 0.0)) > _ALL_OF_IT * measured:
        return Cause.OFFSET
    rounding = measured <= max(_LARGEST_ROUNDING, 2 * usual)
    return Cause.PRECISION if rounding else Cause.OLD_WEIGHTS
