"""The watchdog ends a run in which nothing moves, and only then."""

import asyncio

import pytest

from orchestrator import watchdog
from orchestrator.config import SupervisionConfig
from orchestrator.errors import RunError
from orchestrator.signal import Signal


def test_names_who_waits_when_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "CHECK_PERIOD_S", 0.001)
    config = SupervisionConfig(no_progress_timeout_s=0.01)
    dog = watchdog.Watchdog(Signal(), config, lambda: "the learner waits for groups")
    with pytest.raises(RunError, match="the learner waits for groups"):
        asyncio.run(asyncio.wait_for(dog.run(), 60))


def test_movement_restarts_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(watchdog, "CHECK_PERIOD_S", 0.0)
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    changed = Signal()
    dog = watchdog.Watchdog(changed, SupervisionConfig(no_progress_timeout_s=10), lambda: "x")

    async def main() -> None:
        task = asyncio.create_task(dog.run())
        for _ in range(5):
            changed.notify()
            now[0] += 9.0
            await asyncio.sleep(0.01)
            assert not task.done()
        now[0] += 11.0
        with pytest.raises(RunError):
            await asyncio.wait_for(task, 60)

    asyncio.run(main())
