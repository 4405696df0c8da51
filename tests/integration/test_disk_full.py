"""A full disk, as a small tmpfs: what was kept before stays, and the message says what to do."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import ray
from learner_groups import random_groups, save_tiny_model, spec, train, weights_of

from learner.group import LearnerGroup
from learner.messages import NotWritten
from orchestrator.errors import RunError
from orchestrator.history.ledger import Ledger
from orchestrator.history.ledger_file import LedgerFile, read_history
from orchestrator.history.trajectory_log import TrajectoryLog, scan
from orchestrator.history.transitions import Admitted, Generated

pytestmark = pytest.mark.integration

DISK_BYTES = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that holds a megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs is not allowed here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no room."""
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


def test_the_trajectory_log_keeps_what_it_had(small_disk: Path) -> None:
    log = TrajectoryLog(small_disk / "log")
    kept = 0
    with pytest.raises(OSError, match="No space left"):
        while True:
            log.append(group(kept))
            kept += 1
    assert [key for _, key, _ in scan(small_disk / "log")] == [(n, 0) for n in range(kept)]
    log.forget([0])
    assert log.append(group(kept)) == 1, "with room again it goes on, in a new segment"


def group(number: int) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "group_id": pa.array([number], pa.int64()),
            "attempt": pa.array([0], pa.int32()),
            "response_ids": pa.array([list(range(20_000))], pa.list_(pa.int32())),
        }
    )


def test_the_ledger_keeps_a_prefix_and_says_what_to_do(small_disk: Path) -> None:
    file = LedgerFile.create(small_disk / "ledger.sqlite", tasks="")
    file.append([Admitted(0, "first", 1)])
    asyncio.run(file.flush())
    fill(small_disk)
    with pytest.raises(RunError, match=r"disk is full.*free disk space"):
        for number in range(1, 100_000):
            file.append([Admitted(number, "t" * 200, 1), Generated(number, 0, (5,))])
            if number % 100 == 0:
                asyncio.run(file.flush())
    file.close()
    history = list(read_history(small_disk / "ledger.sqlite"))
    assert history[0] == Admitted(0, "first", 1)
    assert Ledger.replayed(history).report().balanced


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(small_disk: Path) -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    group = LearnerGroup(spec(save_tiny_model(small_disk.parent / "model"), ranks=1))
    try:
        asyncio.run(group.start())
        asyncio.run(group.save(str(small_disk / "step_0"), keep=2, export=False))
        before = weights_of(group)
        train(group, 0, random_groups(seed=1))
        fill(small_disk)
        with pytest.raises(NotWritten, match=r"no checkpoint was written .* free space"):
            asyncio.run(group.save(str(small_disk / "step_1"), keep=2))
        assert sorted(p.name for p in small_disk.iterdir()) == ["filler", "step_0"]
        assert train(group, 1, random_groups(seed=2, version=1)).changed, "training goes on"
        (small_disk / "filler").unlink()
        state = asyncio.run(group.load(str(small_disk / "step_0")))
        after = weights_of(group)
        assert state.version == 0 and all((after[n] == before[n]).all() for n in before)
    finally:
        asyncio.run(group.close())
        ray.shutdown()
