"""What is sent arrives as it was."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from steering_double import STATUS, STEP

from orchestrator.bottleneck import FlowGauges, Phase
from orchestrator.control import control_pb2 as pb
from orchestrator.control.convert import status_json, status_message, status_of
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

counts = st.integers(0, 2**62)
seconds = st.floats(0, 1e12)
names = st.text(max_size=12)


def any_of(kind: Any, **fields: Any) -> Any:
    return st.builds(kind, **fields)


steps = any_of(
    StepRecord,
    step=counts,
    steps=counts,
    version=counts,
    phase_seconds=st.dictionaries(st.sampled_from(Phase), seconds),
    gauges=any_of(FlowGauges, queue_capacity_bytes=counts, queue_capacity_groups=counts),
    reward=st.none() | seconds,
    accuracy=st.none() | seconds,
    samples=counts,
    unscored=counts,
    response_tokens=counts,
    skipped=names,
    staleness_tokens=st.dictionaries(counts, counts, max_size=3),
    masked_tokens=st.dictionaries(names, counts, max_size=3),
    learner=st.dictionaries(names, seconds, max_size=3),
)
workers = any_of(
    WorkerStatus,
    name=names,
    state=names,
    node=names,
    pid=counts,
    in_flight=counts,
    version=st.none() | counts,
)
fleets = any_of(
    FleetStatus,
    role=st.sampled_from(Role),
    target=counts,
    restarts=counts,
    workers=st.lists(workers, max_size=2).map(tuple),
)
statuses = any_of(
    RunStatus,
    run=names,
    directory=names,
    model=names,
    objective=names,
    state=st.sampled_from(RunState),
    paused=st.frozensets(st.sampled_from(Activity)),
    started_at=seconds,
    time=seconds,
    step=counts,
    steps=counts,
    version=counts,
    lineage=counts,
    limits=any_of(Limits, max_staleness=counts, max_groups=counts),
    queue=any_of(
        QueueStatus,
        **dict.fromkeys(QueueStatus.__dataclass_fields__.keys() - {"oldest_age_s"}, counts),
        oldest_age_s=seconds,
    ),
    fleets=st.lists(fleets, max_size=2).map(tuple),
    last_step=st.none() | steps,
    held_out_accuracy=st.none() | seconds,
    checkpoint_step=st.none() | counts,
    samples=st.dictionaries(names, counts, max_size=3),
    balanced=st.booleans(),
    warnings=st.lists(names, max_size=2).map(tuple),
)


@given(statuses)
def test_a_snapshot_arrives_as_it_was(status: RunStatus) -> None:
    sent = status_message(status).SerializeToString()
    assert status_of(pb.RunStatus.FromString(sent)) == status


def test_what_this_version_does_not_know_is_an_error() -> None:
    message = status_message(STATUS)
    message.state = 77  # type: ignore[assignment]
    with pytest.raises(ValueError, match="state 77 is none of starting"):
        status_of(message)


def test_json_has_the_bottleneck_and_only_what_json_can_say() -> None:
    status = replace(STATUS, last_step=replace(STEP, reward=float("nan")))
    form = json.loads(json.dumps(status_json(status), allow_nan=False))
    assert form["state"] == "training"
    assert form["last_step"]["reward"] is None
    assert form["last_step"]["bottleneck"] == {
        "stage": "rollout",
        "evidence": "learner waited 75 %",
    }
    assert form["fleets"][0]["workers"][0]["version"] == 11
