"""A small synchronous client of one run's control service.

Every failure is a RunError of one paragraph, or a UsageError where the request can never be right.
Requests that change something are sent again, under the same id, only when nothing answered.
"""

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Self

import grpc
from grpc import StatusCode

from orchestrator.control import control_pb2 as pb
from orchestrator.control import control_pb2_grpc as pb_grpc
from orchestrator.control.convert import (
    ACTIVITIES,
    ROLES,
    activity_of,
    fleet_of,
    limits_of,
    status_of,
)
from orchestrator.control.endpoint import TOKEN_VARIABLE, Endpoint
from orchestrator.errors import RunError, SlipstreamError, UsageError
from orchestrator.steering import (
    Activity,
    CheckpointDone,
    EvaluationDone,
    FleetStatus,
    Limits,
    Role,
    RunStatus,
)

DEADLINE_S = 15.0
LONG_DEADLINE_S = 3600.0
RETRY_DELAYS_S = (0.5, 1.0, 2.0)
ANSWER_BYTES = 16 << 20


class Client:
    """Calls to one control service; use as a context manager."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        deadline_s: float = DEADLINE_S,
        long_deadline_s: float = LONG_DEADLINE_S,
        retry_delays_s: tuple[float, ...] = RETRY_DELAYS_S,
    ) -> None:
        self.endpoint = endpoint
        self._deadline_s = deadline_s
        self._long_deadline_s = long_deadline_s
        self._retry_delays_s = retry_delays_s
        self._channel = _channel(endpoint)
        self._stub = pb_grpc.ControlServiceStub(self._channel)
        self._metadata = (
            [("authorization", f"Bearer {endpoint.token}")] if endpoint.token is not None else []
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def status(self) -> RunStatus:
        """A snapshot."""
        return self._read(self._call(self._stub.GetStatus, pb.GetStatusRequest()), status_of)

    def watch(self, min_interval_s: float = 1.0) -> Iterator[RunStatus]:
        """Snapshots until the run ends; goes on over a new connection when one is lost."""
        request = pb.WatchRequest(min_interval_s=min_interval_s)
        while True:
            seen = False
            try:
                for message in self._stub.Watch(request, metadata=self._metadata):
                    seen = True
                    yield self._read(message, status_of)
                return
            except grpc.RpcError as error:
                lost = error.code() is StatusCode.UNAVAILABLE and seen and not self._gone()
                if not lost:
                    raise self._explained(error, None) from None

    def scale(self, role: Role, target: int) -> FleetStatus:
        """Let a role have `target` workers."""
        request = pb.ScaleRequest(request_id=_new_id(), role=ROLES[role], target=target)
        return self._read(self._call(self._stub.Scale, request).fleet, fleet_of)

    def set_limits(
        self, *, max_staleness: int | None = None, max_groups: int | None = None
    ) -> Limits:
        """Change bounds, None leaving one as it is."""
        request = pb.SetLimitsRequest(
            request_id=_new_id(), max_staleness=max_staleness, max_groups=max_groups
        )
        return limits_of(self._call(self._stub.SetLimits, request).limits)

    def pause(self, activity: Activity) -> frozenset[Activity]:
        """Pause; everything that is paused then."""
        request = pb.PauseRequest(request_id=_new_id(), activity=ACTIVITIES[activity])
        return frozenset(map(activity_of, self._call(self._stub.Pause, request).paused))

    def resume(self, activity: Activity) -> frozenset[Activity]:
        """Go on; everything that is still paused."""
        request = pb.ResumeRequest(request_id=_new_id(), activity=ACTIVITIES[activity])
        return frozenset(map(activity_of, self._call(self._stub.Resume, request).paused))

    def checkpoint(self) -> CheckpointDone:
        """Save between two steps and wait for it."""
        request = pb.CheckpointRequest(request_id=_new_id())
        done = self._call(self._stub.Checkpoint, request, self._long_deadline_s)
        return CheckpointDone(step=done.step, path=done.path)

    def evaluate(self) -> EvaluationDone:
        """Evaluate between two steps and wait for it."""
        request = pb.EvaluateRequest(request_id=_new_id())
        done = self._call(self._stub.Evaluate, request, self._long_deadline_s)
        return EvaluationDone(
            step=done.step,
            version=done.version,
            accuracy=done.accuracy,
            samples=done.samples,
            unscored=done.unscored,
        )

    def stop(self) -> None:
        """Let the run end."""
        self._call(self._stub.Stop, pb.StopRequest(request_id=_new_id()))

    def _call(self, method: Any, request: Any, deadline_s: float | None = None) -> Any:
        limit_s = deadline_s or self._deadline_s
        delays = list(self._retry_delays_s)
        while True:
            try:
                return method(request, timeout=limit_s, metadata=self._metadata)
            except grpc.RpcError as error:
                if error.code() is not StatusCode.UNAVAILABLE or not delays or self._gone():
                    raise self._explained(error, limit_s) from None
                time.sleep(delays.pop(0))

    def _read(self, message: Any, convert: Callable[[Any], Any]) -> Any:
        try:
            return convert(message)
        except ValueError as error:
            raise RunError(
                f"{self._name()} answered what this version of slipstream does not know: {error}. "
                "Use the version that runs it."
            ) from error

    def _gone(self) -> bool:
        """Whether the driver is known to have ended."""
        endpoint = self.endpoint
        return bool(endpoint.pid) and _is_here(endpoint.host) and not _alive(endpoint.pid)

    def _name(self) -> str:
        run = self.endpoint.run
        at = f"the control service at {self.endpoint.address}"
        return f"{at} (run {run})" if run else at

    def _explained(self, error: Any, limit_s: float | None) -> SlipstreamError:
        code, details = error.code(), " ".join((error.details() or "").split())
        if code is StatusCode.UNAVAILABLE:
            return RunError(self._unavailable(details))
        if code is StatusCode.UNAUTHENTICATED:
            shown = "the token that was shown is wrong" if self.endpoint.token else "none was shown"
            return RunError(
                f"{self._name()} wants the run's token, and {shown}. Name the run directory "
                f"instead of the address, or set {TOKEN_VARIABLE} to the token in its control.json."
            )
        if code is StatusCode.DEADLINE_EXCEEDED and limit_s is not None:
            return RunError(
                f"{self._name()} did not answer within {limit_s:g} s. What was asked for goes on; "
                "`slipstream status` shows what the run is doing."
            )
        if code is StatusCode.UNIMPLEMENTED:
            return RunError(
                f"{self._name()} does not know this request: {details}. It may be another service, "
                "or a run of another version of slipstream."
            )
        told = details or f"{self._name()} failed with {code.name}."
        return UsageError(told) if code is StatusCode.INVALID_ARGUMENT else RunError(told)

    def _unavailable(self, details: str) -> str:
        if self._gone():
            return (
                f"run {self.endpoint.run} has ended without cleaning up: its process "
                f"{self.endpoint.pid} is gone, and control.json is stale. Its logs folder may tell "
                f"why; `slipstream run CONFIG --resume {self.endpoint.run}` goes on after its last "
                "step."
            )
        tls = (
            " It uses TLS: the certificate must name this address and be among the trusted ones "
            "(--tls-ca)."
            if self.endpoint.tls_ca
            else " If it uses TLS, name its certificate with --tls-ca."
        )
        return (
            f"{self._name()} cannot be reached: {details or 'no connection'}. Check that the run "
            f"is still live and that this machine reaches its address.{tls}"
        )


def _channel(endpoint: Endpoint) -> grpc.Channel:
    options = [
        # A proxy of the environment is for the web, not for a port of this cluster.
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_receive_message_length", ANSWER_BYTES),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]
    if endpoint.tls_ca is None:
        return grpc.insecure_channel(endpoint.address, options)
    trusted = grpc.ssl_channel_credentials(endpoint.tls_ca.encode())
    return grpc.secure_channel(endpoint.address, trusted, options)


def _is_here(host: str) -> bool:
    """Whether `host` is an address of this machine."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _new_id() -> str:
    return f"{socket.gethostname()[:64]}-{uuid.uuid4()}"
