"""The compiled loops of `learner.fused` that make the value and the gradient.

Every array of a call is of the same part of a batch; sample r of it has the tokens [starts[r],
starts[r + 1]), `lengths[r]` of them in the data mask. Steps are those of the modules that define
them (token_batch, correction, ratio, objective), in their order and in float32, so that decisions
at a bound agree. A loop writes one array and branches little: that runs on vectors.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np

from learner.fused_types import (
    KEEP_HIGH,
    KEEP_LOW,
    OUTSIDE,
    PRODUCT,
    STALE,
    TOKEN,
    TRAINED,
    VETO,
    compiled,
    summing,
)

ZERO, ONE = np.float32(0), np.float32(1)
# exp, after Cephes: x = n log 2 + f, with log 2 in two parts and rounding by a large constant.
LOG2_E, LOG_2, LOG_2_REST = (
    np.float32(1.44269504),
    np.float32(0.693359375),
    np.float32(-2.12194440e-4),
)
ROUNDING = np.float32(12582912)
LOWEST, HIGHEST = np.float32(-103.9), np.float32(88.72284)


@compiled
def find_samples(index, mask, num_samples, starts, lengths):
    """Fill in the samples that have tokens, and return their number; -1 where an index is
    smaller than the one before or none of [0, num_samples). A masked token may have any index and
    goes with the sample before it."""
    found, known = -1, np.int64(-1)
    for t in range(len(index)):
        if index[t] != known and mask[t]:
            if index[t] < known or index[t] >= num_samples:
                return -1
            known = index[t]
            found += 1
            starts[found] = t
            lengths[found] = 0
        if found >= 0:
            lengths[found] += mask[t]
    if found < 0:
        found, lengths[0] = 0, 0
    starts[0], starts[found + 1] = 0, len(index)
    return found + 1


@compiled
def evaluate(rules, keep, tokens, starts, lengths, work, gradient, fates):
    """-loss x Z; fills in `work`, `gradient` and `fates`."""
    _mask_stale(rules, tokens, starts, fates)
    if len(tokens.old):
        _difference(tokens.current, tokens.old, fates, work.movement)
        _difference(tokens.old, tokens.behavior, fates, work.mismatch)
    else:
        work.mismatch[:] = ZERO
    if rules.own_ratio:
        other = tokens.behavior if rules.to_behavior else tokens.old
        _difference(tokens.current, other, fates, work.ratio)
    if rules.everything and len(tokens.old):
        _exp(work.movement, work.movement_exp)
        _exp(work.mismatch, work.mismatch_exp)
    elif rules.weight == TOKEN:
        _exp(work.mismatch, work.weight_exp)
    if not rules.by_mean and (rules.own_ratio or not rules.everything):
        _exp(work.ratio, work.ratio_exp)
    if rules.of_sample or rules.rejecting:
        _judge(rules, keep, starts, lengths, work, fates)
    _advantages(tokens.advantages, fates, work.advantage)
    _weights(rules, work.log_weight, work.weight_exp, work.weight)
    _shares(rules, starts, lengths, work.share)
    _values(rules, work)
    if rules.weight >= 0 and not np.isfinite(_sum(work.value)):
        _multiply_in_log_space(rules, work)
    _slopes(rules, work, gradient)
    if rules.pure:
        _through_the_mean(rules, starts, lengths, fates, gradient)
    return _total(rules, tokens, work, fates)


@compiled
def _mask_stale(rules, tokens, starts, fates):
    """Fates before the correction."""
    mask, lag = tokens.mask, tokens.lag
    if not len(lag):
        for t in range(len(fates)):
            fates[t] = mask[t] * TRAINED
        return
    for t in range(len(fates)):
        fates[t] = mask[t] * (STALE if lag[t] > rules.max_lag else TRAINED)
    if rules.per_sequence and _stale(fates, 0, len(fates)):
        for run in range(len(starts) - 1):
            if _stale(fates, starts[run], starts[run + 1]):
                for t in range(starts[run], starts[run + 1]):
                    fates[t] = mask[t] * STALE


@summing
def _stale(fates, begin, end):
    number = np.int32(0)
    for t in range(begin, end):
        number += np.int32(fates[t] == STALE)
    return number > 0


@compiled
def _difference(left, right, fates, out):
    for t in range(len(out)):
        difference = left[t] - right[t]
        out[t] = difference if fates[t] == TRAINED else ZERO


@compiled
def _exp(values, out):
    """exp of float32, to an ulp."""
    for t in range(len(out)):
        x = values[t]
        bounded = min(max(x, LOWEST), HIGHEST)
        n = (bounded * LOG2_E + ROUNDING) - ROUNDING
        f = (bounded - n * LOG_2) - n * LOG_2_REST
        p = np.float32(1.9875691500e-4)
        p = p * f + np.float32(1.3981999507e-3)
        p = p * f + np.float32(8.3334519073e-3)
        p = p * f + np.float32(4.1665795894e-2)
        p = p * f + np.float32(1.6666665459e-1)
        p = p * f + np.float32(5.0000001201e-1)
        # 2 ** n in two factors: one alone leaves the range of normal numbers at both ends.
        half = np.int32(np.int32(n) >> np.int32(1))
        rest = np.int32(np.int32(n) - half)
        power = np.int32((half + np.int32(127)) << np.int32(23)).view(np.float32)
        power_rest = np.int32((rest + np.int32(127)) << np.int32(23)).view(np.float32)
        y = (p * f * f + f + ONE) * power * power_rest
        y = np.float32(np.inf) if x > HIGHEST else y
        y = ZERO if x < LOWEST else y
        out[t] = y if x == x else x


@compiled
def _judge(rules, keep, starts, lengths, work, fates):
    """Rejections, and the ratio and the weight where they are of the sample."""
    for run in range(len(starts) - 1):
        begin, end = starts[run], starts[run + 1]
        product, geometric, vetoed = ZERO, ZERO, False
        if rules.of_sample:
            length = np.float32(max(lengths[run], 1))
            product, vetoed = _of_sample(rules, begin, end, length, work, fates)
            geometric = product / length
        if vetoed:
            for t in range(begin, end):
                fates[t] = VETO if fates[t] == TRAINED else fates[t]
        for k in range(len(keep.statistics)):
            low, high = keep.low[k], keep.high[k]
            if keep.statistics[k] != TOKEN:
                value = product if keep.statistics[k] == PRODUCT else geometric
                for t in range(begin, end):
                    fates[t] = _kept(value, low, high, fates[t])
    for k in range(len(keep.statistics)):
        if keep.statistics[k] == TOKEN:
            mismatch, low, high = work.mismatch, keep.low[k], keep.high[k]
            for t in range(len(fates)):
                fates[t] = _kept(mismatch[t], low, high, fates[t])


@compiled
def _of_sample(rules, begin, end, length, work, fates):
    """The sample's log mismatch and whether it has a vetoed token. Sums are in the order of
    tokens, as torch has them."""
    mismatch, vetoed = ZERO, False
    if rules.by_mean:
        moved = ZERO
        for t in range(begin, end):
            moved += work.ratio[t]
        mean = moved / length
        work.ratio[begin:end] = mean
        work.ratio_exp[begin:end] = np.exp(mean)
    if rules.mismatch_of_sample:
        for t in range(begin, end):
            mismatch += work.mismatch[t]
            vetoed |= fates[t] == TRAINED and work.mismatch[t] < rules.veto
    if rules.weight > TOKEN:
        log_weight = mismatch if rules.weight == PRODUCT else mismatch / length
        work.log_weight[begin:end] = log_weight
        work.weight_exp[begin:end] = np.exp(log_weight)
    return mismatch, vetoed


@compiled
def _kept(value, low, high, fate):
    """The fate after an interval; below comes before above."""
    fate = np.uint8(KEEP_HIGH) if (value > high) & (fate == TRAINED) else fate
    below = (value < low) & ((fate == TRAINED) | (fate == KEEP_HIGH))
    return np.uint8(KEEP_LOW) if below else fate


@compiled
def _advantages(advantages, fates, out):
    for t in range(len(out)):
        own = advantages[t]
        out[t] = own if fates[t] == TRAINED else ZERO


@compiled
def _weights(rules, log_weight, weight_exp, out):
    if rules.weight < 0:
        out[:] = ONE
        return
    for t in range(len(out)):
        weight = weight_exp[t]
        out[t] = rules.cap if log_weight[t] > rules.log_cap else weight


@compiled
def _shares(rules, starts, lengths, out):
    if not rules.by_length:
        out[:] = ONE
        return
    for run in range(len(starts) - 1):
        out[starts[run] : starts[run + 1]] = ONE / np.float32(max(lengths[run], 1))


@compiled
def _values(rules, work):
    """The bounded ratio times everything that weighs a token. An unbounded ratio that overflows
    would make NaN of A = 0."""
    advantage, weight, share, out = work.advantage, work.weight, work.share, work.value
    ratio, ratio_exp = work.ratio, work.ratio_exp
    low, high, low_ratio, high_ratio = rules.low, rules.high, rules.low_ratio, rules.high_ratio
    if rules.unclipped:
        for t in range(len(out)):
            factor = advantage[t] * weight[t] * share[t]
            out[t] = ZERO if advantage[t] == 0 else ratio_exp[t] * factor
        return
    for t in range(len(out)):
        own, u, r, w, a = advantage[t], ratio[t], ratio_exp[t], weight[t], share[t]
        negative = own < 0
        lowest, highest = low[1] if negative else low[0], high[1] if negative else high[0]
        at_lowest = low_ratio[1] if negative else low_ratio[0]
        at_highest = high_ratio[1] if negative else high_ratio[0]
        r = at_lowest if u < lowest else r
        r = at_highest if u > highest else r
        factor = own * w * a
        out[t] = r * (ZERO if own == 0 else factor)


@summing
def _sum(values):
    total = ZERO
    for t in range(len(values)):
        total += values[t]
    return total


@compiled
def _multiply_in_log_space(rules, work):
    """The values that are not finite again: one of r and w may overflow while the other
    underflows, and their product does neither."""
    for t in range(len(work.value)):
        own = work.advantage[t]
        if own == 0 or np.isfinite(work.value[t]):
            continue
        u, side = work.ratio[t], 1 if own < 0 else 0
        if not rules.unclipped and u < rules.low[side]:
            u = np.log(rules.low_ratio[side])
        elif not rules.unclipped and u > rules.high[side]:
            u = np.log(rules.high_ratio[side])
        log_weight = work.log_weight[t]
        log_weight = rules.log_cap if log_weight > rules.log_cap else log_weight
        work.value[t] = np.exp(u + log_weight) * (own * work.share[t])


@compiled
def _slopes(rules, work, gradient):
    """The scaled derivatives: the values, but 0 where a clip makes the surrogate flat."""
    advantage, ratio, value = work.advantage, work.ratio, work.value
    low, high, scale = rules.low, rules.high, rules.scale
    if rules.cispo:
        for t in range(len(gradient)):
            gradient[t] = value[t] * scale
        return
    for t in range(len(gradient)):
        u, slope, negative = ratio[t], value[t] * scale, advantage[t] < 0
        lowest, highest = low[1] if negative else low[0], high[1] if negative else high[0]
        gradient[t] = slope if (u >= lowest) & (u <= highest) else ZERO


@compiled
def _through_the_mean(rules, starts, lengths, fates, gradient):
    for run in range(len(starts) - 1):
        slope = ZERO
        for t in range(starts[run], starts[run + 1]):
            slope += gradient[t]
        mean = slope / np.float32(max(lengths[run], 1))
        for t in range(starts[run], starts[run + 1]):
            gradient[t] = ZERO if fates[t] == OUTSIDE or fates[t] == STALE else mean


@summing
def _total(rules, tokens, work, fates):
    total = 0.0
    if not rules.cispo:
        for t in range(len(fates)):
            total += np.float64(work.value[t])
        return total
    for t in range(len(fates)):
        live = (fates[t] != OUTSIDE) & (fates[t] != STALE)
        own = work.value[t] * tokens.current[t]
        total += np.float64(own if live else ZERO)
    return total
