"""Plain data of `steering` to messages of `control.proto`, and back.

What a newer or broken peer sends and this version does not know raises ValueError.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, TypeVar

from orchestrator.bottleneck import FlowGauges, Phase
from orchestrator.control import control_pb2 as pb
from orchestrator.records import StepRecord
from orchestrator.steering import (
    Activity,
    FleetStatus,
    Limits,
    QueueStatus,
    Role,
    RunState,
    RunStatus,
    WorkerStatus,
)

Flat = TypeVar("Flat", Limits, QueueStatus, FlowGauges)

ROLES = {
    Role.ROLLOUT: pb.ROLE_ROLLOUT,
    Role.VERIFIER: pb.ROLE_VERIFIER,
    Role.LEARNER: pb.ROLE_LEARNER,
}
ACTIVITIES = {
    Activity.GENERATION: pb.ACTIVITY_GENERATION,
    Activity.TRAINING: pb.ACTIVITY_TRAINING,
}
STATES = {
    RunState.STARTING: pb.RUN_STATE_STARTING,
    RunState.EVALUATING: pb.RUN_STATE_EVALUATING,
    RunState.TRAINING: pb.RUN_STATE_TRAINING,
    RunState.STOPPING: pb.RUN_STATE_STOPPING,
    RunState.ENDED: pb.RUN_STATE_ENDED,
    RunState.FAILED: pb.RUN_STATE_FAILED,
}
_ROLES = {number: role for role, number in ROLES.items()}
_ACTIVITIES = {number: activity for activity, number in ACTIVITIES.items()}
_STATES = {number: state for state, number in STATES.items()}


def role_of(number: int) -> Role:
    """The role of an enum value. Raises ValueError for one that is none."""
    return _known(_ROLES, number, "role")


def activity_of(number: int) -> Activity:
    """The activity of an enum value. Raises ValueError for one that is none."""
    return _known(_ACTIVITIES, number, "activity")


def activities(paused: Iterable[Activity]) -> list[Any]:
    """Activities as enum values, in a fixed order."""
    return [ACTIVITIES[activity] for activity in sorted(paused)]


def status_message(status: RunStatus) -> pb.RunStatus:
    """A snapshot as it is sent."""
    return pb.RunStatus(
        run=status.run,
        directory=status.directory,
        model=status.model,
        objective=status.objective,
        state=STATES[status.state],
        paused=activities(status.paused),
        started_at=status.started_at,
        time=status.time,
        step=status.step,
        steps=status.steps,
        version=status.version,
        lineage=status.lineage,
        limits=limits_message(status.limits),
        queue=pb.QueueStatus(**_flat(status.queue)),
        fleets=[fleet_message(fleet) for fleet in status.fleets],
        last_step=None if status.last_step is None else _step_message(status.last_step),
        held_out_accuracy=status.held_out_accuracy,
        checkpoint_step=status.checkpoint_step,
        samples=dict(status.samples),
        balanced=status.balanced,
        warnings=status.warnings,
    )


def status_of(message: pb.RunStatus) -> RunStatus:
    """A snapshot as it was before it was sent."""
    return RunStatus(
        run=message.run,
        directory=message.directory,
        model=message.model,
        objective=message.objective,
        state=_known(_STATES, message.state, "state"),
        paused=frozenset(activity_of(number) for number in message.paused),
        started_at=message.started_at,
        time=message.time,
        step=message.step,
        steps=message.steps,
        version=message.version,
        lineage=message.lineage,
        limits=limits_of(message.limits),
        queue=_unflat(QueueStatus, message.queue),
        fleets=tuple(fleet_of(fleet) for fleet in message.fleets),
        last_step=_step_of(message.last_step) if message.HasField("last_step") else None,
        held_out_accuracy=_given(message, "held_out_accuracy"),
        checkpoint_step=_given(message, "checkpoint_step"),
        samples=dict(message.samples),
        balanced=message.balanced,
        warnings=tuple(message.warnings),
    )


def limits_message(limits: Limits) -> pb.Limits:
    """Limits as they are sent."""
    return pb.Limits(**_flat(limits))


def limits_of(message: pb.Limits) -> Limits:
    """Limits as they were before they were sent."""
    return _unflat(Limits, message)


def fleet_message(fleet: FleetStatus) -> pb.FleetStatus:
    """A fleet as it is sent."""
    return pb.FleetStatus(
        role=ROLES[fleet.role],
        target=fleet.target,
        restarts=fleet.restarts,
        workers=[
            pb.WorkerStatus(
                name=worker.name,
                state=worker.state,
                node=worker.node,
                pid=worker.pid,
                in_flight=worker.in_flight,
                version=worker.version,
            )
            for worker in fleet.workers
        ],
    )


def fleet_of(message: pb.FleetStatus) -> FleetStatus:
    """A fleet as it was before it was sent."""
    return FleetStatus(
        role=role_of(message.role),
        target=message.target,
        restarts=message.restarts,
        workers=tuple(
            WorkerStatus(
                name=worker.name,
                state=worker.state,
                node=worker.node,
                pid=worker.pid,
                in_flight=worker.in_flight,
                version=_given(worker, "version"),
            )
            for worker in message.workers
        ),
    )


def status_json(status: RunStatus) -> dict[str, Any]:
    """A snapshot for `--json`: fields named as in `RunStatus`, and the last step's bottleneck."""
    form: dict[str, Any] = _json(status)
    if status.last_step is not None:
        form["last_step"]["bottleneck"] = _json(status.last_step.bottleneck)
    return form


def _step_message(record: StepRecord) -> pb.StepRecord:
    bottleneck = record.bottleneck
    return pb.StepRecord(
        step=record.step,
        steps=record.steps,
        version=record.version,
        bottleneck=pb.Bottleneck(stage=bottleneck.stage.value, evidence=bottleneck.evidence),
        phase_seconds={phase.value: seconds for phase, seconds in record.phase_seconds.items()},
        gauges=pb.FlowGauges(**_flat(record.gauges)),
        skipped=record.skipped,
        reward=record.reward,
        accuracy=record.accuracy,
        samples=record.samples,
        unscored=record.unscored,
        response_tokens=record.response_tokens,
        staleness_tokens=dict(record.staleness_tokens),
        masked_tokens=dict(record.masked_tokens),
        learner=dict(record.learner),
    )


def _step_of(message: pb.StepRecord) -> StepRecord:
    return StepRecord(
        step=message.step,
        steps=message.steps,
        version=message.version,
        phase_seconds={Phase(name): seconds for name, seconds in message.phase_seconds.items()},
        gauges=_unflat(FlowGauges, message.gauges),
        skipped=message.skipped,
        reward=_given(message, "reward"),
        accuracy=_given(message, "accuracy"),
        samples=message.samples,
        unscored=message.unscored,
        response_tokens=message.response_tokens,
        staleness_tokens=dict(message.staleness_tokens),
        masked_tokens=dict(message.masked_tokens),
        learner=dict(message.learner),
    )


def _known(values: dict[Any, Any], number: int, what: str) -> Any:
    if number not in values:
        raise ValueError(f"{what} {number} is none of {', '.join(values.values())}")
    return values[number]


def _given(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _flat(value: Limits | QueueStatus | FlowGauges) -> dict[str, Any]:
    """Fields of a dataclass whose message has the same ones."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _unflat(kind: type[Flat], message: Any) -> Flat:
    return kind(**{field.name: getattr(message, field.name) for field in dataclasses.fields(kind)})


def _json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, frozenset):
        return sorted(_json(inner) for inner in value)
    if isinstance(value, dict):
        return {str(key): _json(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_json(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
