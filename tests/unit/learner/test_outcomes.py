import pytest

from learner.batch import GroupEntry
from learner.outcomes import outcome_summary


def group(outcomes, rewards, ok, lengths, truncated=None):
    size = len(ok)
    names = tuple(f"s{i}" for i in range(size))
    truncated = truncated or (False,) * size
    return GroupEntry(0, None, names, 3, lengths, rewards, outcomes, ok, truncated)


def test_lengths_and_groups_by_outcome():
    groups = [
        group((1.0, 0.0), (0.5, 0.0), (True, True), (10, 30), (False, True)),
        group((1.0, None), (1.0, None), (True, False), (20, 99)),
        group((None, 0.0), (0.0, 0.0), (True, True), (50, 70)),
    ]
    assert outcome_summary(groups) == pytest.approx(
        {
            "truncated_share": 1 / 6,
            "reward_mean": 1.5 / 5,
            "outcome_mean": 2 / 5,
            "groups_all_right": 1,
            "groups_all_wrong": 1,
            "length_mean_right": 15,
            "length_mean_wrong": 50,
        }
    )


def test_what_no_sample_tells_of_is_absent():
    assert outcome_summary([]) == {}
    unscored = group((None,), (None,), (False,), (5,))
    assert outcome_summary([unscored]) == {"truncated_share": 0.0}
