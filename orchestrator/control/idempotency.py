"""Requests that are done once, however often they are sent.

Knows ids, fingerprints and coroutines, not what they do. The work belongs to this memory and not
to the call that brought it, so that it goes on when the caller is gone.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from orchestrator.control.refusals import OtherRequest, TooMany
from orchestrator.errors import RunError
from orchestrator.steering import InvalidRequest

REMEMBERED = 1024
UNFINISHED = 32
ID_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class _Entry:
    fingerprint: bytes
    work: asyncio.Task[Any]


class RequestMemory:
    """Answers of the newest requests by id; one event loop."""

    def __init__(self, remembered: int = REMEMBERED, unfinished: int = UNFINISHED) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._remembered = remembered
        self._unfinished = unfinished

    async def once(
        self, request_id: str, request: bytes, work: Callable[[], Coroutine[Any, Any, Any]]
    ) -> Any:
        """The result of `work`, which is started unless this id has brought the same `request`.

        Raises what the work raises, the same for each sender; InvalidRequest for an id that is
        none, OtherRequest, TooMany. Cancelling the wait leaves the work alone.
        """
        _require_id(request_id)
        fingerprint = hashlib.sha256(request).digest()
        entry = self._entries.get(request_id)
        if entry is None:
            entry = _Entry(fingerprint, self._start(work))
            self._entries[request_id] = entry
        elif entry.fingerprint != fingerprint:
            raise OtherRequest(
                f"request_id {request_id!r} was used for another request; make up a new id for a "
                "new request, and send a request again as it was to get its answer again."
            )
        try:
            return await asyncio.shield(entry.work)
        except asyncio.CancelledError:
            if entry.work.cancelled():
                raise RunError("the run ended before this was done.") from None
            raise

    async def close(self) -> None:
        """Cancel what is unfinished and wait for it."""
        works = [entry.work for entry in self._entries.values() if not entry.work.done()]
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)

    def _start(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
        unfinished = sum(not entry.work.done() for entry in self._entries.values())
        if unfinished >= self._unfinished:
            raise TooMany(
                f"{unfinished} requests are unfinished, the most that there may be; ask again when "
                "one is done."
            )
        done = (key for key, entry in self._entries.items() if entry.work.done())
        if len(self._entries) >= self._remembered and (oldest := next(done, None)) is not None:
            del self._entries[oldest]
        task = asyncio.ensure_future(work())
        task.add_done_callback(_retrieve)
        return task


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Mark a failure as seen: the answer may have nobody left to read it."""
    if not task.cancelled():
        task.exception()


def _require_id(request_id: str) -> None:
    if not 1 <= len(request_id) <= ID_CHARACTERS:
        raise InvalidRequest(
            f"request_id has {len(request_id)} characters; expected 1 to {ID_CHARACTERS}, made up "
            "by the caller, such as a UUID."
        )
