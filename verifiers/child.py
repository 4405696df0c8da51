"""The program of a pool's child process: scores what it is sent, one request after the other.

Started as `python -P -m verifiers.child FD PARENT_PID MEMORY_BYTES`. It holds no
deadline: the parent does, with SIGKILL.
"""

import ctypes
import json
import os
import pickle
import resource
import signal
import socket
import sys
from typing import Any, BinaryIO

from verifiers.registry import Verifier, resolve
from verifiers.scoring import score_blocking
from verifiers.wire import LENGTH, encode_verdict

_PR_SET_PDEATHSIG = 1


def main(fd: int, parent: int, memory_bytes: int) -> None:
    """Serve until the parent closes the socket."""
    _fence(parent, memory_bytes)
    with socket.socket(fileno=fd) as channel, channel.makefile("rb") as requests:
        _send(channel, {"ready": True})
        _silence()
        while (request := _receive(requests)) is not None:
            _serve(channel, request)


def _serve(channel: socket.socket, request: bytes) -> None:
    try:
        path, question, completions = pickle.loads(request)
        verifier = _load(path)
    except (Exception, SystemExit) as error:
        _send(channel, {"loaded": False, "detail": f"{type(error).__name__}: {error}"[:300]})
        return
    _send(channel, {"loaded": True})
    for verdicts in score_blocking(verifier, question, completions):
        _send(channel, {"verdicts": [encode_verdict(verdict) for verdict in verdicts]})


def _load(path: str) -> Verifier:
    verifier = resolve(path)
    verifier.call  # noqa: B018  builds it here, outside the deadline of the first completion
    return verifier


def _receive(requests: BinaryIO) -> bytes | None:
    header = requests.read(LENGTH.size)
    return requests.read(LENGTH.unpack(header)[0]) if len(header) == LENGTH.size else None


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _fence(parent: int, memory_bytes: int) -> None:
    """Die with the parent, however it dies; leave no core; bound the address space."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent has gone")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as pages:
        held = int(pages.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + memory_bytes, held + memory_bytes))


def _silence() -> None:
    """What a verifier prints goes nowhere: endless output costs nothing and fills no disk."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
