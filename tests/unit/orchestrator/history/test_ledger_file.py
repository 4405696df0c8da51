"""The journal on disk: batched, whole calls, a readable prefix after a crash."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.errors import RunError
from orchestrator.history.ledger import Ledger
from orchestrator.history.ledger_file import LedgerFile, read_history
from orchestrator.history.transitions import (
    Admitted,
    Consumed,
    Dropped,
    Failed,
    Generated,
    Ready,
    Retried,
    Stepped,
    Transition,
    Verified,
)

EVERYTHING: list[Transition] = [
    Admitted(0, "täsk \n 'x'", 2),
    Generated(0, 0, (3, 5)),
    Verified(0, 0),
    Ready(0, 0),
    Consumed(0, 0, 1, (3, 0), ({}, {"stale": 5})),
    Stepped(1, 1, 2, 10, ((0, 0),)),
    Admitted(1, "b", 1),
    Retried(1, "worker_lost", "it died"),
    Failed(1, "worker_lost", "again"),
    Admitted(2, "c", 1),
    Generated(2, 0, (0,)),
    Dropped(2, "stale"),
]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[LedgerFile]:
    ledger_file = LedgerFile.create(tmp_path / "ledger.sqlite", tasks="abc")
    yield ledger_file
    ledger_file.close()


def test_every_kind_of_transition_comes_back_as_it_was(file: LedgerFile) -> None:
    file.append(EVERYTHING)
    asyncio.run(file.flush())
    assert list(file.read()) == EVERYTHING
    assert Ledger.replayed(file.read()).report().balanced


def test_a_reopened_file_goes_on(file: LedgerFile, tmp_path: Path) -> None:
    file.append(EVERYTHING[:6])
    file.close()
    again = LedgerFile(tmp_path / "ledger.sqlite")
    assert again.about() == {"format": "1", "tasks": "abc"}
    again.append(EVERYTHING[6:])
    again.close()
    assert list(again.read()) == EVERYTHING


def test_steps_are_found_by_number(file: LedgerFile) -> None:
    steps = [Stepped(n, n, 2, 10, ((n, 0),)) for n in range(1, 6)]
    file.append([*EVERYTHING[:1], *steps])
    asyncio.run(file.flush())
    assert file.steps_after(3) == steps[3:]
    assert file.steps_after(0) == steps


def test_appending_does_not_wait_for_the_disk(file: LedgerFile, tmp_path: Path) -> None:
    """While somebody else holds the write lock, appends return and are kept once it is free."""
    other = sqlite3.connect(tmp_path / "ledger.sqlite")
    other.execute("BEGIN IMMEDIATE")
    file.append(EVERYTHING)
    assert list(file.read()) == []
    other.rollback()
    other.close()
    asyncio.run(file.flush())
    assert list(file.read()) == EVERYTHING


KILLED = """
import sys
from pathlib import Path
from orchestrator.history.ledger_file import LedgerFile
from orchestrator.history.transitions import Admitted, Generated

file = LedgerFile.create(Path(sys.argv[1]), tasks="")
print("going", flush=True)
number = 0
while True:
    file.append([Admitted(number, "task", 1), Generated(number, 0, (1,))])
    number += 1
"""


def test_a_killed_writer_leaves_a_prefix_of_whole_calls(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, cwd=os.getcwd()
    )
    assert writer.stdout is not None and writer.stdout.readline()
    while not path.is_file() or _rows(path) < 2000:
        pass
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    history = list(read_history(path))
    assert len(history) >= 2000 and len(history) % 2 == 0
    assert [t.group_id for t in history if isinstance(t, Admitted)] == list(
        range(len(history) // 2)
    )
    assert Ledger.replayed(history).report().balanced


def _rows(path: Path) -> int:
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return int(connection.execute("SELECT count(*) FROM transitions").fetchone()[0])
    except sqlite3.OperationalError:
        return 0
    finally:
        connection.close()


def test_a_full_disk_is_told_at_the_next_call(file: LedgerFile, tmp_path: Path) -> None:
    """SQLite's own page limit stands in for the disk."""
    limited = sqlite3.connect(tmp_path / "ledger.sqlite")
    limited.execute(
        "CREATE TRIGGER full BEFORE INSERT ON transitions WHEN NEW.kind = 'Failed' "
        "BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"
    )
    limited.commit()
    limited.close()
    file.append(EVERYTHING[:2])
    file.append(EVERYTHING[2:])
    file.append([Admitted(3, "d", 1)])
    with pytest.raises(RunError, match=r"disk is full.*free disk space.*--resume"):
        asyncio.run(file.flush())
    with pytest.raises(RunError, match="disk is full"):
        file.append([Admitted(4, "e", 1)])
    kept = list(file.read())
    assert kept == EVERYTHING[: len(kept)] and len(kept) in (0, 2), "nothing after the gap"


def test_whoever_no_longer_waits_does_not_stop_the_others(file: LedgerFile) -> None:
    async def main() -> None:
        for durably in (False, True):
            given_up = asyncio.create_task(file.flush(durably=durably))
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
        file.append(EVERYTHING)
        await file.flush(durably=True)

    asyncio.run(main())
    assert list(file.read()) == EVERYTHING


def test_a_missing_or_foreign_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is missing"):
        LedgerFile(tmp_path / "none.sqlite")
    (tmp_path / "text").write_text("no database, but longer than the header of one" * 10)
    with pytest.raises(RunError, match="cannot be used: file is not a database"):
        LedgerFile(tmp_path / "text")
    with pytest.raises(RunError, match="cannot be used"):
        LedgerFile.create(tmp_path / "no/such/folder", tasks="")


def test_a_damaged_history_is_named(file: LedgerFile, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "ledger.sqlite") as other:
        other.execute("INSERT INTO transitions (kind, subject, content) VALUES ('Odd', 0, '[]')")
    other.close()
    with pytest.raises(RunError, match="cannot be used: 'Odd'"):
        list(file.read())


def test_its_thread_ends_with_it(file: LedgerFile) -> None:
    file.append(EVERYTHING)
    file.close()
    assert "ledger" not in [thread.name for thread in threading.enumerate()]
    assert list(file.read()) == EVERYTHING
