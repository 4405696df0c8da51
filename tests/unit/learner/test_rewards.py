import numpy as np
import pytest

from learner.config import expand
from learner.rewards import shaped_rewards, zero_variance

DAPO = expand("dapo")


def test_the_overlong_penalty_is_linear_over_the_last_fifth():
    lengths = [10, 80, 85, 90, 99, 100]
    shaped = shaped_rewards([1.0] * 6, lengths, ["stop"] * 6, DAPO, max_tokens=100)
    np.testing.assert_allclose(shaped, [1.0, 1.0, 0.75, 0.5, 0.05, 0.0], atol=1e-12)


def test_a_cut_off_sample_has_the_whole_penalty_whatever_its_length():
    shaped = shaped_rewards([0.0, 1.0], [100, 40], ["length", "length"], DAPO, max_tokens=100)
    np.testing.assert_allclose(shaped, [-1.0, 0.0], atol=1e-12)


def test_the_penalty_is_bounded():
    shaped = shaped_rewards([0.0], [500], ["stop"], DAPO, max_tokens=100)
    assert shaped.tolist() == [-1.0]


def test_without_a_window_rewards_stay():
    shaped = shaped_rewards([0.5, 1.0], [100, 3], ["length", "stop"], expand("grpo"), 100)
    assert shaped.tolist() == [0.5, 1.0]


def test_a_missing_reward_stays_missing():
    shaped = shaped_rewards([None, 1.0], [100, 3], ["length", "stop"], DAPO, 100)
    assert np.isnan(shaped[0])
    assert shaped[1] == 1.0


@pytest.mark.parametrize(
    ("outcomes", "rewards", "flat"),
    [
        ([1.0, 1.0, 1.0], [1.0, 0.4, 0.9], True),
        ([1.0, 0.0], [0.5, 0.5], False),
        ([None, None], [0.3, 0.3], True),
        ([None, None], [0.3, 0.4], False),
        ([1.0, None], [0.0, 1.0], True),
        ([0.5, 0.5 + 5e-7], [0.0, 1.0], True),
        ([0.5, 0.5 + 2e-6], [0.0, 0.0], False),
        ([1.0, None], [1.0, None], True),
        ([0.0, None, 1.0], [0.0, None, 1.0], False),
        ([], [], True),
    ],
)
def test_zero_variance_is_judged_on_the_outcome_before_shaping(outcomes, rewards, flat):
    assert zero_variance(outcomes, rewards) is flat


def test_groups_of_different_length_columns_are_refused():
    with pytest.raises(ValueError, match="zip"):
        zero_variance([1.0], [1.0, 2.0])
