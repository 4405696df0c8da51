"""The ledger's journal on disk: one SQLite file per run, in WAL mode.

Written by a thread of its own in batches, so that no loop waits for the disk. What was appended
together is kept together, and what a crash leaves is always a prefix of the history. That holds
for the death of processes (synchronous=NORMAL); after a power loss the newest transactions may be
missing. WAL needs a local disk: network file systems do not work.

Knows how transitions are stored, not which may follow which.
"""

import asyncio
import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, get_args

from orchestrator.errors import RunError
from orchestrator.history.transitions import GroupTransition, Stepped, Transition

FORMAT = "1"
BATCH_ITEMS = 4096
"""Appends after which a transaction is closed although more are waiting."""
LOCK_TIMEOUT_S = 60.0
"""Others only read; a reader that copies the file may hold its lock for a while."""
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (*get_args(GroupTransition), Stepped)}
_FIELDS = {kind: tuple(f.name for f in fields(kind)) for kind in _KINDS.values()}
_SCHEMA = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE transitions (
    seq INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    subject INTEGER NOT NULL,  -- the group, or the step of a Stepped
    content TEXT NOT NULL  -- its fields as a JSON list
);
CREATE INDEX steps ON transitions (subject) WHERE kind = 'Stepped';
"""


@dataclass(frozen=True, eq=False)
class _Flush:
    """Somebody waits for everything before it."""

    durably: bool
    done: "Future[None]" = field(default_factory=Future)


class LedgerFile:
    """Appends to `ledger.sqlite`, which `create` made, and reads it back."""

    def __init__(self, path: Path) -> None:
        """Raises RunError when the file is missing or is not a ledger of this format."""
        self._path = path
        self._failure: Exception | None = None
        self._closed = False
        found = self.about().get("format")
        if found != FORMAT:
            raise RunError(f"{path} has format {found!r}, this version reads {FORMAT!r}.")
        self._queue: SimpleQueue[Sequence[Transition] | _Flush | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="ledger", daemon=True)
        self._writer.start()

    @classmethod
    def create(cls, path: Path, *, tasks: str) -> "LedgerFile":
        """A new file; `tasks` identifies the training tasks that its history is about.

        Raises RunError when it cannot be made.
        """
        try:
            with closing(sqlite3.connect(path)) as connection, connection:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.executescript(_SCHEMA)
                about = [("format", FORMAT), ("tasks", tasks)]
                connection.executemany("INSERT INTO about VALUES (?, ?)", about)
        except sqlite3.Error as error:
            raise _unusable(path, error) from error
        return cls(path)

    def about(self) -> dict[str, str]:
        """What is known about the whole file."""
        with closing(_open(self._path)) as connection:
            try:
                return dict(connection.execute("SELECT key, value FROM about"))
            except sqlite3.Error as error:
                raise _unusable(self._path, error) from error

    def append(self, transitions: Sequence[Transition]) -> None:
        """Keep `transitions`, all of them or none; returns before they are on disk.

        Raises RunError when earlier ones could not be kept.
        """
        self._require_sound()
        self._queue.put(transitions)

    async def flush(self, *, durably: bool = False) -> None:
        """Return once everything appended so far survives the end of this process; `durably`, that
        of the machine too.

        Raises RunError when it could not be kept.
        """
        self._require_sound()
        asked = _Flush(durably)
        self._queue.put(asked)
        await asyncio.wrap_future(asked.done)
        self._require_sound()

    def close(self) -> None:
        """Keep what was appended and end the thread."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._writer.join()

    def read(self) -> Iterator[Transition]:
        """The history that is on disk, oldest first. Raises RunError where it is damaged."""
        yield from read_history(self._path)

    def steps_after(self, step: int) -> list[Stepped]:
        """Batch steps above `step`, in order."""
        query = (
            "SELECT kind, content FROM transitions WHERE kind = 'Stepped' AND subject > ? "
            "ORDER BY subject"
        )
        found = _rows(self._path, query, step)
        return [transition for transition in found if isinstance(transition, Stepped)]

    def _require_sound(self) -> None:
        if self._failure is not None:
            raise RunError(
                f"the ledger cannot be written: {self._failure} ({self._path}). What was trained "
                "since is not accounted for; free disk space, then go on with --resume."
            ) from self._failure

    def _write(self) -> None:
        """The thread. It answers everybody, whatever happens."""
        try:
            with closing(sqlite3.connect(self._path, timeout=LOCK_TIMEOUT_S)) as connection:
                connection.execute("PRAGMA synchronous=NORMAL")
                while self._write_some(connection, self._take()):
                    pass
        except Exception as error:
            self._failure = error
            while not self._queue.empty():
                _answer(self._take())

    def _take(self) -> "list[Sequence[Transition] | _Flush | None]":
        """What is waiting; blocks while that is nothing."""
        items = [self._queue.get()]
        with suppress(Empty):
            while len(items) < BATCH_ITEMS:
                items.append(self._queue.get_nowait())
        return items

    def _write_some(
        self, connection: sqlite3.Connection, items: "list[Sequence[Transition] | _Flush | None]"
    ) -> bool:
        """One transaction of what was taken; whether there is more to come."""
        try:
            self._keep(connection, [item for item in items if isinstance(item, Sequence)])
            if any(isinstance(item, _Flush) and item.durably for item in items):
                connection.execute("PRAGMA wal_checkpoint(FULL)")
        except Exception as error:
            self._failure = self._failure or error
        _answer(items)
        return None not in items

    def _keep(self, connection: sqlite3.Connection, calls: list[Sequence[Transition]]) -> None:
        """Write what these calls of `append` got, unless something before it is missing."""
        if self._failure is not None:
            return
        rows = [_encode(transition) for call in calls for transition in call]
        with connection:
            connection.executemany(
                "INSERT INTO transitions (kind, subject, content) VALUES (?, ?, ?)", rows
            )


