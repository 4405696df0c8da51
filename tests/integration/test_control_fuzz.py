"""Callers that mean harm or are broken: the service answers on, the run beside it is undisturbed.

Memory may grow by at most 64 MiB over everything here, the callers' own side included, which lives
in the same process.
"""

import asyncio
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc import StatusCode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from steering_double import Live, live

from orchestrator.control import control_pb2 as pb
from orchestrator.control.interceptors import Guard

pytestmark = pytest.mark.integration

GROWTH_BYTES = 64 << 20
CONNECTIONS = 1000
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
METHODS = sorted(method.name for method in pb.DESCRIPTOR.services_by_name["ControlService"].methods)
ANSWERS = {
    StatusCode.OK,
    StatusCode.INVALID_ARGUMENT,
    StatusCode.FAILED_PRECONDITION,
    StatusCode.ALREADY_EXISTS,
    StatusCode.RESOURCE_EXHAUSTED,
}


def connected(run: Live) -> socket.socket:
    host, _, port = run.endpoint.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def send(run: Live, content: bytes) -> None:
    """Send on a connection of its own and wait for the other side's end or answer."""
    with connected(run) as caller:
        try:
            caller.sendall(content)
            caller.shutdown(socket.SHUT_WR)
            while caller.recv(65536):
                pass
        except ConnectionError:
            pass  # hung up on, as it should be


def call(run: Live, method: str, body: bytes, **options: Any) -> StatusCode:
    path = f"/slipstream.v1.ControlService/{method}"
    metadata = options.pop("metadata", run.metadata)
    try:
        if method == "Watch":
            watching = run.channel.unary_stream(path)(body, metadata=metadata, timeout=30)
            next(watching)
            watching.cancel()
        else:
            run.channel.unary_unary(path)(body, metadata=metadata, timeout=30, **options)
    except grpc.RpcError as error:
        return error.code()
    return StatusCode.OK


def answers(run: Live) -> None:
    """A new caller gets a snapshot, and the loops of the run have moved meanwhile."""
    before = run.ticks
    with grpc.insecure_channel(run.endpoint.address) as channel:
        path = "/slipstream.v1.ControlService/GetStatus"
        raw = channel.unary_unary(path)(b"", metadata=run.metadata, timeout=60)
    assert pb.RunStatus.FromString(raw).run == "tiny"
    run.run(ticked(run, before))


async def ticked(run: Live, before: int) -> None:
    while run.ticks == before:
        await asyncio.sleep(0)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.delenv("SLIPSTREAM_TOKEN", raising=False)
    with live(tmp_path) as served:
        yield served


@pytest.fixture
def bounded(run: Live) -> Iterator[Live]:
    """The service, warm; the process must not grow beyond the bound while it is used."""
    answers(run)
    process = psutil.Process()
    before = process.memory_info().rss
    yield run
    answers(run)
    grown = process.memory_info().rss - before
    assert grown <= GROWTH_BYTES, f"{grown >> 20} MiB more"


def frames(chance: random.Random) -> bytes:
    """HTTP/2 frames of every type, known and unknown, with contents that mean nothing."""
    content = b""
    for _ in range(chance.randrange(1, 8)):
        body = chance.randbytes(chance.randrange(64))
        length = chance.choice((len(body), chance.randrange(1 << 24)))
        kind, flags, stream = chance.randrange(16), chance.randrange(256), chance.randrange(6)
        content += length.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
        content += body
    return content


