"""Rollout workers that can be held up or made faulty, and published weights to feed them."""

import asyncio
import sys
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch
from tiny_models import BOS, chunks_of, next_token_logprobs, tensors_of, tiny_llama
from transformers import LlamaForCausalLM

from actors.config import EngineConfig, RolloutConfig, SamplingConfig
from actors.engine import Engine, Generation
from actors.parity import ParityReport, ProbeExpectation
from actors.trajectory import TrajectoryMeta, WeightLabel
from actors.weights import ChunkInfo, WeightManifest
from actors.worker import RolloutWorker

# Ray's workers cannot import test modules by name.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

TEMPERATURE = 0.7
AGREEMENT = 1e-4
META = TrajectoryMeta(tokenizer="tiny", model="tiny-llama")
PROMPT = (BOS, *(3 + i % 40 for i in range(45)))
PROBES = [PROMPT[:i] for i in range(8, 40)]
CONFIG = RolloutConfig(
    samples_per_group=4,
    sampling=SamplingConfig(temperature=TEMPERATURE, max_tokens=24),
    engine=EngineConfig(
        dtype="float32", max_model_len=512, max_num_seqs=16, kv_cache_bytes=16 << 20, block_size=32
    ),
)


class FaultyEngine(Engine):
    """A real engine whose log-probabilities can be shifted by one token."""

    shifted = False

    async def generate(self, *args: Any, **options: Any) -> Generation:
        generation = await super().generate(*args, **options)
        if not self.shifted:
            return generation
        rolled = [replace(c, logprobs=np.roll(c.logprobs, -1)) for c in generation.completions]
        return replace(generation, completions=rolled)

    async def next_token_logprobs(self, prefixes: Any, k: int) -> list[dict[int, float]]:
        if self.shifted:
            prefixes = [prefix[:-1] for prefix in prefixes]
        return await super().next_token_logprobs(prefixes, k)


class WatchedWorker(RolloutWorker):
    """A real worker whose probes can be held up and whose engine can be made faulty."""

    engine_class = FaultyEngine

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.probes_may_run = asyncio.Event()
        self.probes_may_run.set()

    async def hold_probes(self, hold: bool) -> None:
        if hold:
            self.probes_may_run.clear()
        else:
            self.probes_may_run.set()

    async def shift_logprobs(self, shifted: bool) -> None:
        self._engine.shifted = shifted  # type: ignore[attr-defined]

    async def _probe(self, *args: Any) -> ParityReport | None:
        await self.probes_may_run.wait()
        return await super()._probe(*args)


class RawEngine(Engine):
    """vLLM at its default, which reports log-probabilities without the temperature."""

    def engine_arguments(self) -> Any:
        arguments = super().engine_arguments()
        arguments.logprobs_mode = "raw_logprobs"
        return arguments


class RawWorker(RolloutWorker):
    engine_class = RawEngine


def model_of(version: int) -> LlamaForCausalLM:
    return tiny_llama(tied=True, seed=version)


def expectation(model: LlamaForCausalLM, version: int) -> ProbeExpectation:
    """What a learner would say about `PROBES`: the eight likeliest tokens at both temperatures."""
    rows = [len(prefix) - 1 for prefix in PROBES]
    tempered = next_token_logprobs(model, list(PROMPT), TEMPERATURE)[rows]
    raw = next_token_logprobs(model, list(PROMPT), 1.0)[rows]
    ids = torch.topk(tempered, 8).indices
    return ProbeExpectation(
        tuple(PROBES),
        ids.numpy().astype(np.int32),
        tempered.gather(1, ids).numpy(),
        raw.gather(1, ids).numpy(),
        label=str(version),
    )


def publish(
    version: int,
    *,
    model: LlamaForCausalLM | None = None,
    stale: dict[str, torch.Tensor] | None = None,
    without: str | None = None,
) -> WeightManifest:
    """The manifest of `model_of(version)`, with the given tensors replaced or left out."""
    expected = model_of(version)
    tensors = tensors_of(model or expected) | (stale or {})
    if without is not None:
        del tensors[without]
    chunks = chunks_of(tensors)
    return WeightManifest(
        label=WeightLabel(0, version),
        dtype="float32",
        chunks=tuple(ChunkInfo(c.nbytes, zlib.crc32(c.data)) for c in chunks),
        refs=tuple(ray.put(chunk) for chunk in chunks),
        names=tuple(() for _ in chunks),
        probe=expectation(expected, version),
    )