def _answer(items: "list[Sequence[Transition] | _Flush | None]") -> None:
    """Tell those who wait; one whose caller was cancelled takes no answer."""
    for item in items:
        if isinstance(item, _Flush) and item.done.set_running_or_notify_cancel():
            item.done.set_result(None)


def read_history(path: Path) -> Iterator[Transition]:
    """The transitions of a ledger file, oldest first, of a run that may be live.

    Raises RunError when there is none or where it is damaged.
    """
    yield from _rows(path, "SELECT kind, content FROM transitions ORDER BY seq")


def last_step(path: Path) -> int:
    """The newest batch step of a ledger file; 0 before the first."""
    with closing(_open(path)) as connection:
        try:
            query = "SELECT max(subject) FROM transitions WHERE kind = 'Stepped'"
            return connection.execute(query).fetchone()[0] or 0
        except sqlite3.Error as error:
            raise _unusable(path, error) from error


def _rows(path: Path, query: str, *values: Any) -> Iterator[Transition]:
    with closing(_open(path)) as connection:
        try:
            for kind, content in connection.execute(query, values):
                yield _KINDS[kind](*map(_frozen, json.loads(content)))
        except (sqlite3.Error, KeyError, TypeError, ValueError) as error:
            raise _unusable(path, error) from error


def _open(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise RunError(f"{path} is missing: without its ledger a run cannot be taken up again.")
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)


def _encode(transition: Transition) -> tuple[str, int, str]:
    values = [getattr(transition, name) for name in _FIELDS[type(transition)]]
    subject = transition.step if isinstance(transition, Stepped) else transition.group_id
    return type(transition).__name__, subject, json.dumps(values, separators=(",", ":"))


def _frozen(value: Any) -> Any:
    """JSON lists as the tuples that they were."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _unusable(path: Path, error: Exception) -> RunError:
    return RunError(
        f"the ledger {path} cannot be used: {error}. It must be on a local disk with free space; "
        "a damaged one cannot be repaired."
    )
