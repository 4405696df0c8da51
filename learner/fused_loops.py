"""The compiled loops of `learner.fused`, over the tokens of whole samples.

Every array of a call is of the same part of a batch; sample r of the part has the tokens
[starts[r], starts[r + 1]), `lengths[r]` of them in the data mask. Steps are those of the modules
that define them (correction, ratio, diagnostics), in their order and in float32 where they round,
so that decisions at a bound agree; sums are float64. No fast math: a NaN in a masked place must not
leak, and one inside the mask must not be hidden.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Sums = NDArray[np.float64]

# The codes of TokenFate, once more: what is compiled holds the constants of this file, and numba's
# cache does not notice when those of another change.
OUTSIDE, TRAINED, STALE, VETO, KEEP_LOW, KEEP_HIGH = range(6)
TOKEN, PRODUCT, GEOMETRIC = range(3)
"""Statistics of the mismatch."""
TRAINED_SUMS, MASSES = 8, 8
ONE, ZERO = np.float32(1), np.float32(0)


CURRENT, ADVANTAGE, PRODUCTS, WEIGHT, LAG, LARGEST_LAG, ZERO_ADVANTAGE, ENTROPY = range(8)
"""Places in `Found.trained`. A = 0 is counted over the data mask, entropy over live tokens."""
LEFT, BY_STALE, BY_VETO, BY_KEEP, BY_CAP, BY_CLIP = range(6)
"""Places in `Found.mass`; three clips begin at the last."""


class Rules(NamedTuple):
    """A config in numbers. What is off has a bound that nothing exceeds."""

    max_lag: int
    per_sequence: bool
    of_sample: bool
    """Whether anything but a length is asked of a sample."""
    by_mean: bool
    """Whether the ratio is of the sample; `pure`, whether the slope goes through its mean too."""
    pure: bool
    cispo: bool
    unclipped: bool
    low: tuple[np.float32, np.float32]
    """Lowest log-ratio where A >= 0, and where A < 0; likewise `high`, and the ratios there."""
    high: tuple[np.float32, np.float32]
    low_ratio: tuple[np.float32, np.float32]
    high_ratio: tuple[np.float32, np.float32]
    weight: int
    """A statistic, or -1."""
    log_cap: np.float32
    cap: np.float32
    capped_above: np.float32
    veto: np.float32
    by_length: bool
    """a is 1 / T."""
    largest_log: np.float32
    largest: np.float32
    largest_excess: np.float32
    scale: np.float32


class Tokens(NamedTuple):
    """Fields of TokenBatch with the current log-probabilities; empty where there are none."""

    mask: NDArray[np.bool_]
    current: Floats
    old: Floats
    advantages: Floats
    lag: NDArray[np.int64]
    crossed: NDArray[np.bool_]
    position: NDArray[np.int64]
    entropy: Floats


class Work(NamedTuple):
    """Per token, whatever the masks say: c - p, p - b, exp of them - 1; u, the log weight, and
    exp of both."""

    movement: Floats
    mismatch: Floats
    movement_excess: Floats
    mismatch_excess: Floats
    ratio: Floats
    ratio_exp: Floats
    weight: Floats
    weight_exp: Floats


class Scales(NamedTuple):
    """Of `objective_metrics`."""

    lag_origins: NDArray[np.int64]
    edges: NDArray[np.int64]
    first_bin: int


class Found(NamedTuple):
    """What the loops add to; see SUMS and MAXIMA."""

    by_fate: Sums
    trained: Sums
    clipped: Sums
    """By low, high, dual."""
    mass: Sums
    origin_fates: Sums
    old_slope: Sums
    moments: Sums
    """[part, origin, moment]; likewise `bins` and `largest`."""
    bins: Sums
    largest: Sums
    position_tokens: Sums
    position_masked: Sums
    length_tokens: Sums
    length_masked: Sums


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled at the first call, and kept beside the source or in the user's cache; where neither
    can be written, in memory."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    except RuntimeError:
        return numba.njit(**options)(function)  # type: ignore[no-any-return]


@_compiled
def find_samples(index, mask, num_samples, starts, lengths):  # type: ignore[no-untyped-def]
    """Fill in the samples that have tokens, and return their number; -1 where an index is
    smaller than the one before or none of [0, num_samples)."""
    size = len(index)
    found, known = -1, np.int64(-1)
    for t in range(size):
        if index[t] != known:
            if index[t] < known or index[t] >= num_samples:
                return -1
            known = index[t]
            found += 1
            starts[found] = t
            lengths[found] = 0
        lengths[found] += mask[t]
    starts[found + 1] = size
    return found + 1


@_compiled
def _judge(rules, keep, tokens, starts, lengths, work, fates):  # type: ignore[no-untyped-def]
    """Fates, and what is of the sample in `work.ratio` and `work.weight`. `keep` has the
    statistics and bounds of the keep intervals."""
    statistics, lows, highs = keep
    for run in range(len(starts) - 1):
        begin, end = starts[run], starts[run + 1]
        _mask_stale(rules, tokens, begin, end, fates)
        product, geometric, vetoed = ZERO, ZERO, False
        if rules.of_sample:
            length = np.float32(max(lengths[run], 1))
            product, vetoed = _of_sample(rules, begin, end, length, work, fates)
            geometric = product / length
        if vetoed:
            for t in range(begin, end):
                if fates[t] == TRAINED:
                    fates[t] = VETO
        for k in range(len(statistics)):
            statistic = statistics[k]
            value = product if statistic == PRODUCT else geometric
            for t in range(begin, end):
                if statistic == TOKEN:
                    value = work.mismatch[t]
                if value < lows[k] and (fates[t] == TRAINED or fates[t] == KEEP_HIGH):
                    fates[t] = KEEP_LOW
                elif value > highs[k] and fates[t] == TRAINED:
                    fates[t] = KEEP_HIGH


@_compiled
def _mask_stale(rules, tokens, begin, end, fates):  # type: ignore[no-untyped-def]
    """Fates before the correction."""
    everyone = False
    bounded = len(tokens.lag) > 0
    if bounded and rules.per_sequence:
        for t in range(begin, end):
            everyone |= tokens.mask[t] and tokens.lag[t] > rules.max_lag
    for t in range(begin, end):
        stale = everyone or (bounded and tokens.lag[t] > rules.max_lag)
        fates[t] = tokens.mask[t] * (STALE if stale else TRAINED)


@_compiled
def _of_sample(rules, begin, end, length, work, fates):  # type: ignore[no-untyped-def]
    """The sample's log mismatch and whether it has a vetoed token."""
    moved, mismatch, vetoed = ZERO, ZERO, False
    for t in range(begin, end):
        if fates[t] == TRAINED:
            moved += work.ratio[t]
            mismatch += work.mismatch[t]
            vetoed |= work.mismatch[t] < rules.veto
    if rules.by_mean:
        mean = moved / length
        work.ratio[begin:end] = mean
        work.ratio_exp[begin:end] = np.exp(mean)
    if rules.weight > TOKEN:
        log_weight = mismatch if rules.weight == PRODUCT else mismatch / length
        work.weight[begin:end] = log_weight
        work.weight_exp[begin:end] = np.exp(log_weight)
    return mismatch, vetoed


