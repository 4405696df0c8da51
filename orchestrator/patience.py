"""When a run has to give up because nothing that it generates trains anything. Pure."""

from orchestrator.errors import RunError


class Patience:
    """Counts groups that left one after another without training anything, up to `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = 0

    def trained(self) -> None:
        """A batch changed the weights."""
        self._left = 0

    def left_untrained(self, last: str, groups: int = 1) -> None:
        """Groups left; `last` says how the last one did. Raises RunError at the limit."""
        self._left += groups
        if self._left >= self._limit:
            raise RunError(
                f"{self._limit} groups in a row left without training anything; {last}. "
                "With dynamic sampling this means that the model solves all or none of the "
                "tasks: choose easier or harder ones. `slipstream ledger` counts what left and why."
            )
