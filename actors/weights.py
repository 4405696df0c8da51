"""Published weights on their way to an engine: the manifest, and staging its chunks on a node.

A chunk is the content of one safetensors file. `stage` brings the chunks of a manifest into a
folder that all workers of a node share, so that each node fetches them once and the engine maps
them from memory. How a chunk is fetched is the caller's affair; nothing here knows Ray or vLLM.

Per weight label a folder holds `<label>/chunk-NNN.safetensors`, `<label>/complete.json` (written
last) and `<label>.lock`. Whoever writes or removes a label holds its lock alone, whoever reads it
shares the lock; the kernel drops the locks of a process that dies.
"""

import asyncio
import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
import weakref
import zlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.parity import ProbeExpectation
from actors.trajectory import WeightLabel

if TYPE_CHECKING:
    import torch

Fetch = Callable[[Any], Awaitable[np.ndarray]]

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "slipstream-"
_COMPLETE = "complete.json"
# Ray's object store grows in the same file system, and filling it up kills whoever writes next.
_HEADROOM = 2
_POLL_S = 0.02
# A live run stages more often, and one that does not only fetches again.
_ABANDONED_S = 3600.0


class WeightStagingError(RuntimeError):
    """A chunk did not arrive as published or could not be written; the message names it."""


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """Size and zlib CRC-32 of one chunk."""

    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """One published set of weights. `refs[i]` fetches chunk i, which holds tensors `names[i]`
    in `dtype`; `probe` is what the learner computes with these weights."""

    label: WeightLabel
    dtype: str
    chunks: tuple[ChunkInfo, ...]
    refs: tuple[Any, ...]
    names: tuple[tuple[str, ...], ...]
    probe: ProbeExpectation | None = None

    def __post_init__(self) -> None:
        counts = len(self.chunks), len(self.refs), len(self.names)
        if counts[0] == 0 or len(set(counts)) != 1:
            raise ValueError(
                f"weights {self.label}: each chunk has one reference and one list of names, got"
                f" {counts[0]} chunks, {counts[1]} references, {counts[2]} lists of names"
            )

    @property
    def total_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)


class StagedFiles(list[Path]):
    """The chunk files of one label, in order. They stay in place until `release`, at the latest
    until this object is collected."""

    def __init__(self, files: list[Path], lock: int) -> None:
        super().__init__(files)
        self._release = weakref.finalize(self, _unlock, lock)

    def release(self) -> None:
        self._release()


def staging_folder(
    run_id: str, manifest: WeightManifest, roots: tuple[Path, ...] | None = None
) -> Path:
    """The folder `slipstream-<run_id>` in shared memory, or in the temporary directory where
    shared memory has no room for these weights.

    A folder where they are staged or being staged comes first, so that the workers of a node
    agree. `roots` replaces the two places.
    """
    *preferred, last = roots or _roots()
    for root in preferred:
        folder = root / f"{_PREFIX}{run_id}"
        if _lock_path(folder, manifest.label).exists() or _has_room(root, manifest):
            return folder
    return last / f"{_PREFIX}{run_id}"


async def stage(manifest: WeightManifest, fetch: Fetch, folder: Path) -> StagedFiles:
    """Brings all chunks into `folder`, checked, unless a worker of this node already did.

    Waits while another worker stages the same label; cancel to give up. Afterwards older labels
    that nobody holds are removed. Raises WeightStagingError when a chunk is not what was
    published or cannot be written; what `fetch` raises comes through.
    """
    label = manifest.label
    while True:
        lock = _lock(folder, label, fcntl.LOCK_SH)
        if lock is not None and not _is_complete(folder, manifest):
            _unlock(lock)
            lock = _lock(folder, label, fcntl.LOCK_EX)
            if lock is not None:
                lock = await _stage_alone(manifest, fetch, folder, lock)
        if lock is not None:
            break
        await asyncio.sleep(_POLL_S)
    staged = StagedFiles(_files(folder, manifest), lock)
    await asyncio.to_thread(_tidy, folder, label)
    return staged


def read_chunk(path: Path | str) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Names and tensors of one staged chunk, mapped from the file: use or copy each in turn."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - the handle is no mapping
            yield name, file.get_tensor(name)


def remove_staged(run_id: str, roots: tuple[Path, ...] | None = None) -> None:
    """Removes what a run has staged on this node, except labels that a worker still holds."""
    for root in roots or _roots():
        _remove_labels(root / f"{_PREFIX}{run_id}", below=None)


def _roots() -> tuple[Path, Path]:
    return _SHARED_MEMORY, Path(tempfile.gettempdir())


def _has_room(root: Path, manifest: WeightManifest) -> bool:
    return (
        os.access(root, os.W_OK)
        and shutil.disk_usage(root).free >= _HEADROOM * manifest.total_bytes
    )


def _files(folder: Path, manifest: WeightManifest) -> list[Path]:
    inside = folder / str(manifest.label)
    return [inside / f"chunk-{i:03d}.safetensors" for i in range(len(manifest.chunks))]


def _published(manifest: WeightManifest) -> list[list[int]]:
    return [[chunk.nbytes, chunk.crc32] for chunk in manifest.chunks]


