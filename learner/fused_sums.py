"""The compiled loops of `learner.fused` that count and sum what is reported.

As `learner.diagnostics` defines it, over the arrays that `learner.fused_loops` has filled in. Sums
are float64, or float32 over a few hundred tokens at a time.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from learner.fused_types import (
    ADVANTAGE,
    BY_CAP,
    BY_CLIP,
    BY_KEEP,
    BY_STALE,
    BY_VETO,
    CURRENT,
    ENTROPY,
    LAG,
    LARGEST_LAG,
    LEFT,
    OUTSIDE,
    PRODUCTS,
    STALE,
    TRAINED,
    VETO,
    WEIGHT,
    ZERO_ADVANTAGE,
    compiled,
    summing,
)

ZERO, ONE = np.float32(0), np.float32(1)
FEW = 512
MAGNITUDE = np.int32(0x7FFFFFFF)


@compiled
def add_counts(fates, found):
    """How many tokens have each fate."""
    for fate in range(len(found.by_fate)):
        found.by_fate[fate] += _count(fates, 0, len(fates), fate)


@compiled
def add(rules, scales, tokens, starts, lengths, work, fates, found):
    """Everything else."""
    _add_trained(tokens, work, fates, found.trained)
    size = np.float64(0)
    for t in range(0, len(fates), FEW):
        size += _size(work, t, min(t + FEW, len(fates)))
    found.mass[LEFT] += size
    _add_clipped(rules, work, found.clipped, found.mass)
    capped = rules.weight >= 0 and _any_above(work.log_weight, rules.capped_above)
    if capped or _count(fates, 0, len(fates), OUTSIDE, TRAINED) < len(fates):
        _add_lost(rules, tokens, work, fates, found.mass)
    _by_origin(rules, scales, tokens, work, fates, capped, found)
    _by_size(scales, tokens, starts, lengths, fates, found)


@summing
def _count(fates, begin, end, *which):
    number = 0
    for t in range(begin, end):
        for fate in which:
            number += fates[t] == fate
    return number


@summing
def _any_above(values, bound):
    number = 0
    for t in range(len(values)):
        number += values[t] > bound
    return number > 0


@summing
def _size(work, begin, end):
    """Σ|wA| of the trained."""
    size = ZERO
    for t in range(begin, end):
        size += abs(work.advantage[t]) * work.weight[t]
    return size


@summing
def _add_trained(tokens, work, fates, trained):
    current, advantage, product, weight = 0.0, 0.0, 0.0, 0.0
    for t in range(len(fates)):
        c = np.float64(tokens.current[t] if fates[t] == TRAINED else ZERO)
        a = np.float64(work.advantage[t])
        current += c
        advantage += a
        product += c * a
        weight += work.weight[t] if fates[t] == TRAINED else ZERO
    trained[CURRENT] += current
    trained[ADVANTAGE] += advantage
    trained[PRODUCTS] += product
    trained[WEIGHT] += weight
    zeros = 0
    for t in range(len(fates)):
        zeros += (fates[t] != OUTSIDE) & (tokens.advantages[t] == 0)
    trained[ZERO_ADVANTAGE] += zeros
    if len(tokens.lag):
        lag, largest = 0, 0
        for t in range(len(fates)):
            own = tokens.lag[t] if fates[t] == TRAINED else 0
            lag += own
            largest = max(largest, own)
        trained[LAG] += lag
        trained[LARGEST_LAG] = max(trained[LARGEST_LAG], np.float64(largest))
    if len(tokens.entropy):
        entropy = 0.0
        for t in range(len(fates)):
            live = (fates[t] != OUTSIDE) & (fates[t] != STALE)
            entropy += tokens.entropy[t] if live else ZERO
        trained[ENTROPY] += entropy


@compiled
def _add_clipped(rules, work, clipped, mass):
    for t in range(len(work.ratio)):
        side = 1 if work.advantage[t] < 0 else 0
        log_ratio = work.ratio[t]
        if log_ratio >= rules.low[side] and log_ratio <= rules.high[side]:
            continue
        if work.advantage[t] == 0:
            continue
        by = 0
        if log_ratio > rules.high[side]:
            by = 2 if side == 1 and not rules.cispo else 1
        clipped[by] += 1
        if not rules.cispo:
            mass[BY_CLIP + by] += abs(work.advantage[t]) * work.weight[t]


@compiled
def _add_lost(rules, tokens, work, fates, mass):
    """The gradient mass that staleness, rejections and the cap take."""
    for t in range(len(fates)):
        fate = fates[t]
        if fate == OUTSIDE:
            continue
        size = abs(tokens.advantages[t])
        if fate == STALE:
            mass[BY_STALE] += size
            continue
        full = ONE
        if rules.weight >= 0:
            large = work.log_weight[t] > rules.largest_log
            full = rules.largest if large else work.weight_exp[t]
        if fate != TRAINED:
            mass[BY_VETO if fate == VETO else BY_KEEP] += size * full
        elif rules.weight >= 0 and work.log_weight[t] > rules.capped_above:
            mass[BY_CAP] += size * (full - work.weight[t])


@compiled
def _by_origin(rules, scales, tokens, work, fates, capped, found):
    """Stretches of tokens of the same origin."""
    end, size = 0, len(fates)
    lag, crossed = tokens.lag, tokens.crossed
    while end < size:
        begin, end = end, size
        origin = 0
        if len(lag):
            origin = scales.lag_origins[min(max(lag[begin], 0), len(scales.lag_origins) - 1)]
            end = _same(lag, begin, end)
        if len(crossed):
            end = _same(crossed, begin, end)
            origin = len(found.origin_fates) - 1 if crossed[begin] else origin
        codes = found.origin_fates[origin]
        for code in range(len(codes) - 1):
            codes[code] += _count(fates, begin, end, code + 1)
        if capped:
            for t in range(begin, end):
                if fates[t] == TRAINED and work.log_weight[t] > rules.capped_above:
                    codes[len(codes) - 1] += 1
                    codes[0] -= 1
        if len(tokens.old):
            outside = _count(fates, begin, end, OUTSIDE, STALE)
            for part in range(2):
                values = work.movement if part == 0 else work.mismatch
                exps = work.movement_exp if part == 0 else work.mismatch_exp
                for t in range(begin, end, FEW):
                    few = slice(t, min(t + FEW, end))
                    _add_moments(rules, values[few], exps[few], found.moments[part, origin])
                bins = found.bins[part, origin]
                _add_bins(scales, values[begin:end].view(np.int32), bins)
                bins[0] -= outside
                largest = _largest(values[begin:end].view(np.int32))
                found.largest[part, origin] = max(found.largest[part, origin], largest)
            _add_old_slope(tokens, work, fates, begin, end, found.old_slope)


@compiled
def _same(values, begin, end):
    """End of the stretch of equal values."""
    first = values[begin]
    t = begin + 1
    while t < end and values[t] == first:
        t += 1
    return t


@summing
def _add_moments(rules, values, exps, moments):
    """See MOMENTS. exp(d) - 1 - d is a series where d is small, so that it keeps its digits."""
    log, magnitude, excess, excess_sq, k3 = ZERO, ZERO, ZERO, ZERO, ZERO
    for t in range(len(values)):
        d = min(values[t], rules.largest_log)
        series = np.float32(1 / 5040) + d * np.float32(1 / 40320)
        series = np.float32(1 / 720) + d * series
        series = np.float32(1 / 120) + d * series
        series = np.float32(1 / 24) + d * series
        series = np.float32(1 / 6) + d * series
        series = d * d * (np.float32(1 / 2) + d * series)
        large = rules.largest if values[t] > rules.largest_log else exps[t]
        rest = series if abs(d) < np.float32(0.5) else large - ONE - d
        more = d + rest
        log += values[t]
        magnitude += abs(values[t])
        excess += more
        excess_sq += more * more
        k3 += rest
    moments[0] += log
    moments[1] += magnitude
    moments[2] += excess
    moments[3] += excess_sq
    moments[4] += k3


@compiled
def _add_bins(scales, bits, bins):
    """By the bits of float32. Four counters a bin: neighbours often fall in the same one, and the
    next count need not wait for the last."""
    counts = np.zeros((4, len(bins)), np.int32)
    first, last = np.int32(scales.first_bin), np.int32(len(bins) - 1)
    for t in range(len(bits)):
        place = np.int32(((bits[t] & MAGNITUDE) >> np.int32(21)) - first)
        counts[t & 3, min(max(place, np.int32(0)), last)] += 1
    for place in range(len(bins)):
        bins[place] += counts[0, place] + counts[1, place] + counts[2, place] + counts[3, place]


@summing
def _largest(bits):
    """The largest magnitude: the bits of float32 are in its order."""
    largest = np.int32(0)
    for t in range(len(bits)):
        largest = max(largest, np.int32(bits[t] & MAGNITUDE))
    return np.int32(largest).view(np.float32)


@summing
def _add_old_slope(tokens, work, fates, begin, end, slope):
    p, p_sq, cross, d_sq = 0.0, 0.0, 0.0, 0.0
    for t in range(begin, end):
        live = (fates[t] != OUTSIDE) & (fates[t] != STALE)
        old, d = np.float64(tokens.old[t] if live else ZERO), np.float64(work.mismatch[t])
        p += old
        p_sq += old * old
        cross += old * d
        d_sq += d * d
    slope[0] += p
    slope[1] += p_sq
    slope[2] += cross
    slope[3] += d_sq


@compiled
def _by_size(scales, tokens, starts, lengths, fates, found):
    """Tokens in the data mask and those that a policy mask took, by length and by position."""
    edges = scales.edges
    for run in range(len(starts) - 1):
        lost = lengths[run] - _count(fates, starts[run], starts[run + 1], TRAINED)
        place = _bucket(edges, lengths[run])
        found.length_tokens[place] += lengths[run]
        found.length_masked[place] += lost
    if len(tokens.position):
        for t in range(len(fates)):
            if fates[t] != OUTSIDE:
                place = _bucket(edges, tokens.position[t])
                found.position_tokens[place] += 1
                found.position_masked[place] += fates[t] > TRAINED


@compiled
def _bucket(edges, size):
    place = 0
    for edge in edges:
        place += size >= edge
    return place
