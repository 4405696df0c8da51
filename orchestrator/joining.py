"""Joining a Ray cluster: what Ray takes a minute to say in its own words is said at once.

Knows addresses only; what is done on the cluster is the caller's.
"""

import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from orchestrator.errors import RunError

REACH_TIMEOUT_S = 10.0


def join(address: str, **options: Any) -> None:
    """Connect this process to the cluster at `address` (host:port, ray://host:port or a word of
    Ray's such as `auto`); `options` go to `ray.init`. Raises RunError."""
    _require_listener(address)
    import ray

    with _stderr_kept() as said:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
        except Exception as error:
            raise _refused(address, str(error), said()) from error


def _refused(address: str, error: str, said: str) -> RunError:
    """Why there is no connection, from Ray's error and from what its libraries printed."""
    where = f"cannot connect to the Ray cluster at {address}"
    if "AuthToken" in said + error:
        return RunError(
            f"{where}: it wants a token, and the one that was sent is missing or wrong. Set "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to a file with the cluster's token, as "
            "docs/cluster.md tells."
        )
    if address.startswith("ray://") and "Initialization failure" in error:
        return RunError(
            f"{where}: the process that serves this client did not come up there in time. Try "
            "again: a busy head node takes a while."
        )
    cause = " ".join(error.split()).rstrip(".")
    return RunError(f"{where}: {cause}. Check the address, and that Ray's versions match.")


@contextmanager
def _stderr_kept() -> Iterator[Callable[[], str]]:
    """Keep from the terminal what libraries of this process print to it; yields how to read it."""
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as kept:

        def read() -> str:
            kept.seek(0)
            return kept.read().decode(errors="replace")

        os.dup2(kept.fileno(), 2)
        try:
            yield read
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)


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