def _is_complete(folder: Path, manifest: WeightManifest) -> bool:
    try:
        record = json.loads((folder / str(manifest.label) / _COMPLETE).read_text())
        sizes = [file.stat().st_size for file in _files(folder, manifest)]
    except (FileNotFoundError, ValueError):
        return False
    return record == _published(manifest) and sizes == [c.nbytes for c in manifest.chunks]


async def _stage_alone(
    manifest: WeightManifest, fetch: Fetch, folder: Path, lock: int
) -> int | None:
    """Stages under an exclusive lock. Returns a shared one, or None if the label has to be looked
    at again: the kernel may let another process in between the two."""
    try:
        if not _is_complete(folder, manifest):
            await _write_chunks(manifest, fetch, folder)
    except BaseException:
        _remove_locked(folder, str(manifest.label))
        _unlock(lock)
        raise
    if _try_flock(lock, fcntl.LOCK_SH) and _is_linked(folder, manifest.label, lock):
        return lock
    _unlock(lock)
    return None


async def _write_chunks(manifest: WeightManifest, fetch: Fetch, folder: Path) -> None:
    inside = folder / str(manifest.label)
    shutil.rmtree(inside, ignore_errors=True)
    inside.mkdir(mode=0o700, exist_ok=True)
    files = _files(folder, manifest)
    for i, (ref, info) in enumerate(zip(manifest.refs, manifest.chunks, strict=True)):
        what = f"weights {manifest.label}, chunk {i} of {len(files)}"
        await asyncio.to_thread(_write_chunk, files[i], await fetch(ref), info, what)
    record = json.dumps(_published(manifest)).encode()
    _write_by_rename(inside / _COMPLETE, memoryview(record))


def _write_chunk(path: Path, chunk: np.ndarray, info: ChunkInfo, what: str) -> None:
    if chunk.dtype != np.uint8 or chunk.ndim != 1:
        raise WeightStagingError(
            f"{what}: expected flat uint8, got {chunk.dtype} of shape {chunk.shape}"
        )
    if chunk.nbytes != info.nbytes:
        raise WeightStagingError(f"{what}: expected {info.nbytes} bytes, got {chunk.nbytes}")
    content = np.ascontiguousarray(chunk).data
    crc32 = zlib.crc32(content)
    if crc32 != info.crc32:
        raise WeightStagingError(f"{what}: expected CRC-32 {info.crc32:08x}, got {crc32:08x}")
    try:
        _write_by_rename(path, content)
    except OSError as error:
        raise WeightStagingError(f"{what}: cannot write {path}: {error.strerror}") from error


def _write_by_rename(path: Path, content: memoryview) -> None:
    # A cancelled writer's thread may still be at it, so no two writers share a name.
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def _tidy(folder: Path, label: WeightLabel) -> None:
    """Removes older labels of this run and what dead runs left behind: it is memory."""
    for root in {folder.parent, *_roots()}:
        _remove_labels(root / folder.name, below=label)
        for other in root.glob(f"{_PREFIX}*"):
            with suppress(FileNotFoundError):
                idle_s = time.time() - other.stat().st_mtime
                if idle_s > _ABANDONED_S and other.name != folder.name and _is_ours(other):
                    _remove_labels(other, below=None)


def _remove_labels(folder: Path, below: WeightLabel | None) -> None:
    """Removes the labels that nobody holds, those under `below` if given; then an empty folder."""
    with suppress(FileNotFoundError, WeightStagingError):
        for name in {path.name.removesuffix(".lock") for path in folder.iterdir()}:
            try:
                label = WeightLabel.parse(name)
            except ValueError:
                continue
            if below is None or label < below:
                lock = _lock(folder, label, fcntl.LOCK_EX)
                if lock is not None:
                    _remove_locked(folder, name)
                    _unlock(lock)
        with suppress(OSError):
            folder.rmdir()


def _remove_locked(folder: Path, name: str) -> None:
    shutil.rmtree(folder / name, ignore_errors=True)
    (folder / f"{name}.lock").unlink(missing_ok=True)


def _lock_path(folder: Path, label: WeightLabel) -> Path:
    return folder / f"{label}.lock"


def _lock(folder: Path, label: WeightLabel, kind: int) -> int | None:
    """A descriptor that holds the label's lock, or None if it cannot be had right now."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(folder):
        raise WeightStagingError(f"{folder} is a link or belongs to another user")
    try:
        lock = os.open(_lock_path(folder, label), os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:  # the folder was removed in between
        return None
    if _try_flock(lock, kind) and _is_linked(folder, label, lock):
        return lock
    os.close(lock)
    return None


def _is_ours(folder: Path) -> bool:
    """In a directory that all users write to, anyone may have put a folder of this name."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _try_flock(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_linked(folder: Path, label: WeightLabel, lock: int) -> bool:
    """Whether this is still the lock that others will find: its file may have been removed."""
    try:
        return os.path.samestat(os.fstat(lock), _lock_path(folder, label).stat())
    except FileNotFoundError:
        return False


def _unlock(lock: int) -> None:
    # Unlocking, unlike closing, also ends the hold of a child that inherited the descriptor.
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)