@_compiled
def _weight(rules, work, t):  # type: ignore[no-untyped-def]
    if rules.weight < 0:
        return ONE
    return rules.cap if work.weight[t] > rules.log_cap else work.weight_exp[t]


@_compiled
def _shape(rules, tokens, starts, lengths, work, fates, gradient):  # type: ignore[no-untyped-def]
    """-loss x Z, and the gradient."""
    total = 0.0
    for run in range(len(starts) - 1):
        begin, end = starts[run], starts[run + 1]
        length = np.float32(max(lengths[run], 1))
        share = ONE / length if rules.by_length else ONE
        through = ZERO
        for t in range(begin, end):
            slope = ZERO
            if fates[t] != OUTSIDE and fates[t] != STALE:
                advantage = tokens.advantages[t] if fates[t] == TRAINED else ZERO
                if not (rules.unclipped and advantage == 0):
                    value, slope = _surrogate(rules, tokens, work, advantage, share, t)
                    total += value
            gradient[t] = slope * rules.scale
            through += slope
        if rules.pure:
            mean = through / length * rules.scale
            for t in range(begin, end):
                gradient[t] = ZERO if fates[t] == OUTSIDE or fates[t] == STALE else mean
    return total


@_compiled
def _surrogate(rules, tokens, work, advantage, share, t):  # type: ignore[no-untyped-def]
    """S times its factor, and its derivative."""
    side = 1 if advantage < 0 else 0
    ratio, flat = work.ratio_exp[t], False
    log_ratio = work.ratio[t]
    if log_ratio < rules.low[side]:
        ratio, flat = rules.low_ratio[side], True
    elif log_ratio > rules.high[side]:
        ratio, flat = rules.high_ratio[side], True
    value = ratio * (advantage * _weight(rules, work, t) * share)
    if rules.cispo:
        return value * tokens.current[t], value
    return value, ZERO if flat else value


@_compiled
def _count(rules, tokens, work, fates, found):  # type: ignore[no-untyped-def]
    """Counts, the gradient mass, and sums over the trained tokens."""
    trained, clipped, mass = found.trained, found.clipped, found.mass
    for t in range(len(fates)):
        fate = fates[t]
        if fate == OUTSIDE:
            continue
        advantage = tokens.advantages[t]
        size = np.float64(abs(advantage))
        trained[ZERO_ADVANTAGE] += advantage == 0
        if fate == STALE:
            mass[BY_STALE] += size
            continue
        if len(tokens.entropy):
            trained[ENTROPY] += tokens.entropy[t]
        full = ONE
        if rules.weight >= 0:
            large = work.weight[t] > rules.largest_log
            full = rules.largest if large else work.weight_exp[t]
        if fate != TRAINED:
            mass[BY_VETO if fate == VETO else BY_KEEP] += size * full
            continue
        weight = _weight(rules, work, t)
        current = np.float64(tokens.current[t])
        trained[CURRENT] += current
        trained[ADVANTAGE] += advantage
        trained[PRODUCTS] += current * advantage
        trained[WEIGHT] += weight
        if len(tokens.lag):
            trained[LAG] += tokens.lag[t]
            trained[LARGEST_LAG] = max(trained[LARGEST_LAG], np.float64(tokens.lag[t]))
        if rules.weight >= 0 and work.weight[t] > rules.capped_above:
            mass[BY_CAP] += size * (full - weight)
        size *= weight
        mass[LEFT] += size
        if advantage != 0:
            _clipped(rules, work.ratio[t], advantage < 0, size, clipped, mass)


