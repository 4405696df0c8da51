"""The watchdog: ends a run in which nothing moves any more, and says who waits for what."""

import asyncio
import time
from collections.abc import Callable

from orchestrator.config import SupervisionConfig
from orchestrator.errors import RunError
from orchestrator.signal import Signal

CHECK_PERIOD_S = 1.0


class Watchdog:
    """Looks at the count of changes; one that stands still for too long ends the run."""

    def __init__(
        self, changed: Signal, config: SupervisionConfig, describe: Callable[[], str]
    ) -> None:
        self._changed = changed
        self._limit_s = config.no_progress_timeout_s
        self._describe = describe

    async def run(self) -> None:
        """Loop, ended by RunError or by cancellation."""
        seen, since = self._changed.count, time.monotonic()
        while True:
            await asyncio.sleep(CHECK_PERIOD_S)
            now = time.monotonic()
            if self._changed.count != seen:
                seen, since = self._changed.count, now
            elif now - since > self._limit_s:
                raise RunError(
                    f"nothing has moved for {self._limit_s:.0f} s: {self._describe()}. "
                    "The logs of the workers are in the run's logs folder; raise "
                    "supervision.no_progress_timeout_s if one step really takes that long."
                )
