"""Joining a Ray cluster: what Ray takes a minute to say in its own words is said at once.

Knows addresses only; what is done on the cluster is the caller's.
"""

import logging
import socket
from typing import Any

from orchestrator.errors import RunError

REACH_TIMEOUT_S = 10.0


def join(address: str, **options: Any) -> None:
    """Connect this process to the cluster at `address` (host:port, ray://host:port or a word of
    Ray's such as `auto`); `options` go to `ray.init`. Raises RunError."""
    _require_listener(address)
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:
        raise RunError(
            f"cannot connect to the Ray cluster at {address}: {' '.join(str(error).split())}. "
            "Check the address, that Ray's versions match, and RAY_AUTH_MODE if it uses tokens."
        ) from error


def _require_listener(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise RunError(
            f"cannot reach the Ray cluster at {address}: {error}. Expected the address of its head "
            "node: host:6379 from a machine of the cluster, ray://host:10001 from another one, "
            "where Ray's client server runs."
        ) from None
