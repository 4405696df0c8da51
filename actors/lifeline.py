"""Ties a child process to the one that started it: when that one dies, so does the child.

A rollout worker that is killed outright cannot end its engine's processes, and they would go on
holding memory and cores. The kernel's parent-death signal will not do: it follows the thread that
started the child.
"""

import os
import select
import signal
import threading

OWNER_VARIABLE = "SLIPSTREAM_ENGINE_OWNER"
"""Environment variable with the process id that a child must not outlive."""


def follow_owner() -> None:
    """In a child of the owner: die with it. Does nothing in the owner itself or without one."""
    owner = int(os.environ.get(OWNER_VARIABLE, "0"))
    if owner in (0, os.getpid()):
        return
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    watcher = threading.Thread(target=_die_with, args=(descriptor,), name="lifeline", daemon=True)
    watcher.start()


def _die_with(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)
