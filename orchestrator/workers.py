"""What the driver knows of one worker. Plain data, changed by its fleet and its dispatchers."""

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class WorkerState(StrEnum):
    """Lifecycle of one worker as its fleet sees it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    """Scaled away: it finishes what it has."""
    QUARANTINED = "quarantined"
    DEAD = "dead"


class LossReason(StrEnum):
    """Why a worker had to be replaced."""

    DIED = "died"
    UNRESPONSIVE = "unresponsive"
    NO_PROGRESS = "no_progress"
    SYNC_FAILED = "sync_failed"
    START_FAILED = "start_failed"


@dataclass(eq=False, slots=True)
class Worker:
    """One actor process of a role; `info` is what its start call returned."""

    name: str
    actor: Any
    state: WorkerState = WorkerState.STARTING
    info: Any = None
    in_flight: int = 0
    """Groups dispatched to it and not yet returned."""
    given_up: bool = False
    """Ended on purpose, with work that it did not finish."""
    progress: Any = None
    """Last answer of its `progress` call."""
    progress_changed_at: float = field(default_factory=time.monotonic)
    created_at: float = field(default_factory=time.monotonic)

    @property
    def starting_s(self) -> float:
        """Seconds since it was created, while it does not work yet; 0 afterwards."""
        return time.monotonic() - self.created_at if self.state is WorkerState.STARTING else 0.0
