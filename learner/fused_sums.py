"""The compiled loops of `learner.fused` that count and sum what is reported.

As `learner.diagnostics` defines it, over the arrays that `learner.fused_loops` has filled in. Sums
are float64, or float32 over a few hundred tokens at a time.
"""

# mypy: disable-error-code="no-untyped-def,assignment"

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
    """Everything else; `found` has the counts of this part, and nothing of another."""
    _add_trained(tokens, work, fates, found.trained)
    if len(tokens.lag):
        _add_lags(tokens.lag, fates, found.trained, found.largest_lag)
    for t in range(0, len(fates), FEW):
        few = slice(t, min(t + FEW, len(fates)))
        advantages, weights = work.advantage[few], work.weight[few]
        found.mass[LEFT] += _size(advantages, weights)
        _add_clipped(rules, work.ratio[few], advantages, weights, found.clipped, found.mass)
    capped = rules.weight >= 0 and _any_above(work.log_weight, rules.capped_above)
    lost = found.by_fate[STALE:].sum() > 0
    if capped or lost:
        _add_lost(rules, tokens, work, fates, found.mass)
    if len(tokens.old):
        _add_old_slope(tokens.old, work.mismatch, fates, found.old_slope)
    _by_origin(rules, scales, tokens, work, fates, lost, capped, found)
    _by_size(scales, tokens, starts, lengths, fates, lost, found)


@summing
def _count(fates, begin, end, fate):
    number = np.int32(0)
    for t in range(begin, end):
        number += np.int32(fates[t] == fate)
    return number


@summing
def _any_above(values, bound):
    number = 0
    for t in range(len(values)):
        number += values[t] > bound
    return number > 0


@summing
def _size(advantages, weights):
    """Σ|wA| of the trained."""
    size = ZERO
    for t in range(len(weights)):
        own = abs(advantages[t]) * weights[t]
        size += ZERO if advantages[t] == 0 else own
    return size


@summing
def _add_trained(tokens, work, fates, trained):
    current, advantages, weights = tokens.current, work.advantage, work.weight
    c_sum, a_sum, products, w_sum = 0.0, 0.0, 0.0, 0.0
    for t in range(len(fates)):
        kept, own, weight = fates[t] == TRAINED, current[t], weights[t]
        c, a = np.float64(own if kept else ZERO), np.float64(advantages[t])
        c_sum += c
        a_sum += a
        products += c * a
        w_sum += np.float64(weight if kept else ZERO)
    trained[CURRENT] += c_sum
    trained[ADVANTAGE] += a_sum
    trained[PRODUCTS] += products
    trained[WEIGHT] += w_sum
    zeros = 0
    for t in range(len(fates)):
        zeros += (fates[t] != OUTSIDE) & (tokens.advantages[t] == 0)
    trained[ZERO_ADVANTAGE] += zeros
    if len(tokens.entropy):
        entropies, entropy = tokens.entropy, 0.0
        for t in range(len(fates)):
            own, live = entropies[t], (fates[t] != OUTSIDE) & (fates[t] != STALE)
            entropy += np.float64(own if live else ZERO)
        trained[ENTROPY] += entropy


@summing
def _add_lags(lags, fates, trained, largest_lag):
    total, largest = 0, 0
    for t in range(len(fates)):
        own = lags[t] * (fates[t] == TRAINED)
        total += own
        largest = max(largest, own)
    trained[LAG] += total
    largest_lag[0] = max(largest_lag[0], np.float64(largest))


