"""Staging: what arrives is what was published, once per node, and nobody loses files in use."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from actors.trajectory import WeightLabel
from actors.weights import (
    ChunkInfo,
    WeightManifest,
    WeightStagingError,
    read_chunk,
    remove_staged,
    stage,
    staging_folder,
)


class Store:
    """Publishes weights of three chunks per version and counts what is fetched."""

    def __init__(self) -> None:
        self.fetched: Counter[str] = Counter()
        self.chunks: dict[str, np.ndarray] = {}

    def publish(self, version: int, lineage: int = 0, size: int = 5000) -> WeightManifest:
        label = WeightLabel(lineage, version)
        refs = tuple(f"{label}/{i}" for i in range(3))
        rng = np.random.default_rng([lineage, version])
        for i, ref in enumerate(refs):
            self.chunks[ref] = rng.integers(0, 256, size + i, dtype=np.uint8)
        infos = tuple(ChunkInfo(c.nbytes, zlib.crc32(c)) for c in map(self.chunks.get, refs))
        return WeightManifest(label, "float32", infos, refs, (("a",), ("b",), ("c",)))

    async def fetch(self, ref: str) -> np.ndarray:
        self.fetched[ref] += 1
        await asyncio.sleep(0.001)
        return self.chunks[ref]

    def check(self, manifest: WeightManifest, files: list[Path]) -> None:
        assert [file.read_bytes() for file in files] == [
            self.chunks[ref].tobytes() for ref in manifest.refs
        ]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "slipstream-run"


def labels(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


def staged(manifest: WeightManifest, store: Store, folder: Path) -> list[Path]:
    return asyncio.run(stage(manifest, store.fetch, folder))


def test_staged_files_are_the_published_chunks(store: Store, folder: Path) -> None:
    manifest = store.publish(7)
    files = staged(manifest, store, folder)
    assert [str(f.relative_to(folder)) for f in files] == [
        f"0.7/chunk-{i:03d}.safetensors" for i in range(3)
    ]
    store.check(manifest, files)
    assert sorted(p.name for p in files[0].parent.iterdir()) == [
        *(f.name for f in files),
        "complete.json",
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunk_tensors_reach_the_engine_unchanged(folder: Path, dtype: str) -> None:
    import torch  # here, as the processes below import this module
    from safetensors.torch import save

    kind = getattr(torch, dtype)
    tensors = {"model.a": torch.randn(3, 5).to(kind), "model.b": torch.randn(7).to(kind)}
    chunk = np.frombuffer(save(tensors), np.uint8)
    info = ChunkInfo(chunk.nbytes, zlib.crc32(chunk))
    manifest = WeightManifest(WeightLabel(0, 1), "any", (info,), (0,), (tuple(tensors),))

    async def fetch(ref: int) -> np.ndarray:
        return chunk

    (file,) = asyncio.run(stage(manifest, fetch, folder))
    loaded = dict(read_chunk(file))
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == kind
        assert torch.equal(loaded[name], tensor)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: c[:-1], "expected 5001 bytes, got 5000"),
        (lambda c: np.concatenate([c[:-1], c[-1:] ^ 1]), "expected CRC-32"),
        (lambda c: c.view(np.int8), "expected flat uint8, got int8"),
        (lambda c: c[None], r"expected flat uint8, got uint8 of shape \(1, 5001\)"),
    ],
)
def test_damaged_chunk_is_refused_and_leaves_nothing(
    store: Store, folder: Path, damage: object, message: str
) -> None:
    manifest = store.publish(7)
    good = store.chunks["0.7/1"]
    store.chunks["0.7/1"] = damage(good)
    with pytest.raises(WeightStagingError, match=rf"weights 0\.7, chunk 1 of 3: {message}"):
        staged(manifest, store, folder)
    assert list(folder.iterdir()) == []
    store.chunks["0.7/1"] = good
    store.check(manifest, staged(manifest, store, folder))


def test_what_fetch_raises_comes_through(store: Store, folder: Path) -> None:
    manifest = store.publish(7)
    del store.chunks["0.7/2"]
    with pytest.raises(KeyError):
        staged(manifest, store, folder)
    assert list(folder.iterdir()) == []


def test_chunk_that_cannot_be_written_is_named(store: Store, folder: Path) -> None:
    manifest = store.publish(7)

    async def fetch(ref: str) -> np.ndarray:
        for path in (folder / "0.7").iterdir():
            path.unlink()
        (folder / "0.7").rmdir()
        return store.chunks[ref]

    with pytest.raises(WeightStagingError, match=r"chunk 0 of 3: cannot write .*chunk-000"):
        asyncio.run(stage(manifest, fetch, folder))


def test_complete_label_is_reused(store: Store, folder: Path) -> None:
    manifest = store.publish(7)
    first, second = staged(manifest, store, folder), staged(manifest, store, folder)
    assert first == second
    assert set(store.fetched.values()) == {1}


def test_concurrent_workers_fetch_once(store: Store, folder: Path) -> None:
    manifest = store.publish(7)

    async def main() -> list[list[Path]]:
        return await asyncio.gather(*(stage(manifest, store.fetch, folder) for _ in range(5)))

    for files in asyncio.run(main()):
        store.check(manifest, files)
    assert set(store.fetched.values()) == {1} and len(store.fetched) == 3


@pytest.mark.parametrize("missing", ["complete.json", "chunk-001.safetensors"])
def test_incomplete_label_is_staged_again(store: Store, folder: Path, missing: str) -> None:
    manifest = store.publish(7)
    files = staged(manifest, store, folder)
    (files[0].parent / missing).unlink()
    files[2].write_bytes(b"torn")
    files.release()
    store.check(manifest, staged(manifest, store, folder))
    assert set(store.fetched.values()) == {2}


def test_other_content_under_the_same_label_is_not_reused(store: Store, folder: Path) -> None:
    staged(store.publish(7), store, folder)
    record = folder / "0.7" / "complete.json"
    sizes = json.loads(record.read_text())
    record.write_text(json.dumps([[nbytes, crc32 ^ 1] for nbytes, crc32 in sizes]))
    manifest = store.publish(7)
    store.check(manifest, staged(manifest, store, folder))
    assert set(store.fetched.values()) == {2}


def test_older_labels_go_when_nobody_holds_them(store: Store, folder: Path) -> None:
    old, new, newest = store.publish(7), store.publish(8), store.publish(0, lineage=1)
    held = staged(old, store, folder)
    staged(new, store, folder)
    assert labels(folder) == {"0.7", "0.8"}
    store.check(old, held)
    held.release()
    held.release()
    files = staged(newest, store, folder)
    assert labels(folder) == {"1.0"}
    store.check(newest, files)
    assert {p.name for p in folder.iterdir()} == {"1.0", "1.0.lock"}


def test_hold_ends_with_the_object(store: Store, folder: Path) -> None:
    held = staged(store.publish(7), store, folder)
    assert len(held) == 3
    del held
    staged(store.publish(8), store, folder)
    assert labels(folder) == {"0.8"}


def test_late_worker_leaves_newer_labels_alone(store: Store, folder: Path) -> None:
    old, new = store.publish(7), store.publish(8)
    staged(new, store, folder)
    store.check(old, staged(old, store, folder))
    assert labels(folder) == {"0.7", "0.8"}
    staged(new, store, folder)
    assert labels(folder) == {"0.8"}
    assert store.fetched["0.8/0"] == 1


@pytest.mark.parametrize("seed", range(3))
def test_files_in_use_stay_whole_in_any_interleaving(store: Store, folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    manifests = [store.publish(version) for version in range(6)]
    pauses = {w: [(rng.random() * 0.01, rng.random() < 0.7) for _ in manifests] for w in range(5)}

    async def worker(name: int) -> None:
        for manifest, (pause, wanted) in zip(manifests, pauses[name], strict=True):
            await asyncio.sleep(pause)
            if wanted or manifest is manifests[-1]:
                files = await stage(manifest, store.fetch, folder)
                await asyncio.sleep(pause)
                store.check(manifest, files)
                files.release()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for name in pauses:
                group.create_task(worker(name))

    asyncio.run(main())
    staged(manifests[-1], store, folder)
    assert labels(folder) == {"0.5"}


def test_cancelled_staging_can_be_repeated(store: Store, folder: Path) -> None:
    manifest = store.publish(7)

    async def stuck(ref: str) -> np.ndarray:
        if ref.endswith("/1"):
            await asyncio.Event().wait()
        return store.chunks[ref]

    async def main() -> list[Path]:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await stage(manifest, stuck, folder)
        return await stage(manifest, store.fetch, folder)

    store.check(manifest, asyncio.run(main()))


WORKER = """
import asyncio, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from test_weights import Store, stage
folder, log, mode = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
store = Store()
manifest = store.publish(7, size=200_000)

