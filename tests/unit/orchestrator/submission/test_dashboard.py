"""Every way in which a dashboard fails to answer is told apart."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from orchestrator.errors import UsageError
from orchestrator.submission.dashboard import (
    ClusterUnavailable,
    Dashboard,
    dashboard_url,
    version_problem,
)

VERSION = {"version": "4", "ray_version": "2.60.0"}


@contextmanager
def serving(answers: dict[str, tuple[int, Any]]) -> Iterator[str]:
    """A double of a dashboard: path without query → status and what to say."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path.partition("?")[0], (404, ""))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode() if isinstance(body, str) else json.dumps(body).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("address", ["ray://head:10001", "auto", "http://", "http://h:port"])
def test_addresses_that_are_no_dashboard(address: str) -> None:
    with pytest.raises(UsageError, match="not the address of a Ray dashboard"):
        dashboard_url(address)


def test_addresses() -> None:
    assert dashboard_url("head:8265") == "http://head:8265"
    assert dashboard_url("https://head/ray/") == "https://head/ray"


def test_version_and_nodes() -> None:
    rows = [
        {"node_ip": "10.0.0.1", "state": "ALIVE", "resources_total": {"CPU": 2.0}},
        {"node_ip": "10.0.0.2", "state": "DEAD", "resources_total": {"CPU": 2.0}},
    ]
    nodes = {"result": True, "data": {"result": {"result": rows}}}
    with serving({"/api/version": (200, VERSION), "/api/v0/nodes": (200, nodes)}) as url:
        assert Dashboard(url).ray_version() == "2.60.0"
        assert [node.address for node in Dashboard(url).nodes()] == ["10.0.0.1"]


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, "", "RAY_AUTH_MODE=token"),
        (403, "", "another one's"),
        (404, "", "not a Ray dashboard"),
        (200, "<html>", "not a Ray dashboard"),
        (200, {"other": 1}, "not a Ray dashboard"),
        (200, [1], "not a Ray dashboard"),
        (503, "", "HTTP 503"),
    ],
)
def test_answers_that_do_not_help(status: int, body: Any, said: str) -> None:
    with serving({"/api/version": (status, body)}) as url:
        with pytest.raises(ClusterUnavailable, match=said) as caught:
            Dashboard(url).ray_version()
        assert url in str(caught.value)


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ClusterUnavailable, match="nothing listens there"):
            Dashboard(url).ray_version()


def test_no_such_host() -> None:
    with pytest.raises(ClusterUnavailable, match=r"no such host, no\.such\.host\.invalid"):
        Dashboard("http://no.such.host.invalid:8265").ray_version()


def test_another_protocol() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"\x00\x00\x18\x04\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(ClusterUnavailable, match="not a Ray dashboard"):
            Dashboard(f"http://127.0.0.1:{server.getsockname()[1]}").ray_version()
        thread.join()


def test_versions() -> None:
    assert version_problem("2.60.0", "2.60.0") is None
    problem = version_problem("2.60.0", "2.44.1")
    assert problem is not None
    assert "runs Ray 2.44.1" in problem
    assert "ray==2.60.0" in problem
