"""The watchdog ends a run in which nothing moves, and only then."""

import pytest

from orchestrator.errors import RunError
from orchestrator.operation_config import SupervisionConfig
from orchestrator.signal import Signal
from orchestrator.watchdog import Watchdog


def make_watchdog(changed: Signal) -> Watchdog:
    config = SupervisionConfig(no_progress_timeout_s=10)
    return Watchdog(changed, config, lambda: "the learner waits for groups")


def test_names_who_waits_when_nothing_moves() -> None:
    watchdog = make_watchdog(Signal())
    watchdog.check(0.0)
    watchdog.check(10.0)
    with pytest.raises(RunError, match=r"nothing has moved for 10 s: the learner waits for groups"):
        watchdog.check(10.1)


def test_movement_restarts_the_clock() -> None:
    changed = Signal()
    watchdog = make_watchdog(changed)
    for second in range(0, 90, 9):
        changed.notify()
        watchdog.check(float(second))
    with pytest.raises(RunError):
        watchdog.check(81.0 + 10.1)