async def fetch(ref):
    with open(log, "a") as file:
        file.write(ref + "\\n")
    if mode == "hang" and ref.endswith("/1"):
        await asyncio.sleep(600)
    await asyncio.sleep(0.05)
    return store.chunks[ref]

store.check(manifest, asyncio.run(stage(manifest, fetch, folder)))
"""


def start_process(folder: Path, log: Path, mode: str) -> subprocess.Popen:
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", WORKER, str(folder), str(log), mode, here]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_processes_of_one_node_share_and_survive_a_killed_one(
    store: Store, folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "fetched"
    log.touch()
    doomed = start_process(folder, log, "hang")
    try:
        while "0.7/1" not in log.read_text():
            assert doomed.poll() is None
            time.sleep(0.02)
        others = [start_process(folder, log, "run") for _ in range(2)]
    finally:
        doomed.send_signal(signal.SIGKILL)
        doomed.wait()
    assert [other.wait() for other in others] == [0, 0]
    assert log.read_text().split() == ["0.7/0", "0.7/1", "0.7/0", "0.7/1", "0.7/2"]
    manifest = store.publish(7, size=200_000)
    store.check(manifest, staged(manifest, store, folder))
    assert not store.fetched


def test_folder_is_in_memory_where_there_is_room(store: Store, tmp_path: Path) -> None:
    roots = memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    small = store.publish(7)
    assert staging_folder("run", small, roots) == memory / "slipstream-run"
    assert staging_folder("run", small, (tmp_path / "none", disk)) == disk / "slipstream-run"
    chunk = ChunkInfo(1 << 60, 0)
    huge = WeightManifest(WeightLabel(0, 8), "float32", (chunk,), (0,), (("a",),))
    assert staging_folder("run", huge, roots) == disk / "slipstream-run"


def test_folder_that_already_has_the_label_comes_first(store: Store, tmp_path: Path) -> None:
    roots = memory, _ = tmp_path / "memory", tmp_path / "disk"
    staged(store.publish(7), store, memory / "slipstream-run")
    chunk = ChunkInfo(1 << 60, 0)
    huge = WeightManifest(WeightLabel(0, 7), "float32", (chunk,), (0,), (("a",),))
    assert staging_folder("run", huge, roots) == memory / "slipstream-run"


def test_default_folders_are_shared_memory_and_the_temporary_directory(store: Store) -> None:
    chosen = staging_folder("some-run", store.publish(7))
    assert chosen.name == "slipstream-some-run"
    assert not chosen.exists()


def test_remove_staged_spares_what_is_held(store: Store, tmp_path: Path) -> None:
    roots = (tmp_path / "memory", tmp_path / "disk")
    first, second = (root / "slipstream-run" for root in roots)
    staged(store.publish(7), store, first)
    held = staged(store.publish(8), store, second)
    remove_staged("run", roots)
    assert not first.exists() and labels(second) == {"0.8"}
    held.release()
    remove_staged("run", roots)
    assert not second.exists()
    remove_staged("run", roots)


def test_folders_of_dead_runs_are_removed(store: Store, tmp_path: Path) -> None:
    dead, alive, held = (tmp_path / f"slipstream-{name}" for name in ("dead", "alive", "held"))
    for other in (dead, alive):
        staged(store.publish(1), store, other)
    files = staged(store.publish(1), store, held)
    for other in (dead, held):
        os.utime(other, (0, 0))
    staged(store.publish(7), store, tmp_path / "slipstream-run")
    assert not dead.exists() and alive.exists()
    store.check(store.publish(1), files)


def test_folder_behind_a_link_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "slipstream-run"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WeightStagingError, match="is a link or belongs to another user"):
        staged(store.publish(7), store, link)


def test_manifest_counts_agree(store: Store) -> None:
    manifest = store.publish(7)
    assert manifest.total_bytes == 15_003
    for chunks, refs, names in (
        (manifest.chunks, manifest.refs[:2], manifest.names),
        (manifest.chunks, manifest.refs, manifest.names[:1]),
        ((), (), ()),
    ):
        with pytest.raises(ValueError, match=r"weights 0\.7: each chunk"):
            WeightManifest(manifest.label, "float32", chunks, refs, names)
