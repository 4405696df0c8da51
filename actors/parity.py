"""Do the engine's log-probabilities agree with the learner's, and if not, why?

Two comparisons: the next-token distribution at fixed probe prefixes after a weight load, and the
behavior log-probabilities of whole samples before training starts. Pure arithmetic: nothing here
knows how either side computed its numbers.

A cause is named only when it explains the difference: under it the residual has to shrink to a
quarter. What no hypothesis explains is told apart by size and by its correlation with the last
update, since rounding knows nothing of that update and a stale tensor does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RAW = "raw log-probabilities: temperature not applied"
SHIFTED = "shifted by one token"
SHIFTED_AHEAD = f"{SHIFTED}: the engine reports the log-probability of the following position"
SHIFTED_BEHIND = f"{SHIFTED}: the engine reports the log-probability of the preceding position"
TENSORS = "some tensors are stale or wrongly packed (tied head?)"
WEIGHTS = "the two engines disagree on the model: other weights, tokenizer or prompt tokens"
DTYPE = "dtype: the difference has the size of rounding at a lower precision than configured"
NOT_FINITE = "log-probabilities that are not finite (top-p, top-k or min-p in the engine?)"
TOO_FEW = "the engine returned fewer log-probabilities per prefix than the probe holds"

# A hypothesis holds when its residual is at most this part of the unexplained one.
_EXPLAINED = 0.25
# Fewer values than this can agree with a wrong hypothesis by chance.
_MIN_VALUES = 8
# bfloat16 against float32 on natural text: 0.04 in the mean, 0.14 at most (135 M parameters).
# Beyond these, rounding is no explanation.
_ROUNDING_MEAN = 0.1
_ROUNDING_MAX = 0.5
# Up to this multiple of the tolerance a difference is small: noise unless it follows the update.
_SMALL = 3.0
_CORRELATED = 0.5
_CHANCE_DEVIATIONS = 4.0
_FLOORS = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
_STEP_0_FACTOR = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class ProbeExpectation:
    """The learner's next-token log-probabilities at P fixed prefixes, for the K likeliest tokens.

    `token_ids` int32 [P, K]; `logprobs` float32 [P, K] at the sampling temperature;
    `raw_logprobs` float32 [P, K] at temperature 1. `label` names the weights, for messages; `dtype`
    is the precision that the learner computed in.
    """

    prefixes: tuple[tuple[int, ...], ...]
    token_ids: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray
    label: str = ""
    dtype: str = "float32"

    def __post_init__(self) -> None:
        shapes = {self.token_ids.shape, self.logprobs.shape, self.raw_logprobs.shape}
        rows = self.token_ids.shape[0] if self.token_ids.ndim == 2 else -1
        if len(shapes) != 1 or rows != len(self.prefixes) or 0 in self.token_ids.shape:
            raise ValueError(
                f"a probe of {len(self.prefixes)} prefixes needs three arrays of one shape [P, K]"
                f" with P, K > 0, got {sorted(shapes)}"
            )


@dataclass(frozen=True, slots=True)
class ParityReport:
    """Absolute differences of log-probabilities, in nats. `cause` is empty when `passed`."""

    max_abs: float
    mean_abs: float
    tolerance: float
    passed: bool
    cause: str

    def __str__(self) -> str:
        if self.passed:
            return f"parity {self.max_abs:.2g} within {self.tolerance:.2g}"
        return (
            f"log-probabilities differ by up to {self.max_abs:.3g} (mean {self.mean_abs:.3g},"
            f" tolerance {self.tolerance:.3g}): {self.cause}"
        )


@dataclass(frozen=True, slots=True)
class _Hypothesis:
    """What the differences are if `cause` holds, beside what they are on the same values."""

    cause: str
    residual: np.ndarray
    baseline: np.ndarray

    def holds(self, limit: float) -> bool:
        if self.residual.size < _MIN_VALUES or not np.isfinite(self.residual).all():
            return False
        allowed = max(limit, _EXPLAINED * _max(self.baseline))
        small = _rms(self.residual) <= _EXPLAINED * _rms(self.baseline)
        return small and _max(self.residual) <= allowed


def tolerance(rollout_dtype: str, learner_dtype: str, at_step_0: float | None) -> float:
    """Largest accepted |difference| in nats: a floor by the coarser of the two dtypes, or five
    times the largest difference seen at step 0. ValueError for a dtype not known."""
    floor = 0.0
    for dtype in (rollout_dtype, learner_dtype):
        name = dtype.removeprefix("torch.")
        if name not in _FLOORS:
            raise ValueError(
                f"no parity tolerance for dtype {dtype!r}, known: {', '.join(_FLOORS)}"
            )
        floor = max(floor, _FLOORS[name])
    if at_step_0 is None:
        return floor
    if not np.isfinite(at_step_0) or at_step_0 < 0:
        raise ValueError(f"the difference at step 0 is finite and not negative, got {at_step_0}")
    return max(floor, _STEP_0_FACTOR * at_step_0)


def compare(
    expected: ProbeExpectation,
    observed: Sequence[dict[int, float]],
    previous: ProbeExpectation | None,
    tolerance: float,
) -> ParityReport:
    """Compares the engine's likeliest tokens at each prefix with the learner's.

    `observed[p]` maps token id to log-probability: at least the engine's K likeliest. A token in
    only one of the two lists counts with the smallest difference that its absence allows.
    `previous` is the probe of the weights served before, if any. ValueError when the number of
    prefixes differs.
    """
    if len(observed) != len(expected.prefixes):
        raise ValueError(f"probe of {len(expected.prefixes)} prefixes, {len(observed)} observed")
    if min(len(row) for row in observed) < expected.token_ids.shape[1]:
        return _broken(tolerance, TOO_FEW)
    if not all(np.isfinite(list(row.values())).all() for row in observed):
        return _broken(tolerance, NOT_FINITE)
    if previous is not None and previous.prefixes != expected.prefixes:
        previous = None
    difference = _differences(expected.token_ids, expected.logprobs, observed)

    def cause() -> str:
        hypotheses = _probe_hypotheses(expected, observed, previous)
        named = _best(hypotheses, tolerance)
        return named or _unexplained_load(expected, observed, previous, tolerance)

    return _report(difference, tolerance, cause)


def check_samples(
    behavior: np.ndarray,
    expected: np.ndarray,
    raw: np.ndarray,
    offsets: np.ndarray,
    tolerance: float,
) -> ParityReport:
    """Compares the behavior log-probabilities of whole samples with the learner's.

    `behavior`, `expected` (the learner's, at the sampling temperature) and `raw` (the learner's,
    at temperature 1) are float [tokens]; sample i is `offsets[i]:offsets[i + 1]`. ValueError when
    the shapes disagree or there is no token.
    """
    b, e, r = (np.asarray(values, np.float64) for values in (behavior, expected, raw))
    if not (b.ndim == 1 and b.shape == e.shape == r.shape and b.size and offsets[-1] == b.size):
        raise ValueError(
            f"behavior {b.shape}, expected {e.shape} and raw {r.shape} are one list of tokens"
            f" that the offsets end at, got {offsets[-1]}"
        )
    if not np.isfinite(b).all():
        return _broken(tolerance, NOT_FINITE)

    def cause() -> str:
        named = _best(_sample_hypotheses(b, e, r, np.asarray(offsets)), tolerance)
        return named or _unexplained(b - e, tolerance, WEIGHTS)

    return _report(b - e, tolerance, cause)


def _report(difference: np.ndarray, limit: float, cause: Callable[[], str]) -> ParityReport:
    max_abs, mean_abs = _max(difference), float(np.abs(difference).mean())
    passed = max_abs <= limit
    return ParityReport(max_abs, mean_abs, limit, passed, "" if passed else cause())


def _broken(limit: float, cause: str) -> ParityReport:
    return ParityReport(float("inf"), float("inf"), limit, False, cause)


def _differences(
    token_ids: np.ndarray, logprobs: np.ndarray, observed: Sequence[dict[int, float]]
) -> np.ndarray:
    """float64: observed minus expected for each expected token, then for tokens only observed.

    A token that one side does not list has there at most the log-probability of its K-th.
    """
    inside, outside = [], []
    k = token_ids.shape[1]
    for ids, values, row in zip(token_ids.tolist(), logprobs.tolist(), observed, strict=True):
        kth_observed, kth_expected = sorted(row.values(), reverse=True)[k - 1], min(values)
        for token, value in zip(ids, values, strict=True):
            inside.append(row[token] - value if token in row else min(0.0, kth_observed - value))
        outside += [v - kth_expected for t, v in row.items() if t not in ids and v > kth_expected]
    return np.array(inside + outside)


def _probe_hypotheses(
    expected: ProbeExpectation,
    observed: Sequence[dict[int, float]],
    previous: ProbeExpectation | None,
) -> list[_Hypothesis]:
    baseline = _differences(expected.token_ids, expected.logprobs, observed)

    def against(probe: ProbeExpectation, logprobs: np.ndarray, cause: str) -> _Hypothesis:
        return _Hypothesis(cause, _differences(probe.token_ids, logprobs, observed), baseline)

    found = [against(expected, expected.raw_logprobs, RAW)]
    if previous is not None:
        stale = f"engine still serves the weights of version {previous.label or 'before'}"
        found.append(against(previous, previous.logprobs, stale))
        found.append(against(previous, previous.raw_logprobs, f"{stale}; {RAW}"))
    here, ahead = _neighbours(expected.prefixes)
    if here:
        found.append(_shifted(expected, observed, here, ahead, SHIFTED_AHEAD))
        found.append(_shifted(expected, observed, ahead, here, SHIFTED_BEHIND))
    return found


def _neighbours(prefixes: tuple[tuple[int, ...], ...]) -> tuple[list[int], list[int]]:
    """Indices of the prefixes that another one continues by one token, and of those others."""
    index = {prefix: i for i, prefix in enumerate(prefixes)}
    pairs = [(index[p[:-1]], i) for p, i in index.items() if p and p[:-1] in index]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _shifted(
    expected: ProbeExpectation,
    observed: Sequence[dict[int, float]],
    at: list[int],
    source: list[int],
    cause: str,
) -> _Hypothesis:
    """The hypothesis that what was observed at prefixes `at` belongs to prefixes `source`."""
    rows = [observed[i] for i in at]
    residual = _differences(expected.token_ids[source], expected.logprobs[source], rows)
    baseline = _differences(expected.token_ids[at], expected.logprobs[at], rows)
    return _Hypothesis(cause, residual, baseline)


def _sample_hypotheses(
    behavior: np.ndarray, expected: np.ndarray, raw: np.ndarray, offsets: np.ndarray
) -> list[_Hypothesis]:
    difference = behavior - expected
    found = [_Hypothesis(RAW, behavior - raw, difference)]
    sample = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    here = np.flatnonzero(sample[:-1] == sample[1:])
    for at, source, cause in ((here, here + 1, SHIFTED_AHEAD), (here + 1, here, SHIFTED_BEHIND)):
        for values, suffix in ((expected, ""), (raw, f"; {RAW}")):
            residual = behavior[at] - values[source]
            found.append(_Hypothesis(cause + suffix, residual, difference[at]))
    return found


def _best(hypotheses: Sequence[_Hypothesis], limit: float) -> str:
    """The cause with the smallest residual among those that hold, the earlier on a tie; or ''."""
    holding = [h for h in hypotheses if h.holds(limit)]
    return min(holding, key=lambda h: _rms(h.residual)).cause if holding else ""


def _unexplained_load(
    expected: ProbeExpectation,
    observed: Sequence[dict[int, float]],
    previous: ProbeExpectation | None,
    limit: float,
) -> str:
    difference, movement = _against_update(expected, observed, previous)
    if difference.size >= _MIN_VALUES and _rms(movement) > 0:
        by_chance = _CHANCE_DEVIATIONS / np.sqrt(difference.size)
        if _correlation(difference, movement) >= max(_CORRELATED, by_chance):
            return TENSORS
        if _max(difference) > _SMALL * limit and _rms(difference) <= 2 * _rms(movement):
            return TENSORS
    difference = _differences(expected.token_ids, expected.logprobs, observed)
    return _unexplained(difference, limit, TENSORS)


def _against_update(
    expected: ProbeExpectation,
    observed: Sequence[dict[int, float]],
    previous: ProbeExpectation | None,
) -> tuple[np.ndarray, np.ndarray]:
    """(observed minus expected, previous minus expected) over the tokens that all three list."""
    if previous is None:
        return np.empty(0), np.empty(0)
    difference, movement = [], []
    for p, row in enumerate(observed):
        before = dict(
            zip(previous.token_ids[p].tolist(), previous.logprobs[p].tolist(), strict=True)
        )
        now = zip(expected.token_ids[p].tolist(), expected.logprobs[p].tolist(), strict=True)
        for token, value in now:
            if token in row and token in before:
                difference.append(row[token] - value)
                movement.append(before[token] - value)
    return np.array(difference), np.array(movement)


def _unexplained(difference: np.ndarray, limit: float, large: str) -> str:
    if _max(difference) <= _SMALL * limit:
        return DTYPE
    beyond = np.abs(difference).mean() > _ROUNDING_MEAN or _max(difference) > _ROUNDING_MAX
    return large if beyond else DTYPE


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    norm = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / norm) if norm > 0 else 0.0


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def _max(values: np.ndarray) -> float:
    return float(np.abs(values).max()) if values.size else 0.0
