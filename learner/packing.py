"""Which rank and which micro-batch each sample goes to, and how samples share attention calls.

Pure arithmetic over lengths: knows neither tensors nor processes. Every rank computes the same
plan from the same lengths, so nothing about it has to be communicated.
"""

import heapq
from collections.abc import Sequence

import numpy as np

Plan = list[list[list[int]]]
"""Sample indices as [rank][micro-batch][position]."""

BUCKET_FILL = 0.8
BUCKET_SLACK_TOKENS = 8


def plan_micro_batches(lengths: Sequence[int], ranks: int, token_budget: int) -> Plan:
    """Spread samples over ranks by tokens, then over micro-batches of at most `token_budget`.

    A sample is never split: one that is longer than the budget gets a micro-batch of its own.
    Every rank gets the same number of micro-batches (so that collectives match), some of which
    may be empty; no sample at all gives no micro-batch. Samples of like length end up together,
    longest first. Deterministic. Raises ValueError on a length below 1.
    """
    if ranks < 1 or token_budget < 1:
        raise ValueError(f"ranks and token_budget start at 1, got {ranks} and {token_budget}")
    if any(length < 1 for length in lengths):
        raise ValueError("every sample needs at least one token")
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    shares = _share(order, lengths, ranks)
    plan = [split_by_budget(share, lengths, token_budget) for share in shares]
    most = max(map(len, plan))
    return [rows + [[] for _ in range(most - len(rows))] for rows in plan]


def _share(order: list[int], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Longest first, each to the rank with the fewest tokens so far."""
    if ranks == 1:
        return [order]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for index in order:
        load, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + lengths[index], rank))
    return shares


def split_by_budget(
    order: Sequence[int], lengths: Sequence[int], token_budget: int
) -> list[list[int]]:
    """Cut `order` into consecutive runs of at most `token_budget` tokens each."""
    runs: list[list[int]] = []
    room = 0
    for index in order:
        if not runs or lengths[index] > room:
            runs.append([])
            room = token_budget
        runs[-1].append(index)
        room -= lengths[index]
    return runs


def length_buckets(lengths: np.ndarray) -> list[np.ndarray]:
    """Indices of sequences that may be padded to one length, as a list of groups.

    Within a group the shortest is within `BUCKET_SLACK_TOKENS` of the longest or at least
    `BUCKET_FILL` of it, so that padding inside attention stays small.
    """
    order = np.argsort(-lengths, kind="stable")
    ordered = lengths[order]
    groups = []
    start = 0
    while start < len(order):
        longest = ordered[start]
        shortest = min(longest - BUCKET_SLACK_TOKENS, longest * BUCKET_FILL)
        end = int(np.searchsorted(-ordered, -shortest, side="right"))
        groups.append(order[start:end])
        start = end
    return groups


def ragged_index(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64 [lengths.sum()]: start, start + 1, … of each run, one run after the other."""
    lengths = lengths.astype(np.int64, copy=False)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
