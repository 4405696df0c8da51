"""One child process of a pool, as the parent sees it: start, messages with deadlines, kill."""

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from typing import Any, Self

from verifiers.wire import LENGTH

MESSAGE_LIMIT_BYTES = 8 << 20
_GRACE_S = 0.05


class ChildLost(Exception):
    """The child died, broke the protocol, or (`late`) did not answer in time."""

    def __init__(self, cause: str, *, late: bool = False) -> None:
        super().__init__(cause)
        self.late = late


class ChildProcess:
    """A running child. Not for concurrent use: one request at a time."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, memory_limit_bytes: int, timeout_s: float) -> Self:
        """A child that is ready for requests. Raises ChildLost."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = _spawn(theirs.fileno(), memory_limit_bytes)
            except OSError as error:
                ours.close()
                raise ChildLost(f"a process could not be started: {error}") from error
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_connection(sock=ours, limit=MESSAGE_LIMIT_BYTES)
            child = cls(process, reader, writer)
            await child.receive(timeout_s)
        except BaseException as error:
            # Closed under its transport, the socket would leave its number in the loop's selector,
            # and the next socket of that number would never be heard.
            (writer or ours).close()
            _kill(process)
            if isinstance(error, ChildLost):
                raise ChildLost(f"a process did not come up: {error}") from error
            raise
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return _exit(self._process) is None

    async def request(self, message: Any, timeout_s: float) -> dict[str, Any]:
        """Send `message` and return the answer. Raises ChildLost."""
        body = pickle.dumps(message)
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(LENGTH.pack(len(body)) + body)
                await self._writer.drain()
        except TimeoutError:
            raise ChildLost(f"not read within {timeout_s:g} s", late=True) from None
        except OSError:
            raise ChildLost(await self._ending()) from None
        return await self.receive(timeout_s)

    async def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next message. Raises ChildLost."""
        try:
            line = await self._line(timeout_s)
            message = json.loads(line) if line else None
        except TimeoutError:
            raise ChildLost(f"no answer within {timeout_s:g} s", late=True) from None
        except (OSError, ValueError, RecursionError) as error:
            raise ChildLost(f"the process sent an unreadable message: {error}") from error
        if message is None:
            raise ChildLost(await self._ending())
        if not isinstance(message, dict):
            raise ChildLost(f"the process sent a {type(message).__name__} for a message")
        return message

    async def kill(self) -> None:
        """Kill the child with all it started in its process group, and reap it."""
        self._writer.close()
        await asyncio.to_thread(_kill, self._process)

    async def _line(self, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._reader.readline()
        except TimeoutError:
            # Where this loop was late, not the child, the answer has arrived by now.
            async with asyncio.timeout(_GRACE_S):
                return await self._reader.readline()

    async def _ending(self) -> str:
        """How the process ended, in words."""
        for _ in range(100):
            if (ending := _exit(self._process)) is not None:
                return f"the process {ending}"
            await asyncio.sleep(0.01)
        return "the process closed its connection"


def _spawn(descriptor: int, memory_limit_bytes: int) -> subprocess.Popen[bytes]:
    """A clean interpreter with the caller's import path, in a process group of its own."""
    arguments = [str(descriptor), str(os.getpid()), str(memory_limit_bytes)]
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "verifiers.child", *arguments],
        env=os.environ | threads | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        pass_fds=(descriptor,),
        start_new_session=True,
    )


def _exit(process: subprocess.Popen[bytes]) -> str | None:
    """How the process ended, None while it runs. Leaves it unreaped: until `_kill` its id, and so
    its group's, cannot pass to another process."""
    if process.returncode is not None:
        return "was killed"
    try:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return "was reaped by other code"
    if ended is None:
        return None
    if ended.si_code == os.CLD_EXITED:
        return f"exited with code {ended.si_status}"
    return f"died of {signal.Signals(ended.si_status).name}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
