"""What holds for every call: who may make it, how long it may take, how its failure is told.

Knows gRPC and the errors of `steering`, not the service.
"""

import asyncio
import contextlib
import hmac
import inspect
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import StatusCode

from orchestrator.control.refusals import OtherRequest, SlowReader, TooMany
from orchestrator.errors import SlipstreamError
from orchestrator.steering import InvalidRequest, NotNow

logger = logging.getLogger(__name__)

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]]

OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check"})
"""Callable without a token. Watching one's health is not: it holds a stream for ever."""
LONG_METHODS = frozenset(
    {"/slipstream.v1.ControlService/Checkpoint", "/slipstream.v1.ControlService/Evaluate"}
)
DEADLINE_S = 60.0
LONG_DEADLINE_S = 3600.0
REQUEST_TIMEOUT_S = 10.0
"""Until the request has to be there, so that half-sent calls do not hold places."""
RESPONSE_TIMEOUT_S = 60.0
"""Until a response has to be taken, likewise."""
CALLS = 128
"""Calls that are served at once."""
OPEN_CALLS = 16
"""Of those that need no token: they must not crowd out who has one."""
_CODES = (
    (InvalidRequest, StatusCode.INVALID_ARGUMENT),
    (NotNow, StatusCode.FAILED_PRECONDITION),
    (OtherRequest, StatusCode.ALREADY_EXISTS),
    (TooMany, StatusCode.RESOURCE_EXHAUSTED),
)


