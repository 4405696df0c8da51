"""What passes between `learner.fused` and its compiled loops: a config, tokens and sums as numbers.

The loops hold the constants and the order of fields of this file; numba's cache notices a change of
their own file only, so touch both.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Sums = NDArray[np.float64]
Sides = tuple[np.float32, np.float32]
"""Of a token with A >= 0, and of one with A < 0."""

# The codes of TokenFate.
OUTSIDE, TRAINED, STALE, VETO, KEEP_LOW, KEEP_HIGH = range(6)
# Statistics of the mismatch.
TOKEN, PRODUCT, GEOMETRIC = range(3)
# Places in `Found.trained`; A = 0 is counted over the data mask, entropy over live tokens.
CURRENT, ADVANTAGE, PRODUCTS, WEIGHT, LAG, ZERO_ADVANTAGE, ENTROPY = range(7)
# Places in `Found.mass`; three clips begin at the last.
LEFT, BY_STALE, BY_VETO, BY_KEEP, BY_CAP, BY_CLIP = range(6)


class Rules(NamedTuple):
    """A config in numbers. What is off has a bound that nothing exceeds."""

    everything: bool
    max_lag: int
    per_sequence: bool
    of_sample: bool
    """Whether anything but a length is asked of a sample."""
    mismatch_of_sample: bool
    """Whether its mismatch is."""
    rejecting: bool
    by_mean: bool
    """Whether the ratio is of the sample; `pure`, whether the slope goes through its mean too."""
    pure: bool
    to_behavior: bool
    """Whether u is c - b; `own_ratio`, whether it is anything but c - p of the token."""
    own_ratio: bool
    cispo: bool
    unclipped: bool
    low: Sides
    """The lowest log-ratio, and the ratio there."""
    low_ratio: Sides
    high: Sides
    high_ratio: Sides
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
    scale: np.float32


class Keep(NamedTuple):
    """The keep intervals."""

    statistics: Ints
    low: Floats
    high: Floats


class Tokens(NamedTuple):
    """Fields of TokenBatch with the current log-probabilities; empty where there are none."""

    mask: Bools
    current: Floats
    behavior: Floats
    old: Floats
    advantages: Floats
    lag: Ints
    crossed: Bools
    position: Ints
    entropy: Floats


class Work(NamedTuple):
    """Per token, 0 where it is not live: c - p, p - b, u and the log weight, and exp of each; A
    where it trains; the weight within its cap; a; S times its factor. The same array may stand for
    two of them."""

    movement: Floats
    mismatch: Floats
    ratio: Floats
    log_weight: Floats
    movement_exp: Floats
    mismatch_exp: Floats
    ratio_exp: Floats
    weight_exp: Floats
    advantage: Floats
    weight: Floats
    share: Floats
    value: Floats


class Scales(NamedTuple):
    """Of `objective_metrics`."""

    lag_origins: Ints
    edges: Ints
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
    largest_lag: Sums
    position_tokens: Sums
    position_masked: Sums
    length_tokens: Sums
    length_masked: Sums


def compiled(function: Callable[..., Any], *also: str) -> Callable[..., Any]:
    """Compiled at the first call, and kept beside the source or in the user's cache; where neither
    can be written, in memory. A NaN is never assumed away: one in a masked place must not leak, and
    one inside the mask must not be hidden."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    options["fastmath"] = {"contract", *also}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        return numba.njit(**options)(function)


def summing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled, for loops that only sum: in any order, though always the same, so on vectors."""
    return compiled(function, "reassoc", "nsz")
