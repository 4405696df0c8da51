"""The autoscaling controller: what it moves, what it leaves alone, and that it does not flap."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.autoscaler import Autoscaler, Load
from orchestrator.operation_config import AutoscalerConfig
from orchestrator.steering import Role

PERIOD_S, COOLDOWN_S = 10.0, 60.0


def make_config(**changes: Any) -> AutoscalerConfig:
    content: dict[str, Any] = {
        "enabled": True,
        "rollout": {"min_workers": 1, "max_workers": 8},
        "verifiers": {"min_workers": 1, "max_workers": 8},
        "period_s": PERIOD_S,
        "patience": 3,
        "cooldown_s": COOLDOWN_S,
    }
    return AutoscalerConfig.model_validate(content | changes)


def make_load(**changes: float) -> Load:
    values = {
        "learner_idle": 0.1,
        "rollout_busy": 0.9,
        "verifiers_busy": 0.5,
        "admission_blocked": 0.0,
    }
    return Load(**(values | changes))


def play(
    loads: list[Load], rollout: int = 2, verifiers: int = 2, settled: bool = True
) -> list[tuple[Role, int]]:
    """Targets chosen while the loads come in, one per period."""
    controller = Autoscaler(make_config())
    targets = {Role.ROLLOUT: rollout, Role.VERIFIER: verifiers, Role.LEARNER: 1}
    chosen = []
    for look, load in enumerate(loads):
        reached = dict.fromkeys(targets, settled)
        for change in controller.decide(load, targets, reached, look * PERIOD_S):
            assert change.why
            targets[change.role] = change.target
            chosen.append((change.role, change.target))
    return chosen


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (make_load(learner_idle=0.6), [(Role.ROLLOUT, 3)]),
        (make_load(learner_idle=0.6, verifiers_busy=0.95), [(Role.VERIFIER, 3)]),
        (make_load(learner_idle=0.6, admission_blocked=0.9), []),
        (make_load(learner_idle=0.6, rollout_busy=0.3, verifiers_busy=0.1), []),
        (make_load(learner_idle=0.0, rollout_busy=0.3), [(Role.ROLLOUT, 1)]),
        (make_load(learner_idle=0.0, rollout_busy=0.6), []),
        (make_load(learner_idle=0.0, verifiers_busy=0.05), [(Role.VERIFIER, 1)]),
        (make_load(learner_idle=0.15), []),
    ],
    ids=[
        "starved",
        "verifiers",
        "staleness bound",
        "idle workers",
        "spare",
        "one too few",
        "verifiers spare",
        "gap",
    ],
)
def test_what_moves(load: Load, expected: list[tuple[Role, int]]) -> None:
    assert play([load] * 3) == expected


def test_looks_must_agree_in_a_row() -> None:
    starved, fine = make_load(learner_idle=0.6), make_load(learner_idle=0.1)
    assert play([starved, starved, fine] * 5) == []


def test_a_fleet_that_is_still_moving_is_left_alone() -> None:
    assert play([make_load(learner_idle=0.6)] * 10, settled=False) == []


def test_between_two_changes_lies_the_cooldown() -> None:
    steps = int(COOLDOWN_S / PERIOD_S)
    assert len(play([make_load(learner_idle=0.6)] * (2 + steps))) == 1
    assert len(play([make_load(learner_idle=0.6)] * (3 + steps))) == 2


def test_bounds_hold() -> None:
    starved, spare = make_load(learner_idle=0.9), make_load(learner_idle=0.0, rollout_busy=0.0)
    assert max(target for _, target in play([starved] * 500)) == 8
    assert min(target for _, target in play([spare] * 500, rollout=8)) == 1


def test_a_fleet_scaled_beyond_its_bounds_is_left_alone() -> None:
    starved, spare = make_load(learner_idle=0.9), make_load(learner_idle=0.0, rollout_busy=0.0)
    assert play([starved] * 50, rollout=12) == []
    assert play([spare] * 50, rollout=12) == []


def test_a_scaling_by_hand_starts_a_cooldown() -> None:
    controller = Autoscaler(make_config())
    targets = {Role.ROLLOUT: 2, Role.VERIFIER: 2}
    settled = dict.fromkeys(targets, True)
    starved = make_load(learner_idle=0.9)
    for look in range(2):
        assert not controller.decide(starved, targets, settled, look * PERIOD_S)
    targets[Role.ROLLOUT] = 5
    for look in range(2, 2 + int(COOLDOWN_S / PERIOD_S)):
        assert not controller.decide(starved, targets, settled, look * PERIOD_S)
    assert controller.decide(starved, targets, settled, 2 * PERIOD_S + COOLDOWN_S)


def plant(workers: int, need: float, saturation: float, noise: float) -> Load:
    """A run whose learner needs `need` workers' worth of groups; each fleet slot beyond
    `saturation` of them adds nothing, so that busy slots overstate or understate capacity."""
    supplied = min(1.0, workers / need)
    busy = min(1.0, need / workers) ** saturation
    return Load(
        learner_idle=min(1.0, max(0.0, 1.0 - supplied + noise)),
        rollout_busy=min(1.0, max(0.0, busy + noise)),
        verifiers_busy=0.5,
        admission_blocked=1.0 if workers > need else 0.0,
    )


@settings(max_examples=60, deadline=None)
@given(
    need=st.floats(0.3, 9.0),
    first=st.integers(1, 8),
    saturation=st.floats(0.5, 3.0),
    noises=st.lists(st.floats(-0.04, 0.04), min_size=400, max_size=400),
)
def test_it_settles_and_does_not_flap(
    need: float, first: int, saturation: float, noises: list[float]
) -> None:
    controller = Autoscaler(make_config())
    target, history = first, [first]
    idle: list[float] = []
    for look, noise in enumerate(noises):
        idle.append(plant(target, need, saturation, 0.0).learner_idle)
        targets = {Role.ROLLOUT: target, Role.VERIFIER: 2}
        settled = dict.fromkeys(targets, True)
        load = plant(target, need, saturation, noise)
        for change in controller.decide(load, targets, settled, look * PERIOD_S):
            if change.role is Role.ROLLOUT:
                target = change.target
                history.append(target)
    turns = sum((b - a) * (c - b) < 0 for (a, b), (_, c) in pairwise(pairwise(history)))
    # Giving up a worker that turns out to be needed costs two turns, and is remembered for ten
    # cooldowns: over these 66 cooldowns that can happen seven times at the very most.
    assert turns <= 14
    assert all(abs(b - a) == 1 for a, b in pairwise(history))
    late = idle[len(idle) // 2 :]
    assert sum(late) / len(late) <= 0.25 + 0.04 or target == 8
