"""Awaiting remote work with a deadline and a name, so that nothing waits silently.

Knows Ray's object references only as awaitables, and what Ray wraps errors in.
"""

import asyncio
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ray.exceptions import RayActorError, RayTaskError

from orchestrator.errors import RunError

T = TypeVar("T")
_NO_CAUSE = "Worker unexpectedly exits with a connection error code 2"
"""All that Ray says about a process that was killed."""
_RAY_DETAILS = ("class_name:", "actor_id:", "pid:", "namespace:", "ip:", "name:")


class DeadlineExceeded(RunError):
    """A remote call did not answer in time; the message names the call and the limit."""


_waits: dict[object, tuple[str, float]] = {}
"""What this process waits for, and since when; one driver per process."""


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Count as waiting for `what`, for whoever asks `longest_waits`."""
    key = object()
    _waits[key] = (what, time.monotonic())
    try:
        yield
    finally:
        del _waits[key]


def longest_waits(count: int) -> list[str]:
    """Up to `count` of what is waited for now, the longest first, with the seconds so far."""
    now = time.monotonic()
    waits = sorted(_waits.values(), key=lambda wait: wait[1])
    return [f"{what} for {now - since:.0f} s" for what, since in waits[:count]]


async def within(awaitable: Awaitable[T], timeout_s: float, what: str) -> T:
    """Result of `awaitable`, or DeadlineExceeded naming `what` after `timeout_s` seconds."""
    task = asyncio.ensure_future(_as_coroutine(awaitable))
    try:
        with waiting(what):
            return await asyncio.wait_for(task, timeout_s)
    except TimeoutError as error:
        if task.done() and not task.cancelled():
            raise  # the remote side raised a TimeoutError of its own
        raise DeadlineExceeded(
            f"{what} did not answer within {timeout_s:g} s. "
            "Look at its log in the run's logs folder; raise the time limit if it was only slow."
        ) from error


async def _as_coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable


def plain(text: str) -> str:
    """An error's text in one paragraph, without the identifiers and the advice that Ray adds."""
    if _NO_CAUSE in text:
        who, _, _ = text.partition("The actor died")
        return f"{who}its process ended unexpectedly: it was killed, ran out of memory or crashed"
    lines = (line.strip() for line in text.strip().splitlines())
    told = (line for line in lines if line and not line.startswith(_RAY_DETAILS))
    return " ".join(line.split(" Some common causes")[0] for line in told)


def root_cause(error: BaseException) -> str:
    """One or two sentences that say why a remote call failed, without Ray's wrapping."""
    inner = error.cause if isinstance(error, RayTaskError) else error
    text = plain(str(inner))
    if isinstance(inner, RunError | RayActorError) and text:
        return text
    return f"{type(inner).__name__}: {text}"
