"""A weight update by its stages, each against a plain copy of as many bytes.

Publish gathers, casts, packs and checksums the learner's weights into chunks; stage checks the
chunks and writes the files of a node; load replaces the weights of a running engine, for as long
as generation stands still. The object store between the first two is left out, see the data
plane. Learner and engine are the real ones, in float32.
"""

import asyncio
import time
import zlib
from typing import Any

import numpy as np

from actors.engine import Engine
from actors.trajectory import WeightLabel
from actors.weights import ChunkInfo, WeightManifest, remove_staged, stage, staging_folder
from learner.rank import LearnerRank
from tests.benchmarks.figures import Figure, Figures, interleaved
from tests.benchmarks.gemm import Copy
from tests.benchmarks.recipes import Recipe, recipes

STAGES = ("publish", "stage", "load", "fresh copy", "checksum")
"""The last two are what publish and stage cannot do without: each writes the weights to memory
that was not in use before, whose pages the kernel has to provide, and computes a CRC-32."""


class Update:
    """Publishes, stages and loads the same weights again and again, under growing labels."""

    def __init__(self, rank: LearnerRank, engine: Engine, runner: asyncio.Runner) -> None:
        self._rank, self._engine, self._runner = rank, engine, runner
        self._label = WeightLabel(0, 0)
        self.run_id = f"bench-{time.monotonic_ns()}"
        self.nbytes = 0

    def __call__(self) -> dict[str, float]:
        """Seconds by stage."""
        self._label = WeightLabel(0, self._label.version + 1)
        seconds: dict[str, float] = {}
        clock = time.perf_counter
        start = clock()
        published: list[Any] = list(self._rank.publish(str(self._label), None))
        seconds["publish"] = clock() - start
        *chunks, publication = published
        start = clock()
        copies = [chunk.copy() for chunk in chunks]
        seconds["fresh copy"] = clock() - start
        del copies
        start = clock()
        for chunk in chunks:
            zlib.crc32(chunk.data)
        seconds["checksum"] = clock() - start
        manifest = WeightManifest(
            label=self._label,
            dtype=publication.dtype,
            chunks=tuple(map(ChunkInfo, publication.nbytes, publication.crc32)),
            refs=tuple(chunks),
            names=publication.names,
        )
        self.nbytes = publication.total_bytes
        folder = staging_folder(self.run_id, manifest)
        start = clock()
        files = self._runner.run(stage(manifest, _fetch, folder))
        seconds["stage"] = clock() - start
        times = self._runner.run(self._engine.load(files, self._label))
        files.release()
        seconds["load"] = times.pause_s + times.load_s + times.resume_s
        return seconds


def run(quick: bool) -> Figures:
    """Per model: milliseconds and GB/s of each stage, and its cost in copies of the weights."""
    figures: Figures = {}
    for recipe in recipes():
        figures |= {
            f"{recipe.name}: {name}": figure for name, figure in _measure(recipe, quick).items()
        }
    return figures


def _measure(recipe: Recipe, quick: bool) -> Figures:
    rollout, path = recipe.config.rollout, recipe.config.model.path
    engine = Engine(path, path, rollout.engine, rollout.sampling, rollout.threads)
    rank = recipe.rank("float32")
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        update = Update(rank, engine, runner)
        try:
            rounds = interleaved(
                update,
                lambda: {"copy": update.nbytes / Copy(max(update.nbytes, 1 << 20))()},
                repeats=2 if quick else 5,
            )
        finally:
            runner.run(engine.close())
            rank.close()
            remove_staged(update.run_id)
    copy = Figure(rounds["copy"], "s")
    figures = {
        "weights": Figure((update.nbytes / 1e6,), "MB"),
        "memcpy": Figure(tuple(update.nbytes / 1e9 / s for s in rounds["copy"]), "GB/s"),
    }
    for name in STAGES:
        seconds = Figure(rounds[name], "s")
        figures |= {
            name: Figure(tuple(s * 1e3 for s in seconds.values), "ms"),
            f"{name} bandwidth": Figure(
                tuple(update.nbytes / 1e9 / s for s in rounds[name]), "GB/s"
            ),
            f"{name} over memcpy": seconds.per(copy),
        }
    return figures


async def _fetch(chunk: Any) -> np.ndarray:
    return chunk
