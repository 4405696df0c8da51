"""Why a call is refused that its request and the run's state would allow."""

from orchestrator.errors import RunError


class OtherRequest(RunError):
    """A request id that stands for another request already."""


class TooMany(RunError):
    """More at once than the service allows."""


class SlowReader(RunError):
    """A caller that does not read what it asked for."""
