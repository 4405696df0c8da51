"""The rollout worker's account of a weight load that fails, on an engine that never loads."""

import asyncio
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from actors.config import RolloutConfig
from actors.engine import Engine, EngineError, LoadTimes
from actors.trajectory import TrajectoryMeta, WeightLabel
from actors.weights import ChunkInfo, WeightManifest, remove_staged
from actors.worker import RolloutWorker


class StuckEngine(Engine):
    """Comes up without vLLM and, as the real one, fails when a load is cancelled."""

    dtype = "float32"
    process_ids = ()

    async def start(self) -> None:
        pass

    async def load(self, files: Sequence[Path], label: WeightLabel) -> LoadTimes:
        try:
            await asyncio.Event().wait()
        except BaseException as error:
            raise EngineError(f"failed: {type(error).__name__}", fatal=True) from error
        raise AssertionError


class StuckWorker(RolloutWorker):
    engine_class = StuckEngine


def test_a_load_that_takes_too_long_says_so() -> None:
    run_id = f"stuck-{os.getpid()}"
    config = RolloutConfig(sync_timeout_s=0.2)
    chunk = np.arange(100, dtype=np.uint8)
    info = ChunkInfo(chunk.nbytes, zlib.crc32(chunk))

    async def scenario() -> None:
        worker = StuckWorker(
            "rollout-0", config, "model", "model", TrajectoryMeta("t", "m"), run_id
        )
        await worker.start()
        ref = asyncio.get_running_loop().create_future()
        ref.set_result(chunk)
        manifest = WeightManifest(WeightLabel(0, 1), "float32", (info,), (ref,), (("a",),))
        with pytest.raises(TimeoutError, match=r"rollout-0: loading weights 0\.1 took over 0\.2 s"):
            await worker.sync(manifest)

    try:
        asyncio.run(scenario())
    finally:
        remove_staged(run_id)
