"""How soon a lost worker may be replaced: exponential back-off and an hourly limit. Pure."""

from collections import deque

_HOUR_S = 3600.0


class RestartBudget:
    """Replacements of the last hour; the caller gives the clock."""

    def __init__(
        self, per_hour: int, first_delay_s: float = 1.0, max_delay_s: float = 60.0
    ) -> None:
        self._per_hour = per_hour
        self._first_delay_s = first_delay_s
        self._max_delay_s = max_delay_s
        self._recent: deque[float] = deque()

    def next_delay_s(self, now_s: float) -> float | None:
        """Seconds to wait before the next replacement, which counts as taken; None when the hour's
        budget is spent."""
        while self._recent and now_s - self._recent[0] > _HOUR_S:
            self._recent.popleft()
        if len(self._recent) >= self._per_hour:
            return None
        delay = min(self._first_delay_s * 2 ** len(self._recent), self._max_delay_s)
        self._recent.append(now_s)
        return delay

    def reserve_s(self, now_s: float) -> float:
        """Seconds until a spent budget allows a replacement again, which then counts as taken."""
        if not self._per_hour:
            return _HOUR_S
        due = self._recent[-self._per_hour] + _HOUR_S
        self._recent.append(due)
        return due - now_s
