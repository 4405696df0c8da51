"""Learner groups for tests: samples, batches, a tiny model, and what a step and a publication give.

AdamW runs with eps = lr = 1, which makes a first step almost the gradient itself, so that comparing
weights compares gradients.
"""

import asyncio
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from safetensors.torch import load as load_safetensors
from transformers import LlamaConfig, LlamaForCausalLM

from actors.trajectory import (
    RolloutSample,
    TrajectoryMeta,
    VerdictRow,
    VersionSpan,
    rollout_batch,
    sample_id,
    verdict_batch,
    with_verdicts,
)
from learner.batch import GroupEntry, StepRequest, StepResult
from learner.config import LearnerConfig
from learner.group import LearnerGroup
from learner.messages import LearnerSpec

VOCABULARY = 61
TEMPERATURE = 0.7
STALENESS = 2
TOTAL_STEPS = 100
META = TrajectoryMeta(tokenizer="test", model="test")


@dataclass(frozen=True)
class Sample:
    """What a test decides about one sample; the rest is filled in."""

    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    reward: float | None
    spans: tuple[tuple[int, int, int], ...]
    finish: str = "stop"


def random_sample(rng: np.random.Generator, prompt: list[int], version: int = 0) -> Sample:
    length = int(rng.integers(1, 14))
    return Sample(
        prompt,
        rng.integers(3, VOCABULARY, length).tolist(),
        (-3 - rng.random(length)).astype(np.float32).tolist(),
        float(rng.integers(0, 2)),
        ((version, 0, length),),
    )


def group_entry(group_id: int, samples: list[Sample]) -> GroupEntry:
    """The group as an Arrow batch in the object store, and what a request says about it."""
    ids = [sample_id(group_id, 0, index) for index in range(len(samples))]
    rows = [
        RolloutSample(
            name,
            group_id,
            "task",
            index,
            0,
            sample.prompt,
            sample.response,
            sample.logprobs,
            [True] * len(sample.response),
            [VersionSpan(*span) for span in sample.spans],
            sample.finish,
            "worker",
            1.0,
            2.0,
            TEMPERATURE,
        )
        for index, (name, sample) in enumerate(zip(ids, samples, strict=True))
    ]
    verdicts = [
        VerdictRow(name, sample.reward, sample.reward, "error" if sample.reward is None else "ok")
        for name, sample in zip(ids, samples, strict=True)
    ]
    batch = with_verdicts(rollout_batch(rows, META), verdict_batch(verdicts))
    return GroupEntry(
        group_id,
        ray.put(batch),
        tuple(ids),
        len(samples[0].prompt),
        tuple(len(sample.response) for sample in samples),
        tuple(sample.reward for sample in samples),
        tuple(sample.reward for sample in samples),
        tuple(sample.reward is not None for sample in samples),
        tuple(sample.finish == "length" for sample in samples),
    )


def random_groups(seed: int, groups: int = 6, size: int = 4, version: int = 0) -> list[GroupEntry]:
    rng = np.random.default_rng(seed)
    entries = []
    for group_id in range(groups):
        prompt = rng.integers(3, VOCABULARY, int(rng.integers(2, 9))).tolist()
        samples = [random_sample(rng, prompt, version) for _ in range(size)]
        samples[0], samples[1] = replace(samples[0], reward=1.0), replace(samples[1], reward=0.0)
        entries.append(group_entry(group_id, samples))
    return entries


PLAIN = {"preset": "dapo", "advantage": {"scale": "none"}, "overlong_window": 0}


def spec(
    model: Path, ranks: int, objective: dict[str, Any] | None = None, **config: Any
) -> LearnerSpec:
    """A learner of the model with `objective`; `config` are more of the learner's keys."""
    settings = LearnerConfig.model_validate(
        {
            "ranks": ranks,
            "cpus": 0.01,
            "token_budget": 64,
            "logprob_chunk_tokens": 16,
            "optimizer": {"lr": 1.0, "eps": 1.0, "grad_clip": 1e9},
            "objective": objective or PLAIN,
            "step_timeout_s": 120,
            "collective_timeout_s": 60,
            "start_timeout_s": 500,
            **config,
        }
    )
    resolved = settings.objective.for_run(
        max_staleness=STALENESS,
        max_response_tokens=16,
        samples_per_group=4,
        has_reference=settings.reference is not None,
        has_critic=True,
    )
    return LearnerSpec(str(model), settings, resolved, 16, "float32", seed=1)


def save_tiny_model(folder: Path, seed: int = 0) -> Path:
    """A three-layer Llama with random weights, in Hugging Face layout."""
    torch.manual_seed(seed)
    settings = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    LlamaForCausalLM(settings).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def weights_of(group: LearnerGroup, version: int | None = None) -> dict[str, torch.Tensor]:
    publication, refs = asyncio.run(group.publish("0.0", None, version))
    chunks = ray.get(refs)
    assert tuple(zlib.crc32(chunk) for chunk in chunks) == publication.crc32
    assert tuple(chunk.nbytes for chunk in chunks) == publication.nbytes
    parts = [load_safetensors(chunk.tobytes()) for chunk in chunks]
    assert [set(part) for part in parts] == [set(names) for names in publication.names]
    # safetensors gives its tensors in no particular order.
    return dict(sorted(item for part in parts for item in part.items()))


def train(
    group: LearnerGroup, version: int, entries: list[GroupEntry], bound: int = STALENESS
) -> StepResult:
    request = StepRequest(version + 1, version, bound, TOTAL_STEPS, tuple(entries))
    return asyncio.run(group.step(request))
