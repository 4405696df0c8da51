"""Which changes a run can be continued with."""

from orchestrator.history.resuming import differences, refusals


def test_differences_name_the_key_and_both_values() -> None:
    before = {"steps": 4, "learner": {"ranks": 1, "optimizer": {"lr": 1e-3, "eps": 1e-8}}}
    now = {"steps": 8, "learner": {"ranks": 1, "optimizer": {"lr": 1e-4, "eps": 1e-8}}}
    assert differences(before, now) == {
        "steps": (4, 8),
        "learner.optimizer.lr": (1e-3, 1e-4),
    }


def test_equal_configurations_have_no_differences() -> None:
    assert differences({"a": {"b": [1, 2]}}, {"a": {"b": [1, 2]}}) == {}


def test_a_key_that_another_version_knows_is_no_difference() -> None:
    assert differences({"old": 1, "a": 2}, {"a": 2, "new": 3}) == {}


def test_length_fleet_and_watching_may_change() -> None:
    changes = {
        "steps": (4, 8),
        "rollout.workers": (1, 3),
        "rollout.resources": ({}, {"node": 1.0}),
        "evaluation.every": (0, 5),
        "checkpoint.keep": (2, 3),
        "supervision.attempts": (5, 2),
    }
    assert refusals(changes) == []


def test_what_shapes_samples_or_updates_may_not() -> None:
    changes = {
        "seed": (0, 1),
        "rollout.sampling.temperature": (1.0, 0.7),
        "learner.optimizer.lr": (1e-3, 1e-4),
        "steps": (4, 8),
    }
    told = [str(problem) for problem in refusals(changes)]
    assert [text.partition(":")[0] for text in told] == [
        "seed",
        "rollout.sampling.temperature",
        "learner.optimizer.lr",
    ]
    assert "0.7 is not what the run was started with; expected 1.0." in told[1]
