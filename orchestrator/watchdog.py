"""The watchdog: ends a run in which nothing moves any more, and says who waits for what."""

import asyncio
import time
from collections.abc import Callable

from orchestrator.errors import RunError
from orchestrator.operation_config import SupervisionConfig
from orchestrator.signal import Signal

CHECK_PERIOD_S = 1.0


class Watchdog:
    """Looks at the count of changes; one that stands still for too long ends the run."""

    def __init__(
        self,
        changed: Signal,
        config: SupervisionConfig,
        describe: Callable[[], str],
        paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._changed = changed
        self._limit_s = config.no_progress_timeout_s
        self._describe = describe
        self._paused = paused
        self._seen = -1
        self._since_s = 0.0

    async def run(self) -> None:
        """Loop, ended by RunError or by cancellation."""
        while True:
            self.check(time.monotonic())
            await asyncio.sleep(CHECK_PERIOD_S)

    def check(self, now_s: float) -> None:
        """Raise RunError when nothing has changed for longer than the limit, and was not told
        to stand still."""
        if self._changed.count != self._seen or self._paused():
            self._seen, self._since_s = self._changed.count, now_s
        elif now_s - self._since_s > self._limit_s:
            raise RunError(
                f"nothing has moved for {self._limit_s:g} s: {self._describe()}. "
                "The logs of the workers are in the run's logs folder; raise "
                "supervision.no_progress_timeout_s if one step really takes that long."
            )
