"""Micro-batch plans and packed rows: nothing lost, nothing split, budgets kept, all ranks alike."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.packing import length_buckets, plan_micro_batches, ragged_index

LENGTHS = st.lists(st.integers(1, 50), max_size=60)


@given(lengths=LENGTHS, ranks=st.integers(1, 5), budget=st.integers(1, 120))
def test_plan_is_complete_and_within_budget(lengths: list[int], ranks: int, budget: int) -> None:
    plan = plan_micro_batches(lengths, ranks, budget)
    assert len(plan) == ranks
    assert len({len(batches) for batches in plan}) == 1
    planned = [index for batches in plan for batch in batches for index in batch]
    assert sorted(planned) == list(range(len(lengths)))
    for batch in (batch for batches in plan for batch in batches):
        tokens = sum(lengths[index] for index in batch)
        assert tokens <= budget or len(batch) == 1


@given(lengths=LENGTHS.filter(bool), ranks=st.integers(1, 5))
def test_ranks_differ_by_at_most_one_sample(lengths: list[int], ranks: int) -> None:
    plan = plan_micro_batches(lengths, ranks, 64)
    loads = [sum(lengths[i] for batch in batches for i in batch) for batches in plan]
    assert max(loads) - min(loads) <= max(lengths)


def test_samples_of_like_length_share_a_micro_batch() -> None:
    plan = plan_micro_batches([2, 9, 2, 9, 2, 9], ranks=1, token_budget=18)
    assert plan == [[[1, 3], [5, 0, 2, 4]]]


def test_no_samples_no_micro_batches() -> None:
    assert plan_micro_batches([], ranks=2, token_budget=8) == [[], []]


def test_lengths_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        plan_micro_batches([3, 0], ranks=1, token_budget=8)


@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=40))
def test_buckets_cover_every_sequence_with_little_padding(lengths: list[int]) -> None:
    array = np.array(lengths)
    buckets = length_buckets(array)
    assert sorted(np.concatenate(buckets).tolist()) == list(range(len(lengths)))
    for bucket in buckets:
        longest, shortest = array[bucket[0]], array[bucket].min()
        assert longest == array[bucket].max()
        assert longest - shortest <= max(8, 0.2 * longest)


@given(runs=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), max_size=20))
def test_ragged_index_is_the_concatenated_ranges(runs: list[tuple[int, int]]) -> None:
    starts = np.array([start for start, _ in runs], np.int64)
    lengths = np.array([length for _, length in runs], np.int64)
    expected = [start + step for start, length in runs for step in range(length)]
    assert ragged_index(starts, lengths).tolist() == expected
