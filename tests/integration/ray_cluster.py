"""Ray clusters for tests: nodes as processes of their own on free ports, with a dashboard.

They touch neither Ray's default ports nor the user's ~/.ray, and end by process id.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import psutil
import ray
from live import QUICKSTART, REPOSITORY

CONFIG = str(QUICKSTART.relative_to(REPOSITORY))
START_LIMIT_S = 120.0
NODE_PORTS = (
    "node-manager-port",
    "object-manager-port",
    "metrics-export-port",
    "runtime-env-agent-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
)
HEAD_PORTS = ("port", "dashboard-port", "ray-client-server-port")


class RayCluster:
    """A head node and others, each with custom resources; with `token`, callers have to show it."""

    def __init__(self, nodes: Sequence[Mapping[str, float]], token: str | None = None) -> None:
        # Ray's sockets lie in there, and their paths have to be short.
        self.folder = Path(tempfile.mkdtemp(prefix="slip-", dir="/tmp"))
        self._token = token
        self._nodes: list[subprocess.Popen[bytes]] = []
        head_ports = _free_ports(HEAD_PORTS)
        self.url = f"http://127.0.0.1:{head_ports['dashboard-port']}"
        head = ("--head", "--dashboard-host=127.0.0.1", f"--temp-dir={self.folder}/ray")
        try:
            self._start_node(nodes[0], [*head, *_options(head_ports)])
            self._wait_for_nodes(1)
            self.address = f"{ray.util.get_node_ip_address()}:{head_ports['port']}"
            for resources in nodes[1:]:
                self.add_node(resources)
        except BaseException:
            self.stop()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a client that may use the cluster."""
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SLIPSTREAM_"))}
        # The job's `python` is the one on the PATH that Ray was started with.
        keep["PATH"] = f"{Path(sys.executable).parent}:{keep['PATH']}"
        keep["HOME"] = str(self.folder)
        if self._token is None:
            return {**keep, "RAY_AUTH_MODE": "disabled"}
        file = self.folder / "token"
        file.write_text(self._token)
        return {**keep, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}

    def state(self, kind: str) -> list[dict[str, Any]]:
        """Rows of the state API: `nodes`, `actors`, `jobs`."""
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        request = Request(f"{self.url}/api/v0/{kind}?detail=1&limit=1000", headers=headers)
        with urlopen(request, timeout=30) as response:
            return json.loads(response.read())["data"]["result"]["result"]

    def node_with(self, resource: str) -> str:
        """Id of the node that has a resource."""
        (node,) = (n for n in self.state("nodes") if resource in n["resources_total"])
        return node["node_id"]

    def add_node(self, resources: Mapping[str, float]) -> None:
        """Start another node and wait until the head knows it."""
        self._start_node(resources, [f"--address={self.address}"])
        self._wait_for_nodes(len(self._nodes))

    def lose_node(self, number: int) -> None:
        """Kill a node with everything on it."""
        _kill_all([self._nodes.pop(number)])

    def stop(self) -> None:
        """End every process of the cluster, jobs included."""
        _kill_all(self._nodes)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start_node(self, resources: Mapping[str, float], options: Sequence[str]) -> None:
        log = self.folder / f"node-{len(self._nodes)}.log"
        with log.open("wb") as output:
            self._nodes.append(
                subprocess.Popen(
                    [
                        *(str(Path(sys.executable).parent / "ray"), "start", "--block"),
                        *("--num-cpus=2", f"--resources={json.dumps(dict(resources))}"),
                        *("--disable-usage-stats", "--object-store-memory=200000000"),
                        *_options(_free_ports(NODE_PORTS)),
                        *options,
                    ],
                    env=self.environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _wait_for_nodes(self, count: int) -> None:
        end = time.monotonic() + START_LIMIT_S
        while time.monotonic() < end:
            for number, node in enumerate(self._nodes):
                assert node.poll() is None, (self.folder / f"node-{number}.log").read_text()
            try:
                alive = [node for node in self.state("nodes") if node["state"] == "ALIVE"]
                if len(alive) == count:
                    return
            except (URLError, OSError, ValueError, KeyError):
                pass  # The dashboard answers before it knows the nodes.
            time.sleep(0.3)
        raise AssertionError(f"no cluster of {count} nodes within {START_LIMIT_S:.0f} s")


def _kill_all(nodes: Sequence[subprocess.Popen[bytes]]) -> None:
    family: list[psutil.Process] = []
    for node in nodes:
        process = psutil.Process(node.pid)
        family += [*process.children(recursive=True), process]
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    for node in nodes:
        node.wait()
    psutil.wait_procs(family)


def _options(values: Mapping[str, int]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


def _free_ports(names: Sequence[str]) -> dict[str, int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in names]
        return {name: s.getsockname()[1] for name, s in zip(names, sockets, strict=True)}


def submit_command(cluster: RayCluster, *options: str) -> list[str]:
    """The quick start, submitted to `cluster`."""
    command = [sys.executable, "-m", "orchestrator.cli", "submit", CONFIG]
    return [*command, f"--address={cluster.url}", *options]


def wait_for(
    happened: Callable[[], bool], process: subprocess.Popen[bytes], limit_s: float = START_LIMIT_S
) -> None:
    """Return once `happened` while `process` lives; fails after the limit."""
    end = time.monotonic() + limit_s
    while not happened():
        assert process.poll() is None, "the process ended before"
        assert time.monotonic() < end, f"not within {limit_s:.0f} s"
        time.sleep(0.2)


def submit(
    cluster: RayCluster, *options: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, from the repository's root."""
    return subprocess.run(
        submit_command(cluster, *options),
        cwd=REPOSITORY,
        env={**cluster.environment, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=300,
    )