@summing
def _add_clipped(rules, ratios, advantages, weights, clipped, mass):
    low, high = rules.low, rules.high
    below, above, dual = 0, 0, 0
    below_size, above_size, dual_size = ZERO, ZERO, ZERO
    for t in range(len(ratios)):
        u, advantage, weight = ratios[t], advantages[t], weights[t]
        negative = advantage < 0
        lowest, highest = low[1] if negative else low[0], high[1] if negative else high[0]
        over = u > highest
        flat = (advantage != 0) & (over | (not u >= lowest))
        size = abs(advantage) * weight
        of_low, of_dual = flat & (not over), flat & over & negative
        of_high = flat & over & (not negative)
        below += np.int32(of_low)
        above += np.int32(of_high)
        dual += np.int32(of_dual)
        below_size += size if of_low else ZERO
        above_size += size if of_high else ZERO
        dual_size += size if of_dual else ZERO
    clipped[0] += below
    if rules.cispo:
        clipped[1] += above + dual
        return
    clipped[1] += above
    clipped[2] += dual
    mass[BY_CLIP] += below_size
    mass[BY_CLIP + 1] += above_size
    mass[BY_CLIP + 2] += dual_size


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
def _by_origin(rules, scales, tokens, work, fates, lost, capped, found):
    """Stretches of tokens of the same origin."""
    end, size = 0, len(fates)
    lag, crossed = tokens.lag, tokens.crossed
    parts, origins, bins = found.bins.shape
    counts = np.zeros((parts, origins, 2, bins), np.int32)
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
        live = 0
        for code in range(len(codes) - 1 if lost else 1):
            number = _count(fates, begin, end, code + 1)
            codes[code] += number
            live += number if code + 1 != STALE else 0
        if capped:
            for t in range(begin, end):
                if fates[t] == TRAINED and work.log_weight[t] > rules.capped_above:
                    codes[len(codes) - 1] += 1
                    codes[0] -= 1
        if len(tokens.old):
            masked = end - begin - live
            for part in range(2):
                values = work.movement if part == 0 else work.mismatch
                exps = work.movement_exp if part == 0 else work.mismatch_exp
                for t in range(begin, end, FEW):
                    few = slice(t, min(t + FEW, end))
                    _add_moments(rules, values[few], exps[few], found.moments[part, origin])
                _add_bins(scales, values[begin:end].view(np.int32), counts[part, origin])
                counts[part, origin, 0, 0] -= masked
                largest = _largest(values[begin:end].view(np.int32))
                if largest > found.largest[part, origin] or largest != largest:
                    found.largest[part, origin] = largest
    for part in range(parts):
        for origin in range(origins):
            found.bins[part, origin] += counts[part, origin, 0] + counts[part, origin, 1]


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
        value, large = values[t], exps[t]
        d = rules.largest_log if value > rules.largest_log else value
        large = rules.largest if value > rules.largest_log else large
        series = np.float32(1 / 5040) + d * np.float32(1 / 40320)
        series = np.float32(1 / 720) + d * series
        series = np.float32(1 / 120) + d * series
        series = np.float32(1 / 24) + d * series
        series = np.float32(1 / 6) + d * series
        series = d * d * (np.float32(1 / 2) + d * series)
        rest = series if abs(d) < np.float32(0.5) else large - ONE - d
        more = d + rest
        log += value
        magnitude += abs(value)
        excess += more
        excess_sq += more * more
        k3 += rest
    moments[0] += log
    moments[1] += magnitude
    moments[2] += excess
    moments[3] += excess_sq
    moments[4] += k3


@compiled
def _add_bins(scales, bits, counts):
    """By the bits of float32. Two counters a bin: neighbours often fall in the same one, and the
    next count need not wait for the last."""
    first, last = np.int32(scales.first_bin), np.int32(counts.shape[1] - 1)
    for t in range(len(bits)):
        place = np.int32(((bits[t] & MAGNITUDE) >> np.int32(21)) - first)
        counts[t & 1, min(max(place, np.int32(0)), last)] += 1


@summing
def _largest(bits):
    """The largest magnitude: the bits of float32 are in its order."""
    largest = np.int32(0)
    for t in range(len(bits)):
        largest = max(largest, np.int32(bits[t] & MAGNITUDE))
    return np.int32(largest).view(np.float32)


@summing
def _add_old_slope(old, mismatch, fates, slope):
    p_sum, p_sq, cross, d_sq = 0.0, 0.0, 0.0, 0.0
    for t in range(len(fates)):
        own, live = old[t], (fates[t] != OUTSIDE) & (fates[t] != STALE)
        p, d = np.float64(own if live else ZERO), np.float64(mismatch[t])
        p_sum += p
        p_sq += p * p
        cross += p * d
        d_sq += d * d
    slope[0] += p_sum
    slope[1] += p_sq
    slope[2] += cross
    slope[3] += d_sq


@compiled
def _by_size(scales, tokens, starts, lengths, fates, lost, found):
    """Tokens in the data mask and those that a policy mask took, by length and by position."""
    edges = scales.edges
    for run in range(len(starts) - 1):
        place = _bucket(edges, lengths[run])
        found.length_tokens[place] += lengths[run]
        if lost:
            trained = _count(fates, starts[run], starts[run + 1], TRAINED)
            found.length_masked[place] += lengths[run] - trained
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
