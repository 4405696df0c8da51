"""Awaiting remote work with a deadline and a name, so that nothing waits silently.

Knows Ray's object references only as awaitables, and what Ray wraps errors in.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from ray.exceptions import RayActorError, RayTaskError

from orchestrator.errors import RunError

T = TypeVar("T")
_NO_CAUSE = "Worker unexpectedly exits with a connection error code 2"
"""All that Ray says about a process that was killed."""
_RAY_DETAILS = ("class_name:", "actor_id:", "pid:", "namespace:", "ip:", "name:")


class DeadlineExceeded(RunError):
    """A remote call did not answer in time; the message names the call and the limit."""


async def within(awaitable: Awaitable[T], timeout_s: float, what: str) -> T:
    """Result of `awaitable`, or DeadlineExceeded naming `what` after `timeout_s` seconds."""
    task = asyncio.ensure_future(_as_coroutine(awaitable))
    try:
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