@_compiled
def _clipped(rules, log_ratio, negative, size, clipped, mass):  # type: ignore[no-untyped-def]
    side = 1 if negative else 0
    if log_ratio >= rules.low[side] and log_ratio <= rules.high[side]:
        return
    by = 0
    if log_ratio > rules.high[side]:
        by = 2 if negative and not rules.cispo else 1
    clipped[by] += 1
    if not rules.cispo:
        mass[BY_CLIP + by] += size


@_compiled
def _spread(rules, scales, tokens, work, fates, found):  # type: ignore[no-untyped-def]
    """What became of the tokens of each origin, and both log-ratios of the live ones."""
    codes, slope = found.origin_fates, found.old_slope
    movement_bits, mismatch_bits = work.movement.view(np.int32), work.mismatch.view(np.int32)
    for t in range(len(fates)):
        fate = fates[t]
        if fate == OUTSIDE:
            continue
        origin = 0
        if len(tokens.lag):
            lag = min(max(tokens.lag[t], 0), len(scales.lag_origins) - 1)
            origin = scales.lag_origins[lag]
        if len(tokens.crossed) and tokens.crossed[t]:
            origin = len(codes) - 1
        if fate == STALE:
            codes[origin, 1] += 1
            continue
        capped = fate == TRAINED and rules.weight >= 0 and work.weight[t] > rules.capped_above
        codes[origin, 5 if capped else fate - 1] += 1
        if len(tokens.old):
            moved, differs = work.movement[t], work.mismatch[t]
            _log_ratio(
                rules, scales, moved, work.movement_excess[t], movement_bits[t], 0, origin, found
            )
            _log_ratio(
                rules, scales, differs, work.mismatch_excess[t], mismatch_bits[t], 1, origin, found
            )
            old, difference = np.float64(tokens.old[t]), np.float64(differs)
            slope[0] += old
            slope[1] += old * old
            slope[2] += old * difference
            slope[3] += difference * difference


@_compiled
def _log_ratio(rules, scales, value, excess, bits, part, origin, found):  # type: ignore[no-untyped-def]
    moments = found.moments
    safe, more = np.float64(value), np.float64(excess)
    if value > rules.largest_log:
        safe, more = np.float64(rules.largest_log), np.float64(rules.largest_excess)
    magnitude = np.float64(abs(value))
    moments[part, origin, 0] += value
    moments[part, origin, 1] += magnitude
    moments[part, origin, 2] += more
    moments[part, origin, 3] += more * more
    moments[part, origin, 4] += more - safe
    place = ((bits & 0x7FFFFFFF) >> 21) - scales.first_bin
    found.bins[part, origin, min(max(place, 0), found.bins.shape[2] - 1)] += 1
    if not magnitude <= found.largest[part, origin]:
        found.largest[part, origin] = magnitude


@_compiled
def _sizes(scales, tokens, starts, lengths, fates, found):  # type: ignore[no-untyped-def]
    """Tokens in the data mask and those that a policy mask took, by length and by position."""
    edges = scales.edges
    for run in range(len(starts) - 1):
        lost = 0
        for t in range(starts[run], starts[run + 1]):
            lost += fates[t] > TRAINED
            if len(tokens.position) and fates[t] != OUTSIDE:
                place = _bucket(edges, tokens.position[t])
                found.position_tokens[place] += 1
                found.position_masked[place] += fates[t] > TRAINED
        place = _bucket(edges, lengths[run])
        found.length_tokens[place] += lengths[run]
        found.length_masked[place] += lost


@_compiled
def _bucket(edges, size):  # type: ignore[no-untyped-def]
    place = 0
    for edge in edges:
        place += size >= edge
    return place


@_compiled
def evaluate(  # type: ignore[no-untyped-def]
    rules, keep, scales, tokens, work, starts, lengths, everything, gradient, fates, found
):
    """-loss x Z; fills in `gradient` and `fates` and adds to `found`."""
    _judge(rules, keep, tokens, starts, lengths, work, fates)
    for t in range(len(fates)):
        found.by_fate[fates[t]] += 1
    if everything:
        _count(rules, tokens, work, fates, found)
        _spread(rules, scales, tokens, work, fates, found)
        _sizes(scales, tokens, starts, lengths, fates, found)
    return _shape(rules, tokens, starts, lengths, work, fates, gradient)
