"""A real Prometheus for tests: Debian's package unpacked, not installed, and one server from it."""

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

START_LIMIT_S = 60.0


def tools(folder: Path) -> dict[str, str]:
    """Paths of prometheus and promtool: those on the PATH, or else of Debian's package.

    The package is only unpacked into `folder`, so that no service is set up. Skips the test where
    it cannot be had.
    """
    names = ("prometheus", "promtool")
    found = {name: shutil.which(name) for name in names}
    if all(found.values()):
        return {name: str(path) for name, path in found.items()}
    if shutil.which("apt-get") is None:
        pytest.skip("Prometheus is not installed, and there is no apt to fetch it with")
    fetch = ["apt-get", "download", "prometheus"]
    fetched = subprocess.run(fetch, cwd=folder, capture_output=True, text=True)
    if fetched.returncode:
        subprocess.run(["apt-get", "update"], capture_output=True)  # as root only
        fetched = subprocess.run(fetch, cwd=folder, capture_output=True, text=True)
    if fetched.returncode:
        pytest.skip(f"Prometheus is not installed and apt cannot fetch it: {fetched.stderr}")
    (package,) = folder.glob("prometheus_*.deb")
    subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True)
    return {name: str(folder / "usr/bin" / name) for name in names}


class Server:
    """One Prometheus on a free loopback port."""

    def __init__(self, binary: str, config: Path, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._log = (folder / "prometheus.log").open("w")
        self.process = subprocess.Popen(
            [
                binary,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self.address}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        end = time.monotonic() + START_LIMIT_S
        while not self._is_ready():
            assert self.process.poll() is None and time.monotonic() < end, self._said(folder)
            time.sleep(0.1)

    def query(self, expression: str) -> list[Any]:
        """Result of an instant query; fails with Prometheus' own words when it does not parse."""
        parameters = urllib.parse.urlencode({"query": expression})
        url = f"http://{self.address}/api/v1/query?{parameters}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                content = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from None
        result = content["data"]["result"]
        return result if isinstance(result, list) else [result]

    def close(self) -> None:
        """End the server."""
        self.process.terminate()
        self.process.wait(30)
        self._log.close()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _said(self, folder: Path) -> str:
        return (folder / "prometheus.log").read_text()
