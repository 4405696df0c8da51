"""A script beside endless loops: whoever ends first decides, and nothing is left running."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from orchestrator.errors import RunError


class LoopEnded(RunError):
    """A loop that must run for the whole run ended; carries its name and cause."""


async def beside(script: asyncio.Task, loops: dict[str, Coroutine]) -> Any:
    """Result of `script` while `loops` run; the first loop to end by itself ends everything.

    Raises LoopEnded, the script's own error, or CancelledError.
    """
    tasks = {asyncio.create_task(loop, name=name) for name, loop in loops.items()}
    try:
        await asyncio.wait({script, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                error = first_cause(task.exception())
                if isinstance(error, RunError):
                    raise error
                raise LoopEnded(f"the {task.get_name()} loop ended: {error}") from error
        return await script
    finally:
        for task in (script, *tasks):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(script, *tasks, return_exceptions=True)


def first_cause(error: BaseException | None) -> BaseException | None:
    """The first leaf of nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
