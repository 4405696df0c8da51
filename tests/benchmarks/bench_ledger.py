"""The ledger with its journal on disk: transitions per second, and what is left of it later on.

One group is admitted, generated, verified, ready and consumed; each event is an `apply` of its own,
as in a run. What the loop waits is the time in `apply`; the writer's thread works beside it.
"""

import asyncio
import tempfile
import time
from pathlib import Path

from orchestrator.history.ledger import Ledger
from orchestrator.history.ledger_file import LedgerFile, read_history
from orchestrator.history.transitions import (
    Admitted,
    Consumed,
    Generated,
    Ready,
    Stepped,
    Verified,
)
from tests.benchmarks.figures import Figure, Figures

SAMPLES = 8
BATCH_GROUPS = 16
PER_GROUP = 5
WINDOWS = 10


def run(quick: bool) -> Figures:
    """Applies the events of many groups; the last window against the first says whether it slows
    down."""
    groups = 20_000 if quick else 100_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        file = LedgerFile.create(path, tasks="")
        ledger = Ledger(file)
        windows = []
        started = time.perf_counter()
        for window in range(WINDOWS):
            begun = time.perf_counter()
            _live(ledger, window * groups // WINDOWS, groups // WINDOWS)
            windows.append(time.perf_counter() - begun)
        asyncio.run(file.flush())
        seconds = time.perf_counter() - started
        file.close()
        size = path.stat().st_size
        begun = time.perf_counter()
        assert Ledger.replayed(read_history(path)).report().balanced
        replay = time.perf_counter() - begun
    transitions = groups * PER_GROUP
    return {
        "transitions per second, kept on disk": Figure((transitions / seconds,), "1/s"),
        "loop time per transition": Figure((1e6 * sum(windows) / transitions,), "us"),
        "last tenth per first tenth": Figure((windows[-1] / windows[0],), "x"),
        "bytes per transition": Figure((size / transitions,), "B"),
        "replay, transitions per second": Figure((transitions / replay,), "1/s"),
    }


def _live(ledger: Ledger, first: int, count: int) -> None:
    lengths = tuple(range(10, 10 + SAMPLES))
    nothing: tuple[dict[str, int], ...] = ({},) * SAMPLES
    for start in range(first, first + count, BATCH_GROUPS):
        members = range(start, min(start + BATCH_GROUPS, first + count))
        for group in members:
            ledger.apply(Admitted(group, f"task-{group}", SAMPLES))
            ledger.apply(Generated(group, 0, lengths))
            ledger.apply(Verified(group, 0))
            ledger.apply(Ready(group, 0))
        version = ledger.version + 1
        consumed = [Consumed(group, 0, version, lengths, nothing) for group in members]
        done = Stepped(ledger.step + 1, version, 2, 10, tuple((group, 0) for group in members))
        ledger.apply(*consumed, done)
        ledger.check()
