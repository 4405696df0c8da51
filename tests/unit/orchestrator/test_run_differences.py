"""What a resumed run is told about a configuration that is not the one it began with."""

from orchestrator.run import differences


def test_changed_new_and_missing_keys_are_named_with_both_values() -> None:
    before = {"steps": 4, "learner": {"optimizer": {"lr": 1e-4}, "ranks": 1}, "gone": 1}
    now = {"steps": 8, "learner": {"optimizer": {"lr": 3e-4}, "ranks": 1}, "new": 2}
    assert differences(before, now) == [
        "gone 1 -> None",
        "learner.optimizer.lr 0.0001 -> 0.0003",
        "new None -> 2",
        "steps 4 -> 8",
    ]


def test_equal_configurations_have_no_differences() -> None:
    assert differences({"a": {"b": [1, 2]}}, {"a": {"b": [1, 2]}}) == []
