"""The trajectory log: every group that became ready, on disk, in order.

A folder of Arrow IPC streams, one segment after the other. A stream can be read up to where a
crash cut it off, so nothing has to be closed properly; a new process begins a new segment. Knows
no Ray and no ledger: which segments are still needed is the caller's to say.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc as ipc

from orchestrator.history.transitions import GroupKey

SEGMENT_BYTES = 64 << 20
_SUFFIX = ".arrows"


class TrajectoryLog:
    """Appends groups to segments, and finds them again."""

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._next = max(segments(folder), default=-1) + 1
        self._file: pa.OSFile | None = None
        self._writer: ipc.RecordBatchStreamWriter | None = None
        self._index: dict[GroupKey, int] | None = None

    def append(self, batch: pa.RecordBatch) -> int:
        """Write one group, such that it outlives this process; the number of its segment.

        Raises OSError when the disk does not take it; the segment then ends before it.
        """
        try:
            if self._writer is None:
                path = segment_path(self._folder, self._next)
                self._file = pa.OSFile(str(path), "wb")
                self._writer = ipc.new_stream(self._file, batch.schema)
                self._next += 1
            self._writer.write_batch(batch)
            segment = self._next - 1
            if self._index is not None:
                self._index[_key(batch)] = segment
            assert self._file is not None
            if self._file.tell() >= self._segment_bytes:
                self._end_segment()
        except OSError:
            self._abandon_segment()
            raise
        return segment

    def read(self, wanted: Collection[GroupKey]) -> dict[GroupKey, tuple[int, pa.RecordBatch]]:
        """Those of the wanted groups that are in the log, with their segment."""
        index = self.index()
        by_segment: dict[int, set[GroupKey]] = {}
        for key in wanted:
            if key in index:
                by_segment.setdefault(index[key], set()).add(key)
        return {
            key: (segment, batch)
            for segment, keys in by_segment.items()
            for key, batch in read_segment(segment_path(self._folder, segment))
            if key in keys
        }

    def index(self) -> dict[GroupKey, int]:
        """The segment of every group in the log."""
        if self._index is None:
            self._index = {key: n for n, key, _ in scan(self._folder)}
        return self._index

    def forget(self, numbers: Collection[int]) -> None:
        """Delete segments that nobody needs any more."""
        for number in numbers:
            segment_path(self._folder, number).unlink(missing_ok=True)
        if self._index is not None:
            self._index = {key: n for key, n in self._index.items() if n not in numbers}

    def close(self) -> None:
        """End the segment in progress."""
        self._end_segment()

    def _end_segment(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._abandon_segment()

    def _abandon_segment(self) -> None:
        """Let the segment end where it is, without the end of a stream."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._writer = self._file = None


def segments(folder: Path) -> list[int]:
    """Numbers of the segments in `folder`, oldest first."""
    return sorted(int(p.stem) for p in folder.glob(f"*{_SUFFIX}") if p.stem.isdecimal())


def segment_path(folder: Path, number: int) -> Path:
    """Where segment `number` is."""
    return folder / f"{number:08d}{_SUFFIX}"


def scan(folder: Path) -> Iterator[tuple[int, GroupKey, pa.RecordBatch]]:
    """Everything in the log: segment, group and attempt, record batch."""
    for number in segments(folder):
        for key, batch in read_segment(segment_path(folder, number)):
            yield number, key, batch


def read_segment(path: Path) -> Iterator[tuple[GroupKey, pa.RecordBatch]]:
    """The groups of one segment, up to where a crash cut it off. Nothing is copied."""
    if not os.path.getsize(path):
        return
    with pa.memory_map(str(path)) as source:
        try:
            with ipc.open_stream(source) as reader:
                for batch in reader:
                    yield _key(batch), batch
        except (pa.ArrowInvalid, OSError):
            return  # the end of what was written


def _key(batch: pa.RecordBatch) -> GroupKey:
    return batch.column("group_id")[0].as_py(), batch.column("attempt")[0].as_py()
