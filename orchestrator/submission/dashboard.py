"""Questions to a Ray cluster's dashboard over HTTP, without joining the cluster.

Each way in which it cannot answer becomes one paragraph that says what to do.
"""

import json
import logging
import socket
import ssl
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from orchestrator.capacity import Node
from orchestrator.errors import SlipstreamError, UsageError

TIMEOUT_S = 15.0
_TOKEN_SOURCES = (
    "RAY_AUTH_TOKEN, else the file that RAY_AUTH_TOKEN_PATH names, else ~/.ray/auth_token"
)


class ClusterUnavailable(SlipstreamError):
    """The dashboard gives no answer that can be used."""


def dashboard_url(address: str) -> str:
    """`address` as an http(s) URL without a trailing slash; UsageError for any other kind."""
    url = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        usable = False
    if not usable or address in ("auto", "local"):
        raise UsageError(
            f"{address!r} is not the address of a Ray dashboard. Jobs are submitted to its URL, "
            "such as http://head-node:8265; give it with --address or in RAY_API_SERVER_ADDRESS. "
            "ray:// and host:6379 are other doors of a cluster."
        )
    return url.rstrip("/")


class Dashboard:
    """The dashboard at `url`."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        self._url = url
        self._headers = headers or {}

    def ray_version(self) -> str:
        """Ray's version on the head node."""
        answer = self._get("/api/version")
        version = answer.get("ray_version") if isinstance(answer, dict) else None
        if not isinstance(version, str):
            raise self._not_a_dashboard()
        return version

    def nodes(self) -> list[Node]:
        """The nodes that are alive, with what they have in all."""
        answer = self._get(
            "/api/v0/nodes?limit=10000&filter_keys=state&filter_predicates=%3D&filter_values=ALIVE"
        )
        try:
            rows = answer["data"]["result"]["result"]
            return [
                Node(row["node_ip"], dict(row["resources_total"]))
                for row in rows
                if row["state"] == "ALIVE"
            ]
        except (KeyError, TypeError):
            raise self._not_a_dashboard() from None

    def _get(self, path: str) -> Any:
        request = Request(self._url + path, headers=self._headers)
        try:
            with urlopen(request, timeout=TIMEOUT_S) as response:
                return json.loads(response.read())
        except HTTPError as error:
            raise self._refused(error) from None
        except (URLError, OSError) as error:
            raise self._unreachable(error) from None
        except (ValueError, HTTPException):
            raise self._not_a_dashboard() from None

    def _refused(self, error: HTTPError) -> ClusterUnavailable:
        if error.code == 401:
            return ClusterUnavailable(
                f"the cluster at {self._url} asks for a token (HTTP 401) and none was sent. Ray's "
                "clients send one only when told to: set RAY_AUTH_MODE=token, with the cluster's "
                f"token in {_TOKEN_SOURCES}. `ray get-auth-token` on the head node prints it."
            )
        if error.code == 403:
            return ClusterUnavailable(
                f"the cluster at {self._url} refuses the token that was sent (HTTP 403): it is "
                f"another one's. Ray takes it from {_TOKEN_SOURCES}. `ray get-auth-token` on the "
                "head node prints the right one."
            )
        if error.code == 404:
            return self._not_a_dashboard()
        return ClusterUnavailable(
            f"the Ray dashboard at {self._url} answers HTTP {error.code} {error.reason}. The "
            "cluster may still be starting; its dashboard.log on the head node tells more."
        )

    def _unreachable(self, error: Exception) -> ClusterUnavailable:
        reason = error.reason if isinstance(error, URLError) else error
        host = urlsplit(self._url).hostname
        if isinstance(reason, socket.gaierror):
            text = f"no such host, {host}. Check the name, or use the head node's IP address"
        elif isinstance(reason, ConnectionRefusedError):
            text = (
                "nothing listens there. Check the port, 8265 unless chosen otherwise, that Ray "
                "runs, and that it was started with --dashboard-host=0.0.0.0 if it is another "
                "machine"
            )
        elif isinstance(reason, TimeoutError):
            text = (
                f"no answer within {TIMEOUT_S:.0f} s. A firewall may drop the packets: open the "
                f"port, or go through a tunnel (ssh -L 8265:localhost:8265 {host})"
            )
        elif isinstance(reason, ssl.SSLError):
            text = f"TLS fails, {reason}. Ray itself serves http://; https:// needs a proxy"
        else:
            text = f"{reason}. Check the address and the network"
        return ClusterUnavailable(f"cannot reach a Ray dashboard at {self._url}: {text}.")

    def _not_a_dashboard(self) -> ClusterUnavailable:
        return ClusterUnavailable(
            f"what answers at {self._url} is not a Ray dashboard. Its port is 8265 unless chosen "
            "otherwise; 6379 and 10001 are other doors of a cluster."
        )


def authentication_headers() -> dict[str, str]:
    """What Ray's own client would send, by RAY_AUTH_MODE and the token it finds."""
    from ray._private.authentication.http_token_authentication import (
        get_auth_headers_if_auth_enabled,
    )
    from ray.exceptions import AuthenticationError

    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    try:
        return dict(get_auth_headers_if_auth_enabled({}))
    except (AuthenticationError, RuntimeError) as error:
        cause = str(error).split(". ")[0].strip()
        raise ClusterUnavailable(
            f"RAY_AUTH_MODE asks for a token and Ray finds none: {cause}. Put the cluster's token "
            f"in {_TOKEN_SOURCES}; `ray get-auth-token` on the head node prints it."
        ) from None


def version_problem(ours: str, theirs: str) -> str | None:
    """The paragraph about Ray versions that differ."""
    if ours == theirs:
        return None
    return (
        f"the cluster runs Ray {theirs}, and this Slipstream works with Ray {ours}. Install "
        f"ray=={ours} on every node (Slipstream's lock file has it) and start the cluster again."
    )
