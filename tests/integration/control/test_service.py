"""Every call and every status code, through real gRPC on loopback."""

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from steering_double import STATUS, Live, live

from orchestrator.control import control_pb2 as pb
from orchestrator.control.convert import status_of
from orchestrator.control.interceptors import Guard
from orchestrator.errors import RunError
from orchestrator.steering import Activity, Role

SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
"""A caller that lets no more than this lie unread; gRPC would take megabytes off its own bat."""


def refused(call: Any, request: Any, **options: Any) -> tuple[StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        answer = call(request, timeout=30, **options)
        if hasattr(answer, "__iter__"):
            list(answer)
    return raised.value.code(), raised.value.details()


def test_status_is_the_steerings_snapshot(run: Live) -> None:
    answer = run.stub.GetStatus(pb.GetStatusRequest(), metadata=run.metadata)
    assert status_of(answer) == STATUS
    assert answer.last_step.bottleneck.stage == "rollout"
    assert answer.last_step.bottleneck.evidence == "learner waited 75 %"


def test_every_request_reaches_the_steering(run: Live) -> None:
    stub, metadata = run.stub, run.metadata
    scaled = stub.Scale(
        pb.ScaleRequest(request_id="1", role=pb.ROLE_ROLLOUT, target=3), metadata=metadata
    )
    assert scaled.fleet.target == 3
    limits = stub.SetLimits(pb.SetLimitsRequest(request_id="2", max_groups=5), metadata=metadata)
    assert (limits.limits.max_staleness, limits.limits.max_groups) == (2, 5)
    paused = stub.Pause(
        pb.PauseRequest(request_id="3", activity=pb.ACTIVITY_TRAINING), metadata=metadata
    )
    assert list(paused.paused) == [pb.ACTIVITY_TRAINING]
    resumed = stub.Resume(
        pb.ResumeRequest(request_id="4", activity=pb.ACTIVITY_TRAINING), metadata=metadata
    )
    assert list(resumed.paused) == []
    saved = stub.Checkpoint(pb.CheckpointRequest(request_id="5"), metadata=metadata)
    assert (saved.step, saved.path) == (12, "/runs/tiny/checkpoints/step_12")
    evaluated = stub.Evaluate(pb.EvaluateRequest(request_id="6"), metadata=metadata)
    assert (evaluated.accuracy, evaluated.samples, evaluated.unscored) == (0.5, 40, 2)
    stub.Stop(pb.StopRequest(request_id="7"), metadata=metadata)
    assert run.steering.calls == [
        ("scale", Role.ROLLOUT, 3),
        ("set_limits", None, 5),
        ("pause", Activity.TRAINING),
        ("resume", Activity.TRAINING),
        ("checkpoint",),
        ("evaluate",),
        ("stop",),
    ]


@pytest.mark.parametrize(
    ("method", "request_", "says"),
    [
        ("Scale", pb.ScaleRequest(request_id="a", target=1), "role 0 is none of"),
        ("Scale", pb.ScaleRequest(request_id="a", role=9, target=1), "role 9 is none of"),  # type: ignore[arg-type]
        ("Scale", pb.ScaleRequest(request_id="a", role=pb.ROLE_ROLLOUT), "target is missing"),
        ("Scale", pb.ScaleRequest(request_id="a", role=3, target=1), "learner cannot"),  # type: ignore[arg-type]
        ("Scale", pb.ScaleRequest(request_id="a", role=1, target=-1), "expected 1 to 8"),  # type: ignore[arg-type]
        ("SetLimits", pb.SetLimitsRequest(request_id="a"), "no limit is given"),
        ("Pause", pb.PauseRequest(request_id="a"), "activity 0 is none of"),
        ("Resume", pb.ResumeRequest(request_id="a"), "activity 0 is none of"),
        ("Stop", pb.StopRequest(), "request_id has 0 characters"),
        ("Stop", pb.StopRequest(request_id="x" * 129), "request_id has 129 characters"),
        ("Watch", pb.WatchRequest(min_interval_s=0.01), "expected 0.1 to 60 seconds"),
        ("Watch", pb.WatchRequest(min_interval_s=float("nan")), "min_interval_s is nan"),
    ],
)
def test_requests_that_can_never_be_right(run: Live, method: str, request_: Any, says: str) -> None:
    code, details = refused(getattr(run.stub, method), request_, metadata=run.metadata)
    assert code is StatusCode.INVALID_ARGUMENT
    assert says in details


def test_a_request_at_the_wrong_time_says_so_in_one_line(run: Live) -> None:
    request = pb.ScaleRequest(request_id="a", role=pb.ROLE_ROLLOUT, target=8)
    assert refused(run.stub.Scale, request, metadata=run.metadata) == (
        StatusCode.FAILED_PRECONDITION,
        "the cluster has no room for 8 workers; add nodes.",
    )


def test_a_fault_is_told_by_an_id_that_the_log_has(
    run: Live, caplog: pytest.LogCaptureFixture
) -> None:
    run.steering.fails = KeyError("a secret of the run")
    with caplog.at_level(logging.ERROR):
        code, details = refused(run.stub.GetStatus, pb.GetStatusRequest(), metadata=run.metadata)
    assert code is StatusCode.INTERNAL
    assert "unexpected KeyError" in details
    assert "\n" not in details
    assert "secret" not in details
    fault = details.split("fault ")[1].rstrip(".")
    record = next(record for record in caplog.records if fault in record.getMessage())
    assert record.exc_info

    run.steering.fails = RunError("the disk is full; free some space.")
    code, details = refused(
        run.stub.Checkpoint, pb.CheckpointRequest(request_id="a"), metadata=run.metadata
    )
    assert code is StatusCode.INTERNAL
    assert details.startswith("the disk is full; free some space. The run's driver.log")


def test_without_the_token_only_health_answers(run: Live) -> None:
    assert run.endpoint.token
    for shown in ([], [("authorization", "Bearer wrong")], [("authorization", run.endpoint.token)]):
        for call, request in (
            (run.stub.GetStatus, pb.GetStatusRequest()),
            (run.stub.Watch, pb.WatchRequest()),
            (run.stub.Stop, pb.StopRequest(request_id="a")),
            (health_pb2_grpc.HealthStub(run.channel).Watch, health_pb2.HealthCheckRequest()),
        ):
            code, details = refused(call, request, metadata=shown)
            assert code is StatusCode.UNAUTHENTICATED
            assert "control.json" in details
        nowhere = run.channel.unary_unary("/no.such/Method")
        assert refused(nowhere, b"", metadata=shown)[0] is StatusCode.UNAUTHENTICATED
    assert run.steering.calls == []
    for service in ("", "slipstream.v1.ControlService"):
        answer = health_pb2_grpc.HealthStub(run.channel).Check(
            health_pb2.HealthCheckRequest(service=service)
        )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_describes_the_service_to_who_shows_the_token(run: Live) -> None:
    ask = reflection_pb2_grpc.ServerReflectionStub(run.channel).ServerReflectionInfo
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with pytest.raises(grpc.RpcError) as raised:
        next(ask(iter([request])))
    assert raised.value.code() is StatusCode.UNAUTHENTICATED
    answer = next(ask(iter([request]), metadata=run.metadata))
    names = {service.name for service in answer.list_services_response.service}
    assert {"slipstream.v1.ControlService", "grpc.health.v1.Health"} <= names


def test_what_is_no_message_or_too_big_is_refused(run: Live) -> None:
    call = run.channel.unary_unary("/slipstream.v1.ControlService/Scale")
    code, details = refused(call, b"\xff\xff\xff", metadata=run.metadata)
    assert code is StatusCode.INVALID_ARGUMENT
    assert "3 bytes are not the message" in details
    assert refused(call, bytes(70_000), metadata=run.metadata)[0] is StatusCode.RESOURCE_EXHAUSTED
    unknown = run.channel.unary_unary("/slipstream.v1.ControlService/Nothing")
    assert refused(unknown, b"", metadata=run.metadata)[0] is StatusCode.UNIMPLEMENTED
    empty = run.channel.stream_unary("/slipstream.v1.ControlService/Stop")
    code, details = refused(empty, iter([]), metadata=run.metadata)
    assert (code, details) == (
        StatusCode.INVALID_ARGUMENT,
        "the call ended without a request message.",
    )


def test_a_call_without_deadline_gets_one_and_its_work_goes_on(tmp_path: Path) -> None:
    with live(tmp_path, guard=Guard(long_deadline_s=0.2)) as run:
        run.close_gate()
        request = pb.CheckpointRequest(request_id="a")
        with pytest.raises(grpc.RpcError) as raised:
            run.stub.Checkpoint(request, metadata=run.metadata)
        assert raised.value.code() is StatusCode.DEADLINE_EXCEEDED
        assert "goes on" in raised.value.details()
        run.open_gate()
        answer = run.stub.Checkpoint(request, metadata=run.metadata, timeout=30)
        assert answer.step == 12
        assert run.steering.calls == [("checkpoint",)]


def test_a_request_that_never_arrives_gives_its_place_back(tmp_path: Path) -> None:
    with live(tmp_path, guard=Guard(request_timeout_s=0.2)) as run:
        silent = run.channel.stream_unary("/slipstream.v1.ControlService/Stop")
        over = threading.Event()

        def nothing() -> Iterator[bytes]:
            over.wait()
            yield from ()

        with pytest.raises(grpc.RpcError) as raised:
            silent(nothing(), metadata=run.metadata)
        over.set()
        assert raised.value.code() is StatusCode.DEADLINE_EXCEEDED
        assert "did not arrive" in raised.value.details()


def test_watch_sends_the_changes_and_ends_with_the_run(run: Live) -> None:
    watching = run.stub.Watch(pb.WatchRequest(min_interval_s=0.1), metadata=run.metadata)
    assert status_of(next(watching)) == STATUS
    run.stub.Pause(
        pb.PauseRequest(request_id="a", activity=pb.ACTIVITY_GENERATION), metadata=run.metadata
    )
    assert list(next(watching).paused) == [pb.ACTIVITY_GENERATION]
    run.stub.Stop(pb.StopRequest(request_id="b"), metadata=run.metadata)
    assert next(watching).state == pb.RUN_STATE_STOPPING
    run.run(run.server.stop())
    assert all(message.state == pb.RUN_STATE_STOPPING for message in watching)
    assert watching.code() is StatusCode.OK


def test_watch_tells_that_nothing_changed(tmp_path: Path) -> None:
    with live(tmp_path, heartbeat_s=0.2) as run:
        watching = run.stub.Watch(pb.WatchRequest(min_interval_s=0.1), metadata=run.metadata)
        assert [status_of(next(watching)) for _ in range(3)] == [STATUS] * 3


def test_watchers_are_bounded_and_those_who_left_do_not_count(tmp_path: Path) -> None:
    with live(tmp_path, watchers=2) as run:
        ask = pb.WatchRequest(min_interval_s=0.1)
        watching = [run.stub.Watch(ask, metadata=run.metadata) for _ in range(2)]
        for watcher in watching:
            next(watcher)
        code, details = refused(run.stub.Watch, ask, metadata=run.metadata)
        assert code is StatusCode.RESOURCE_EXHAUSTED
        assert "2 watchers" in details
        watching[0].cancel()
        assert admitted(run, ask)
        watching[1].cancel()


def test_a_watcher_that_does_not_read_is_let_go(tmp_path: Path) -> None:
    with live(tmp_path, watchers=1, guard=Guard(response_timeout_s=0.3)) as run:
        run.steering.snapshot = replace(STATUS, model="x" * (8 << 20))
        ask = pb.WatchRequest(min_interval_s=0.1)
        with grpc.insecure_channel(run.endpoint.address, SMALL_WINDOW) as channel:
            path = "/slipstream.v1.ControlService/Watch"
            deaf = channel.unary_stream(path)(ask.SerializeToString(), metadata=run.metadata)
            deaf.initial_metadata()
            run.steering.snapshot = STATUS
            assert admitted(run, ask)


def test_callers_that_do_not_read_hold_no_places(tmp_path: Path) -> None:
    with live(tmp_path, guard=Guard(response_timeout_s=0.3, calls=2)) as run:
        run.steering.snapshot = replace(STATUS, model="x" * (8 << 20))
        ask = pb.WatchRequest(min_interval_s=0.1)
        with grpc.insecure_channel(run.endpoint.address, SMALL_WINDOW) as channel:
            call = channel.unary_stream("/slipstream.v1.ControlService/Watch")
            deaf = [call(ask.SerializeToString(), metadata=run.metadata) for _ in range(2)]
            for caller in deaf:
                caller.initial_metadata()
            run.steering.snapshot = STATUS
            assert admitted(run, ask)


def admitted(run: Live, ask: pb.WatchRequest) -> bool:
    """Ask until a place among the watchers is free."""
    while True:
        watching = run.stub.Watch(ask, metadata=run.metadata)
        try:
            served = next(watching).run == "tiny"
            watching.cancel()
            return served
        except grpc.RpcError as error:
            assert error.code() is StatusCode.RESOURCE_EXHAUSTED
