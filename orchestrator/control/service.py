"""The calls of ControlService over a `Steering`: reading requests, answering, streaming.

Status codes, tokens and deadlines are the interceptors' business; what a request does is the
steering's.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from orchestrator.control import control_pb2 as pb
from orchestrator.control import control_pb2_grpc as pb_grpc
from orchestrator.control.convert import (
    activities,
    activity_of,
    fleet_message,
    limits_message,
    role_of,
    status_message,
)
from orchestrator.control.idempotency import RequestMemory
from orchestrator.control.refusals import TooMany
from orchestrator.steering import InvalidRequest, Role, Steering

WATCHERS = 16
INTERVAL_S = 1.0
SHORTEST_INTERVAL_S = 0.1
LONGEST_INTERVAL_S = 60.0
HEARTBEAT_S = 5.0


class ControlService(pb_grpc.ControlServiceServicer):
    """The servicer; lives on the event loop of its steering."""

    def __init__(
        self,
        steering: Steering,
        *,
        memory: RequestMemory | None = None,
        watchers: int = WATCHERS,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._steering = steering
        self._memory = memory or RequestMemory()
        self._watchers = 0
        self._most_watchers = watchers
        self._heartbeat_s = heartbeat_s
        self._closing = asyncio.Event()

    def finish(self) -> None:
        """Let every watcher see the last snapshot and go."""
        self._closing.set()
        self._steering.changed.notify()

    async def close(self) -> None:
        """Give up what was asked for and is unfinished."""
        self.finish()
        await self._memory.close()

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.RunStatus:
        """See control.proto."""
        return status_message(self._steering.status())

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.RunStatus]:
        """See control.proto."""
        interval_s = _interval(request.min_interval_s)
        if self._watchers >= self._most_watchers:
            raise TooMany(
                f"{self._watchers} watchers are there already, the most that there may be; ask "
                "with GetStatus instead, or when one has left."
            )
        self._watchers += 1
        try:
            async for message in self._snapshots(interval_s):
                yield message
        finally:
            self._watchers -= 1

    async def Scale(self, request: pb.ScaleRequest, context: Any) -> pb.ScaleResponse:
        """See control.proto."""

        async def work() -> pb.ScaleResponse:
            role = _role(request.role)
            if not request.HasField("target"):
                raise InvalidRequest("target is missing; expected the number of workers to have.")
            return pb.ScaleResponse(fleet=fleet_message(self._steering.scale(role, request.target)))

        return await self._once("Scale", request, work)

    async def SetLimits(self, request: pb.SetLimitsRequest, context: Any) -> pb.SetLimitsResponse:
        """See control.proto."""

        async def work() -> pb.SetLimitsResponse:
            given = {
                name: getattr(request, name)
                for name in ("max_staleness", "max_groups")
                if request.HasField(name)
            }
            if not given:
                raise InvalidRequest("no limit is given; expected max_staleness or max_groups.")
            return pb.SetLimitsResponse(limits=limits_message(self._steering.set_limits(**given)))

        return await self._once("SetLimits", request, work)

    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.PauseResponse:
        """See control.proto."""

        async def work() -> pb.PauseResponse:
            self._steering.pause(_activity(request.activity))
            return pb.PauseResponse(paused=activities(self._steering.status().paused))

        return await self._once("Pause", request, work)

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeResponse:
        """See control.proto."""

        async def work() -> pb.ResumeResponse:
            self._steering.resume(_activity(request.activity))
            return pb.ResumeResponse(paused=activities(self._steering.status().paused))

        return await self._once("Resume", request, work)

    async def Checkpoint(
        self, request: pb.CheckpointRequest, context: Any
    ) -> pb.CheckpointResponse:
        """See control.proto."""

        async def work() -> pb.CheckpointResponse:
            done = await self._steering.checkpoint()
            return pb.CheckpointResponse(step=done.step, path=done.path)

        return await self._once("Checkpoint", request, work)

    async def Evaluate(self, request: pb.EvaluateRequest, context: Any) -> pb.EvaluateResponse:
        """See control.proto."""

        async def work() -> pb.EvaluateResponse:
            done = await self._steering.evaluate()
            return pb.EvaluateResponse(
                step=done.step,
                version=done.version,
                accuracy=done.accuracy,
                samples=done.samples,
                unscored=done.unscored,
            )

        return await self._once("Evaluate", request, work)

    async def Stop(self, request: pb.StopRequest, context: Any) -> pb.StopResponse:
        """See control.proto."""

        async def work() -> pb.StopResponse:
            self._steering.stop()
            return pb.StopResponse()

        return await self._once("Stop", request, work)

    async def _once(self, method: str, request: Any, work: Callable[[], Any]) -> Any:
        content = method.encode() + b"\0" + request.SerializeToString(deterministic=True)
        return await self._memory.once(request.request_id, content, work)

    async def _snapshots(self, interval_s: float) -> AsyncIterator[pb.RunStatus]:
        """Snapshots until the service closes, the last one taken after that."""
        changed = self._steering.changed
        while True:
            closing, seen = self._closing.is_set(), changed.count
            yield status_message(self._steering.status())
            if closing:
                return
            await _within(interval_s, self._closing.wait())
            if changed.count == seen and not self._closing.is_set():
                # Awaited in this task, without a hop in which a change could pass unseen.
                await _within(max(0.0, self._heartbeat_s - interval_s), changed.wait())


async def _within(seconds: float, awaitable: Awaitable[Any]) -> None:
    """Wait for `awaitable`, at most so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await awaitable


def _interval(asked_s: float) -> float:
    if asked_s == 0:
        return INTERVAL_S
    if not SHORTEST_INTERVAL_S <= asked_s <= LONGEST_INTERVAL_S:
        raise InvalidRequest(
            f"min_interval_s is {asked_s:g}; expected {SHORTEST_INTERVAL_S:g} to "
            f"{LONGEST_INTERVAL_S:g} seconds."
        )
    return asked_s


def _role(number: int) -> Role:
    try:
        return role_of(number)
    except ValueError as error:
        raise InvalidRequest(f"{error}; expected ROLE_ROLLOUT or ROLE_VERIFIER.") from None


def _activity(number: int) -> Any:
    try:
        return activity_of(number)
    except ValueError as error:
        raise InvalidRequest(
            f"{error}; expected ACTIVITY_GENERATION or ACTIVITY_TRAINING."
        ) from None
