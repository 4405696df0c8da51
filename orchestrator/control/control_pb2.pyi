from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_ROLLOUT: _ClassVar[Role]
    ROLE_VERIFIER: _ClassVar[Role]
    ROLE_LEARNER: _ClassVar[Role]

class Activity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACTIVITY_UNSPECIFIED: _ClassVar[Activity]
    ACTIVITY_GENERATION: _ClassVar[Activity]
    ACTIVITY_TRAINING: _ClassVar[Activity]

class RunState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_STATE_UNSPECIFIED: _ClassVar[RunState]
    RUN_STATE_STARTING: _ClassVar[RunState]
    RUN_STATE_EVALUATING: _ClassVar[RunState]
    RUN_STATE_TRAINING: _ClassVar[RunState]
    RUN_STATE_STOPPING: _ClassVar[RunState]
    RUN_STATE_ENDED: _ClassVar[RunState]
    RUN_STATE_FAILED: _ClassVar[RunState]
ROLE_UNSPECIFIED: Role
ROLE_ROLLOUT: Role
ROLE_VERIFIER: Role
ROLE_LEARNER: Role
ACTIVITY_UNSPECIFIED: Activity
ACTIVITY_GENERATION: Activity
ACTIVITY_TRAINING: Activity
RUN_STATE_UNSPECIFIED: RunState
RUN_STATE_STARTING: RunState
RUN_STATE_EVALUATING: RunState
RUN_STATE_TRAINING: RunState
RUN_STATE_STOPPING: RunState
RUN_STATE_ENDED: RunState
RUN_STATE_FAILED: RunState

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("min_interval_s",)
    MIN_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    min_interval_s: float
    def __init__(self, min_interval_s: _Optional[float] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("request_id", "role", "target")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    role: Role
    target: int
    def __init__(self, request_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., target: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("fleet",)
    FLEET_FIELD_NUMBER: _ClassVar[int]
    fleet: FleetStatus
    def __init__(self, fleet: _Optional[_Union[FleetStatus, _Mapping]] = ...) -> None: ...

class SetLimitsRequest(_message.Message):
    __slots__ = ("request_id", "max_staleness", "max_groups")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    MAX_GROUPS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    max_staleness: int
    max_groups: int
    def __init__(self, request_id: _Optional[str] = ..., max_staleness: _Optional[int] = ..., max_groups: _Optional[int] = ...) -> None: ...

class SetLimitsResponse(_message.Message):
    __slots__ = ("limits",)
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    limits: Limits
    def __init__(self, limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("request_id", "activity")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    activity: Activity
    def __init__(self, request_id: _Optional[str] = ..., activity: _Optional[_Union[Activity, str]] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ("paused",)
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    paused: _containers.RepeatedScalarFieldContainer[Activity]
    def __init__(self, paused: _Optional[_Iterable[_Union[Activity, str]]] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("request_id", "activity")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    activity: Activity
    def __init__(self, request_id: _Optional[str] = ..., activity: _Optional[_Union[Activity, str]] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("paused",)
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    paused: _containers.RepeatedScalarFieldContainer[Activity]
    def __init__(self, paused: _Optional[_Iterable[_Union[Activity, str]]] = ...) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CheckpointResponse(_message.Message):
    __slots__ = ("step", "path")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    step: int
    path: str
    def __init__(self, step: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class EvaluateRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class EvaluateResponse(_message.Message):
    __slots__ = ("step", "version", "accuracy", "samples", "unscored")
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    UNSCORED_FIELD_NUMBER: _ClassVar[int]
    step: int
    version: int
    accuracy: float
    samples: int
    unscored: int
    def __init__(self, step: _Optional[int] = ..., version: _Optional[int] = ..., accuracy: _Optional[float] = ..., samples: _Optional[int] = ..., unscored: _Optional[int] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class StopResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RunStatus(_message.Message):
    __slots__ = ("run", "directory", "model", "objective", "state", "paused", "started_at", "time", "step", "steps", "version", "lineage", "limits", "queue", "fleets", "last_step", "held_out_accuracy", "checkpoint_step", "samples", "balanced", "warnings")
    class SamplesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    FLEETS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    HELD_OUT_ACCURACY_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    BALANCED_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    run: str
    directory: str
    model: str
    objective: str
    state: RunState
    paused: _containers.RepeatedScalarFieldContainer[Activity]
    started_at: float
    time: float
    step: int
    steps: int
    version: int
    lineage: int
    limits: Limits
    queue: QueueStatus
    fleets: _containers.RepeatedCompositeFieldContainer[FleetStatus]
    last_step: StepRecord
    held_out_accuracy: float
    checkpoint_step: int
    samples: _containers.ScalarMap[str, int]
    balanced: bool
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., directory: _Optional[str] = ..., model: _Optional[str] = ..., objective: _Optional[str] = ..., state: _Optional[_Union[RunState, str]] = ..., paused: _Optional[_Iterable[_Union[Activity, str]]] = ..., started_at: _Optional[float] = ..., time: _Optional[float] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ..., version: _Optional[int] = ..., lineage: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., queue: _Optional[_Union[QueueStatus, _Mapping]] = ..., fleets: _Optional[_Iterable[_Union[FleetStatus, _Mapping]]] = ..., last_step: _Optional[_Union[StepRecord, _Mapping]] = ..., held_out_accuracy: _Optional[float] = ..., checkpoint_step: _Optional[int] = ..., samples: _Optional[_Mapping[str, int]] = ..., balanced: _Optional[bool] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_staleness", "max_groups")
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    MAX_GROUPS_FIELD_NUMBER: _ClassVar[int]
    max_staleness: int
    max_groups: int
    def __init__(self, max_staleness: _Optional[int] = ..., max_groups: _Optional[int] = ...) -> None: ...

class QueueStatus(_message.Message):
    __slots__ = ("ready_groups", "under_way_groups", "waiting_groups", "generating_groups", "generation_slots", "verifying_groups", "bytes", "capacity_bytes", "oldest_age_s")
    READY_GROUPS_FIELD_NUMBER: _ClassVar[int]
    UNDER_WAY_GROUPS_FIELD_NUMBER: _ClassVar[int]
    WAITING_GROUPS_FIELD_NUMBER: _ClassVar[int]
    GENERATING_GROUPS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_SLOTS_FIELD_NUMBER: _ClassVar[int]
    VERIFYING_GROUPS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_AGE_S_FIELD_NUMBER: _ClassVar[int]
    ready_groups: int
    under_way_groups: int
    waiting_groups: int
    generating_groups: int
    generation_slots: int
    verifying_groups: int
    bytes: int
    capacity_bytes: int
    oldest_age_s: float
    def __init__(self, ready_groups: _Optional[int] = ..., under_way_groups: _Optional[int] = ..., waiting_groups: _Optional[int] = ..., generating_groups: _Optional[int] = ..., generation_slots: _Optional[int] = ..., verifying_groups: _Optional[int] = ..., bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., oldest_age_s: _Optional[float] = ...) -> None: ...

class FleetStatus(_message.Message):
    __slots__ = ("role", "target", "restarts", "workers")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    role: Role
    target: int
    restarts: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., target: _Optional[int] = ..., restarts: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("name", "state", "node", "pid", "in_flight", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    node: str
    pid: int
    in_flight: int
    version: int
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., node: _Optional[str] = ..., pid: _Optional[int] = ..., in_flight: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class Bottleneck(_message.Message):
    __slots__ = ("stage", "evidence")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    stage: str
    evidence: str
    def __init__(self, stage: _Optional[str] = ..., evidence: _Optional[str] = ...) -> None: ...

class StepRecord(_message.Message):
    __slots__ = ("step", "steps", "version", "bottleneck", "phase_seconds", "gauges", "skipped", "reward", "accuracy", "samples", "unscored", "response_tokens", "staleness_tokens", "masked_tokens", "learner")
    class PhaseSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class StalenessTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class MaskedTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class LearnerEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BOTTLENECK_FIELD_NUMBER: _ClassVar[int]
    PHASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GAUGES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    UNSCORED_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MASKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    step: int
    steps: int
    version: int
    bottleneck: Bottleneck
    phase_seconds: _containers.ScalarMap[str, float]
    gauges: FlowGauges
    skipped: str
    reward: float
    accuracy: float
    samples: int
    unscored: int
    response_tokens: int
    staleness_tokens: _containers.ScalarMap[int, int]
    masked_tokens: _containers.ScalarMap[str, int]
    learner: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., steps: _Optional[int] = ..., version: _Optional[int] = ..., bottleneck: _Optional[_Union[Bottleneck, _Mapping]] = ..., phase_seconds: _Optional[_Mapping[str, float]] = ..., gauges: _Optional[_Union[FlowGauges, _Mapping]] = ..., skipped: _Optional[str] = ..., reward: _Optional[float] = ..., accuracy: _Optional[float] = ..., samples: _Optional[int] = ..., unscored: _Optional[int] = ..., response_tokens: _Optional[int] = ..., staleness_tokens: _Optional[_Mapping[int, int]] = ..., masked_tokens: _Optional[_Mapping[str, int]] = ..., learner: _Optional[_Mapping[str, float]] = ...) -> None: ...

class FlowGauges(_message.Message):
    __slots__ = ("queue_groups", "queue_capacity_groups", "queue_bytes", "queue_capacity_bytes", "generating_groups", "generation_slots", "verifying_groups", "admission_blocked_share", "sync_paused_share")
    QUEUE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_CAPACITY_GROUPS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    GENERATING_GROUPS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_SLOTS_FIELD_NUMBER: _ClassVar[int]
    VERIFYING_GROUPS_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_BLOCKED_SHARE_FIELD_NUMBER: _ClassVar[int]
    SYNC_PAUSED_SHARE_FIELD_NUMBER: _ClassVar[int]
    queue_groups: float
    queue_capacity_groups: int
    queue_bytes: float
    queue_capacity_bytes: int
    generating_groups: float
    generation_slots: float
    verifying_groups: float
    admission_blocked_share: float
    sync_paused_share: float
    def __init__(self, queue_groups: _Optional[float] = ..., queue_capacity_groups: _Optional[int] = ..., queue_bytes: _Optional[float] = ..., queue_capacity_bytes: _Optional[int] = ..., generating_groups: _Optional[float] = ..., generation_slots: _Optional[float] = ..., verifying_groups: _Optional[float] = ..., admission_blocked_share: _Optional[float] = ..., sync_paused_share: _Optional[float] = ...) -> None: ...
