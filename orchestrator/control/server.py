"""Serving the control service of one run: address, token, TLS, limits, and where it is found.

Knows `Steering` only as something to hand on. Lives on the event loop of the run.
"""

import contextlib
import logging
import os
import resource
import secrets
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc
import ray
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.control import control_pb2 as pb
from orchestrator.control import control_pb2_grpc as pb_grpc
from orchestrator.control.endpoint import (
    ACTOR_PREFIX,
    FILE_NAME,
    RAY_NAMESPACE,
    TOKEN_VARIABLE,
    Endpoint,
    join,
)
from orchestrator.control.interceptors import Authentication, Guard
from orchestrator.control.service import ControlService
from orchestrator.errors import RunError
from orchestrator.operation_config import NODE_HOST, ControlConfig, is_loopback
from orchestrator.steering import Steering

logger = logging.getLogger(__name__)

REQUEST_BYTES = 64 << 10
METADATA_BYTES = 8 << 10
OPEN_CALLS = 1024
CALLS_PER_CONNECTION = 64
CONNECTIONS = 2048
AGE_MS = 3_600_000
AGE_GRACE_MS = 60_000
HANDSHAKE_MS = 10_000
IDLE_MS = 300_000
KEEPALIVE_MS = 60_000
KEEPALIVE_TIMEOUT_MS = 20_000
GRACE_S = 2.0
SERVICE = pb.DESCRIPTOR.services_by_name["ControlService"].full_name


class ControlAddress:
    """Ray actor that tells the cluster where a run's control service is."""

    def __init__(self, endpoint: dict[str, Any]) -> None:
        self._endpoint = endpoint

    def where(self) -> dict[str, Any]:
        """The content of control.json."""
        return self._endpoint


class ControlServer:
    """The control service of one run, from `start` to `stop`."""

    def __init__(
        self,
        config: ControlConfig,
        steering: Steering,
        run: str,
        directory: Path,
        *,
        announce: bool = True,
        service: ControlService | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._config = config
        self._steering = steering
        self._run = run
        self._announce = announce
        self._directory = directory
        self._service = service
        self._guard = guard or Guard()
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()
        self._actor: Any = None

    async def start(self) -> str:
        """Serve, write control.json and register with Ray if it is connected; the address to call.

        Raises RunError when the address cannot be bound, the certificate is of no use, or a
        service without a token would be reachable from other machines.
        """
        host = self._config.host
        if host == NODE_HOST:
            host = _node_address()
        token = self._token(host)
        credentials, tls_ca = self._tls()
        server = self._build(token)
        try:
            port = _bind(server, host, self._config.port, credentials)
            await self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
            await server.start()
        except BaseException:
            await server.stop(None)
            raise
        address = join(_callable(host), port)
        self._server = server
        endpoint = Endpoint(
            address=address, token=token, tls_ca=tls_ca, run=self._run, pid=os.getpid()
        )
        try:
            endpoint.write(self._directory)
            self._register(endpoint)
        except BaseException:
            await self.stop()
            raise
        logger.info(
            "control service at %s, %s, %s",
            address,
            "TLS" if tls_ca else "no TLS",
            "token required" if token else "no token",
        )
        return address

    async def stop(self) -> None:
        """Remove control.json, let the callers go and close; does nothing the second time."""
        server, self._server = self._server, None
        if server is None:
            return
        (self._directory / FILE_NAME).unlink(missing_ok=True)
        if self._actor is not None:
            with contextlib.suppress(Exception):  # the cluster may be gone already
                ray.kill(self._actor)
        await self._health.enter_graceful_shutdown()
        assert self._service is not None
        self._service.finish()
        await server.stop(GRACE_S)
        await self._service.close()

    def _token(self, host: str) -> str | None:
        if self._config.token == "none":
            if not is_loopback(host):
                raise RunError(
                    f"control.token is none and control.host resolves to {host}: everyone who "
                    'reaches it could steer the run. Set control.token = "required", or '
                    'control.host = "127.0.0.1".'
                )
            return None
        token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe()
        if not token.isascii() or not token.isprintable() or " " in token:
            raise RunError(
                f"{TOKEN_VARIABLE} holds a character that a token cannot have; expected printable "
                "ASCII without spaces. Unset it to get a random token."
            )
        return token

    def _tls(self) -> tuple[grpc.ServerCredentials | None, str | None]:
        cert, key = self._config.tls_cert, self._config.tls_key
        if cert is None or key is None:
            return None, None
        try:
            # gRPC would take anything here and fail at the first handshake, saying little.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(cert, key, password=_no_password)
            chain = Path(cert).read_bytes()
            private = Path(key).read_bytes()
        except (OSError, ValueError) as error:
            raise RunError(
                f"control.tls_cert {cert} and control.tls_key {key} do not load: {error}. Expected "
                "a certificate chain and its private key without a password, both as PEM."
            ) from error
        return grpc.ssl_server_credentials([(private, chain)]), chain.decode("ascii", "replace")

    def _build(self, token: str | None) -> grpc.aio.Server:
        interceptors = [*([Authentication(token)] if token else []), self._guard]
        server = grpc.aio.server(
            interceptors=interceptors, options=_options(), maximum_concurrent_rpcs=OPEN_CALLS
        )
        self._service = self._service or ControlService(self._steering)
        pb_grpc.add_ControlServiceServicer_to_server(self._service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        return server

    def _register(self, endpoint: Endpoint) -> None:
        if not self._announce or not ray.is_initialized():
            return
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        try:
            self._actor = (
                ray.remote(ControlAddress)
                .options(
                    name=f"{ACTOR_PREFIX}{self._run}",
                    namespace=RAY_NAMESPACE,
                    num_cpus=0,
                    scheduling_strategy=here,
                )
                .remote(endpoint.as_dict())
            )
        except ValueError as error:
            logger.warning("the run cannot be found through Ray: %s", error)


def _options() -> list[tuple[str, int]]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        # Without this a second run could share the port, and callers would reach either.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", REQUEST_BYTES),
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES),
        # A message counts as sent when the caller lets it come, not when it is buffered here.
        ("grpc.http2.write_buffer_size", 0),
        ("grpc.max_concurrent_streams", CALLS_PER_CONNECTION),
        # The run needs file descriptors of its own.
        ("grpc.max_allowed_incoming_connections", max(16, min(CONNECTIONS, files // 2))),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        # gRPC keeps a call open whose answer is not read until its connection ends.
        ("grpc.max_connection_age_ms", AGE_MS),
        ("grpc.max_connection_age_grace_ms", AGE_GRACE_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.http2.max_ping_strikes", 2),
    ]


def _bind(
    server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None
) -> int:
    """Let the server listen; the port."""
    try:
        _require_bindable(host, port)
        target = join(host, port)
        bound: int = (
            server.add_insecure_port(target)
            if credentials is None
            else server.add_secure_port(target, credentials)
        )
        if bound == 0:
            raise RuntimeError("gRPC gave no port")
    except (OSError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RunError(
            f"the control service cannot listen at {join(host, port)}: {why}. Set control.port to "
            "a free port (0 takes any) and control.host to an address of this machine, or "
            "control.enabled = false."
        ) from error
    return bound


def _callable(host: str) -> str:
    """`host`, or the node's address where it stands for all addresses of this machine."""
    return _node_address() if host in ("0.0.0.0", "::") else host


def _node_address() -> str:
    address: str = ray.util.get_node_ip_address()
    return address


def _require_bindable(host: str, port: int) -> None:
    """Raise OSError as the system words it; gRPC's own errors are pages long."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def _no_password() -> str:
    raise ValueError("the key needs a password")
