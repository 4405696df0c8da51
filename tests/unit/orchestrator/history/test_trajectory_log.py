"""The trajectory log: groups come back bit for bit, whatever a crash cut off."""

from pathlib import Path

import pyarrow as pa
import pytest

from orchestrator.history.trajectory_log import (
    TrajectoryLog,
    read_segment,
    scan,
    segment_path,
    segments,
)


def group(group_id: int, attempt: int = 0, size: int = 10) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "group_id": pa.array([group_id], pa.int64()),
            "attempt": pa.array([attempt], pa.int32()),
            "response_ids": pa.array([list(range(size))], pa.list_(pa.int32())),
        },
        metadata={"format": "1"},
    )


def test_groups_come_back_as_they_were(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path)
    batches = {(n, n % 2): group(n, n % 2, size=n) for n in range(5)}
    for batch in batches.values():
        log.append(batch)
    found = log.read([*batches, (9, 0), (0, 1)])
    assert {key: batch for key, (_, batch) in found.items()} == batches
    assert all(found[key][1].schema.metadata == {b"format": b"1"} for key in found)


def test_what_is_appended_later_is_found_too(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path)
    log.append(group(0))
    assert set(log.read([(0, 0), (1, 0)])) == {(0, 0)}
    log.append(group(1))
    assert set(log.read([(0, 0), (1, 0)])) == {(0, 0), (1, 0)}


def test_segments_end_when_they_are_full(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path, segment_bytes=3000)
    numbers = [log.append(group(n, size=500)) for n in range(4)]
    assert numbers == [0, 0, 1, 1]
    assert segments(tmp_path) == [0, 1]
    assert [key for _, key, _ in scan(tmp_path)] == [(n, 0) for n in range(4)]


@pytest.mark.parametrize("lost", [1, 100, 900])
def test_a_torn_end_costs_what_was_not_finished(tmp_path: Path, lost: int) -> None:
    log = TrajectoryLog(tmp_path)
    for n in range(3):
        log.append(group(n, size=100))
    path = segment_path(tmp_path, 0)
    content = path.read_bytes()
    path.write_bytes(content[:-lost])
    survivors = [key for key, _ in read_segment(path)]
    assert survivors == [(n, 0) for n in range(len(survivors))]
    assert len(survivors) == (2 if lost < 900 else 1)


@pytest.mark.parametrize("content", [b"", b"no arrow stream", b"\xff\xff\xff\xff\x10"])
def test_a_segment_without_a_whole_group_is_empty(tmp_path: Path, content: bytes) -> None:
    segment_path(tmp_path, 0).write_bytes(content)
    assert list(read_segment(segment_path(tmp_path, 0))) == []


def test_another_process_begins_a_new_segment(tmp_path: Path) -> None:
    TrajectoryLog(tmp_path).append(group(0))
    again = TrajectoryLog(tmp_path)
    assert again.append(group(1)) == 1
    assert set(again.read([(0, 0), (1, 0)])) == {(0, 0), (1, 0)}


def test_forgotten_segments_are_gone(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path, segment_bytes=1)
    for n in range(3):
        log.append(group(n))
    assert set(log.read([(0, 0), (1, 0)])) == {(0, 0), (1, 0)}
    log.forget([0, 1, 7])
    assert segments(tmp_path) == [2]
    assert set(log.read([(0, 0), (1, 0), (2, 0)])) == {(2, 0)}


def test_a_batch_that_was_read_outlives_its_segment(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path, segment_bytes=1)
    log.append(group(0, size=1000))
    ((_, batch),) = log.read([(0, 0)]).values()
    log.forget([0])
    assert batch == group(0, size=1000)


def test_a_disk_that_takes_nothing_is_an_error_and_loses_nothing_before(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    log = TrajectoryLog(folder, segment_bytes=1)
    log.append(group(0))
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        log.append(group(1))
    (tmp_path / "elsewhere").rename(folder)
    log.append(group(1))
    assert [key for _, key, _ in scan(folder)] == [(0, 0), (1, 0)]