class Authentication(grpc.aio.ServerInterceptor):
    """Refuses calls that do not carry the run's token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        """The handler of the call, or one that refuses it without reading its request."""
        if handler_call_details.method in OPEN_METHODS:
            return await continuation(handler_call_details)
        shown = dict(handler_call_details.invocation_metadata or ()).get("authorization")
        if shown is None:
            return _REFUSE_MISSING
        if not hmac.compare_digest(_bytes(shown), self._expected):
            return _REFUSE_WRONG
        return await continuation(handler_call_details)


class Guard(grpc.aio.ServerInterceptor):
    """Reads requests, sets deadlines, and turns what a handler raises into a status."""

    def __init__(
        self,
        *,
        deadline_s: float = DEADLINE_S,
        long_deadline_s: float = LONG_DEADLINE_S,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        response_timeout_s: float = RESPONSE_TIMEOUT_S,
        calls: int = CALLS,
    ) -> None:
        self._under_way: Counter[bool] = Counter()
        self._most_calls = calls
        self._deadline_s = deadline_s
        self._long_deadline_s = long_deadline_s
        self._request_timeout_s = request_timeout_s
        self._response_timeout_s = response_timeout_s

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        """The handler of the call, guarded."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if handler.unary_unary:
            return self._unary(handler, method)
        if handler.unary_stream:
            return self._server_stream(handler, method)
        return self._bidirectional(handler, method)

    def _unary(self, handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
        limit_s = self._long_deadline_s if method in LONG_METHODS else self._deadline_s

        async def call(requests: AsyncIterator[bytes], context: Any) -> None:
            async def work() -> Any:
                request = await self._read(requests, handler, context)
                return await handler.unary_unary(request, context)

            async def answer() -> None:
                await self._write(await self._in_time(work(), limit_s, context), context)

            await self._serve(answer, context, method)

        return _streaming(handler, call)

    def _server_stream(self, handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
        async def call(requests: AsyncIterator[bytes], context: Any) -> None:
            async def work() -> None:
                request = await self._read(requests, handler, context)
                await self._send(handler.unary_stream(request, context), context)

            await self._serve(work, context, method)

        return _streaming(handler, call)

    def _bidirectional(self, handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
        async def call(requests: AsyncIterator[bytes], context: Any) -> None:
            async def decoded() -> AsyncIterator[Any]:
                async for raw in requests:
                    yield _decode(handler, raw)

            async def work() -> None:
                await self._send(handler.stream_stream(decoded(), context), context)

            await self._serve(work, context, method)

        return _streaming(handler, call)

    async def _serve(self, work: Callable[[], Awaitable[None]], context: Any, method: str) -> None:
        """Do `work`; its failure ends the call with a status and one line."""
        is_open = method in OPEN_METHODS
        most = OPEN_CALLS if is_open else self._most_calls
        if self._under_way[is_open] >= most:
            await context.abort(
                StatusCode.RESOURCE_EXHAUSTED,
                f"{most} calls are under way, the most that there may be; ask again.",
            )
        self._under_way[is_open] += 1
        try:
            await work()
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except SlowReader as error:
            logger.warning("control: %s is dropped: %s", method, error)
            # A status would wait behind what the caller does not read.
            raise asyncio.CancelledError from None
        except Exception as error:
            await context.abort(*_status(error, method))
        finally:
            self._under_way[is_open] -= 1

    async def _in_time(self, work: Awaitable[Any], limit_s: float, context: Any) -> Any:
        """Result of `work`, within `limit_s` where the caller set no deadline."""
        deadline = asyncio.timeout(limit_s if context.time_remaining() is None else None)
        try:
            async with deadline:
                return await work
        except TimeoutError:
            if not deadline.expired():
                raise
            await context.abort(
                StatusCode.DEADLINE_EXCEEDED,
                f"not done within {limit_s:g} s, the limit of a call without a deadline; what it "
                "asked for goes on, and the same request gets its answer.",
            )

    async def _send(self, responses: Any, context: Any) -> None:
        """Send what a streaming handler yields; one that writes by itself is awaited."""
        if inspect.isawaitable(responses):
            await responses
            return
        async with contextlib.aclosing(responses):
            async for response in responses:
                await self._write(response, context)

    async def _write(self, response: Any, context: Any) -> None:
        try:
            async with asyncio.timeout(self._response_timeout_s):
                await context.write(response)
        except TimeoutError:
            raise SlowReader(
                f"nothing was read for {self._response_timeout_s:g} s; ask again to go on."
            ) from None

    async def _read(
        self, requests: AsyncIterator[bytes], handler: grpc.RpcMethodHandler, context: Any
    ) -> Any:
        try:
            raw = await asyncio.wait_for(anext(requests), self._request_timeout_s)
        except StopAsyncIteration:
            raise InvalidRequest("the call ended without a request message.") from None
        except TimeoutError:
            await context.abort(
                StatusCode.DEADLINE_EXCEEDED,
                f"the request did not arrive within {self._request_timeout_s:g} s.",
            )
        return _decode(handler, raw)


def _refusal(sentence: str) -> grpc.RpcMethodHandler:
    async def refuse(_: AsyncIterator[bytes], context: Any) -> None:
        await context.abort(StatusCode.UNAUTHENTICATED, sentence)

    return grpc.stream_stream_rpc_method_handler(refuse)


_REFUSE_MISSING = _refusal(
    "the token is missing: this run takes calls with the metadata `authorization: Bearer TOKEN`; "
    "the token stands in control.json of the run directory."
)
_REFUSE_WRONG = _refusal(
    "the token is wrong: this run takes the one in control.json of its run directory."
)


def _streaming(handler: grpc.RpcMethodHandler, call: Any) -> grpc.RpcMethodHandler:
    """Every call is served as a stream, which is the same on the wire: only then can a handler see
    to how long the request takes to come and the answer to go."""
    return grpc.stream_stream_rpc_method_handler(
        call, response_serializer=handler.response_serializer
    )


def _status(error: Exception, method: str) -> tuple[StatusCode, str]:
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code, _one_line(str(error))
    fault = secrets.token_hex(4)
    logger.error("control: %s failed, fault %s", method, fault, exc_info=error)
    meant_to_be_read = isinstance(error, SlipstreamError)
    what = _one_line(str(error)) if meant_to_be_read else f"unexpected {type(error).__name__}."
    return (
        StatusCode.INTERNAL,
        f"{what} The run's driver.log tells more under fault {fault}.",
    )


def _decode(handler: grpc.RpcMethodHandler, raw: bytes) -> Any:
    try:
        return handler.request_deserializer(raw)
    except DecodeError:
        raise InvalidRequest(
            f"the request's {len(raw)} bytes are not the message that this method takes; see "
            "control.proto, or ask the reflection service."
        ) from None


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
