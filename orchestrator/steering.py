"""What may be asked of a live run, and what it says about itself: the seam of the control service.

Plain data and one protocol. The pipeline implements it on the driver's event loop; the control
service and the autoscaler use it without knowing the pipeline.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from orchestrator.errors import RunError
from orchestrator.records import StepRecord
from orchestrator.signal import Signal


class Role(StrEnum):
    """Roles of workers."""

    ROLLOUT = "rollout"
    VERIFIER = "verifier"
    LEARNER = "learner"


class Activity(StrEnum):
    """What can be paused."""

    GENERATION = "generation"
    TRAINING = "training"


class RunState(StrEnum):
    """What the run's script is doing."""

    STARTING = "starting"
    EVALUATING = "evaluating"
    TRAINING = "training"
    STOPPING = "stopping"
    """Draining, saving, and closing."""
    ENDED = "ended"
    FAILED = "failed"


class InvalidRequest(RunError):
    """A request whose values can never be right; the message says what would be."""


class NotNow(RunError):
    """A request that the run's present state does not allow; the message says when it would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker."""

    name: str
    state: str
    node: str = ""
    """Ray's id of its node; empty until it has started."""
    pid: int = 0
    in_flight: int = 0
    """Groups dispatched to it and not yet returned."""
    version: int | None = None
    """Weights that a rollout worker serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """The workers of one role."""

    role: Role
    target: int
    """Workers that the fleet is to have."""
    restarts: int
    workers: tuple[WorkerStatus, ...]

    def count(self, state: str) -> int:
        """Workers in `state`."""
        return sum(worker.state == state for worker in self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds that may be changed in a live run."""

    max_staleness: int
    max_groups: int
    """Groups between admission and training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """Where groups are."""

    ready_groups: int
    under_way_groups: int
    """Admitted and not yet left, ready ones included."""
    waiting_groups: int
    """Of those, the ones whose attempt was lost and that wait to be tried again."""
    generating_groups: int
    generation_slots: int
    verifying_groups: int
    bytes: int
    capacity_bytes: int
    oldest_age_s: float
    """Seconds that the oldest ready group has waited; 0 without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """One coherent snapshot: everything in it was true at the same moment."""

    run: str
    """Name of the run directory."""
    directory: str
    model: str
    objective: str
    state: RunState
    paused: frozenset[Activity]
    started_at: float
    """Unix seconds."""
    time: float
    """Unix seconds of the snapshot."""
    step: int
    steps: int
    version: int
    lineage: int
    limits: Limits
    queue: QueueStatus
    fleets: tuple[FleetStatus, ...]
    """One per role, the learner's ranks included."""
    last_step: StepRecord | None
    held_out_accuracy: float | None
    """Of the last evaluation."""
    checkpoint_step: int | None
    """Step of the newest finished checkpoint of this run."""
    samples: Mapping[str, int] = field(default_factory=dict)
    """The ledger's samples by fate, `failed_tasks` among them."""
    balanced: bool = True
    """Whether the ledger adds up."""
    warnings: tuple[str, ...] = ()
    """Plain sentences about what is out of its usual range, each saying what to look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDone:
    """A checkpoint that was asked for."""

    step: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDone:
    """An evaluation that was asked for."""

    step: int
    version: int
    accuracy: float
    samples: int
    unscored: int


class Steering(Protocol):
    """A live run, to be asked from its own event loop."""

    @property
    def changed(self) -> Signal:
        """Notified whenever something moved."""

    def status(self) -> RunStatus:
        """A snapshot; cheap and without side effects."""

    def scale(self, role: Role, target: int) -> FleetStatus:
        """Let a role have `target` workers from now on; returns before they are there.

        Workers that the cluster has no room for wait in `starting`: a cluster may grow. Raises
        InvalidRequest for a role that cannot be scaled or a target out of its bounds, NotNow while
        the run starts or stops.
        """

    def set_limits(
        self, *, max_staleness: int | None = None, max_groups: int | None = None
    ) -> Limits:
        """Change bounds, None leaving one as it is; all that hold now. Raises InvalidRequest,
        and NotNow while the run starts."""

    def pause(self, activity: Activity) -> None:
        """Start no new group, or no new batch step; what is under way ends normally."""

    def resume(self, activity: Activity) -> None:
        """Go on."""

    async def checkpoint(self) -> CheckpointDone:
        """Save between two steps, as soon as there is one. Raises NotNow outside of training."""

    async def evaluate(self) -> EvaluationDone:
        """Evaluate between two steps, as `checkpoint` saves. Raises NotNow outside of training."""

    def stop(self) -> None:
        """Finish the step, drain, save and end the run; asking twice changes nothing."""