def test_bytes_that_are_no_protocol(bounded: Live) -> None:
    chance = random.Random(1)
    for _ in range(60):
        send(bounded, chance.randbytes(chance.randrange(1, 5000)))
        send(bounded, PREFACE + SETTINGS + frames(chance))
        send(bounded, PREFACE[: chance.randrange(len(PREFACE))])
        send(bounded, PREFACE + chance.randbytes(chance.randrange(500)))
    send(bounded, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    send(bounded, b"\x16\x03\x01" + chance.randbytes(500))


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(method=st.sampled_from(METHODS), body=st.binary(max_size=200))
def test_bodies_that_are_no_message(bounded: Live, method: str, body: bytes) -> None:
    assert call(bounded, method, body) in ANSWERS


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    request_=st.one_of(
        st.builds(
            pb.ScaleRequest,
            request_id=st.text(max_size=140),
            role=st.integers(-(2**31), 2**31 - 1),
            target=st.none() | st.integers(-(2**31), 2**31 - 1),
        ),
        st.builds(
            pb.SetLimitsRequest,
            request_id=st.text(max_size=140),
            max_staleness=st.none() | st.integers(-(2**31), 2**31 - 1),
            max_groups=st.none() | st.integers(-(2**31), 2**31 - 1),
        ),
        st.builds(
            pb.PauseRequest,
            request_id=st.text(max_size=140),
            activity=st.integers(-(2**31), 2**31 - 1),
        ),
        st.builds(pb.WatchRequest, min_interval_s=st.floats()),
    )
)
def test_messages_with_any_values(bounded: Live, request_: Any) -> None:
    method = type(request_).__name__.removesuffix("Request")
    assert call(bounded, method, request_.SerializeToString()) in ANSWERS


def test_messages_and_metadata_that_are_too_big(bounded: Live) -> None:
    for size in ((64 << 10) + 1, 1 << 20):
        for method in METHODS:
            assert call(bounded, method, bytes(size)) is StatusCode.RESOURCE_EXHAUSTED
    much = [*bounded.metadata, ("x-much", "y" * (64 << 10))]
    code = call(bounded, "GetStatus", b"", metadata=much)
    assert code in (StatusCode.RESOURCE_EXHAUSTED, StatusCode.UNAVAILABLE)
    assert bounded.steering.calls == []


def test_callers_that_never_finish_their_sentence(bounded: Live) -> None:
    with ExitStack() as stack:
        for number in range(200):
            caller = stack.enter_context(connected(bounded))
            caller.sendall((PREFACE + SETTINGS)[: number % (len(PREFACE + SETTINGS) + 1)])
        answers(bounded)


def test_callers_without_a_token_hold_no_places(bounded: Live) -> None:
    path = "/slipstream.v1.ControlService/Stop"
    never = ExitStack()
    with grpc.insecure_channel(bounded.endpoint.address) as channel, never:
        for _ in range(300):
            silent = channel.stream_stream(path)(iter(()), timeout=60)
            never.callback(silent.cancel)
            assert silent.code() is StatusCode.UNAUTHENTICATED
        answers(bounded)
    assert bounded.steering.calls == []


def test_a_thousand_connections_at_once(bounded: Live) -> None:
    with ExitStack() as stack:
        callers = [stack.enter_context(connected(bounded)) for _ in range(CONNECTIONS)]
        for caller in callers:
            caller.sendall(PREFACE + SETTINGS)
        for caller in callers:
            assert caller.recv(9), "each is served"
        answers(bounded)
    assert bounded.steering.calls == []


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


def health_check(stream: int) -> bytes:
    """A whole call that needs no token, as HTTP/2 frames."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/grpc.health.v1.Health/Check",
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    packed = b"".join(
        b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
        for name, value in headers.items()
    )
    return frame(1, 4, stream, packed) + frame(0, 1, stream, bytes(5))


def test_callers_that_let_no_answer_come_hold_no_places(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    no_window = frame(4, 0, 0, (4).to_bytes(2, "big") + bytes(4))
    guard = Guard(response_timeout_s=0.2, calls=32)
    with live(tmp_path, guard=guard) as run, ExitStack() as stack:
        for _ in range(8):
            caller = stack.enter_context(connected(run))
            calls = b"".join(health_check(stream) for stream in range(1, 40, 2))
            caller.sendall(PREFACE + no_window + calls)
        while "Health/Check is dropped" not in caplog.text:
            assert call(run, "GetStatus", b"") in ANSWERS
        while call(run, "GetStatus", b"") is not StatusCode.OK:
            pass
