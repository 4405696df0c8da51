"""The vLLM engine against transformers: log-probabilities, caches and spans across updates."""

import asyncio
import os
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import (
    BOS,
    EOS,
    chunks_of,
    next_token_logprobs,
    response_logprobs,
    save_model,
    tensors_of,
    tiny_llama,
)
from transformers import LlamaForCausalLM

from actors.config import EngineConfig, SamplingConfig
from actors.engine import Completion, Engine, Generation
from actors.trajectory import FinishReason, WeightLabel

pytestmark = pytest.mark.integration

AGREEMENT = 1e-4
PROMPT = [BOS, *(3 + i % 40 for i in range(70))]  # two full cache blocks of 32 and a rest


@dataclass
class Served:
    """A running engine, the model it serves, and every model it served by label."""

    engine: Engine
    runner: asyncio.Runner
    folder: Path
    model: LlamaForCausalLM
    temperature: float
    tied: bool
    history: dict[WeightLabel, LlamaForCausalLM] = field(default_factory=dict)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(work, 120)

        return self.runner.run(bounded())

    async def sync(self, *, new_lineage: bool = False) -> LlamaForCausalLM:
        """Loads new random weights under the next label."""
        at = self.engine.label
        label = WeightLabel(at.lineage + new_lineage, at.version + 1)
        self.model = tiny_llama(tied=self.tied, seed=100 + label.version)
        files = []
        for i, chunk in enumerate(chunks_of(tensors_of(self.model))):
            files.append(self.folder / f"{label}-{i}.safetensors")
            files[-1].write_bytes(chunk.tobytes())
        await self.engine.load(files, label)
        self.history[label] = self.model
        return self.model

    def difference(self, model: LlamaForCausalLM, prompt: list[int], sample: Completion) -> float:
        response = sample.token_ids.tolist()
        expected = response_logprobs(model, prompt, response, self.temperature)
        return float(np.abs(expected - sample.logprobs).max())

    def assert_agrees(self, generation: Generation, prompt: list[int]) -> None:
        """Every sample drawn under one set of weights costs what transformers says."""
        for sample in generation.completions:
            assert sample.spans[0].version == generation.label.version
            if len(sample.spans) == 1:
                model = self.history[generation.label]
                assert self.difference(model, prompt, sample) < AGREEMENT


@contextmanager
def serve(
    folder: Path, *, tied: bool, temperature: float, config: EngineConfig
) -> Iterator[Served]:
    environment = dict(os.environ)
    model = tiny_llama(tied=tied, seed=1)
    path = str(save_model(model, folder / "model"))
    sampling = SamplingConfig(temperature=temperature, max_tokens=48)
    with asyncio.Runner() as runner:
        engine = Engine(path, path, config, sampling, threads=1)
        try:
            runner.run(engine.start())
            served = Served(engine, runner, folder, model, temperature, tied)
            served.history[engine.label] = model
            yield served
        finally:
            runner.run(engine.close())
            os.environ.clear()
            os.environ.update(environment)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Tied head, temperature 0.7, prompts computed in chunks."""
    config = EngineConfig(
        dtype="float32",
        max_model_len=256,
        max_num_seqs=16,
        kv_cache_bytes=16 << 20,
        block_size=32,
        max_batched_tokens=64,
    )
    with serve(tmp_path_factory.mktemp("tied"), tied=True, temperature=0.7, config=config) as s:
        yield s


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Untied head, temperature 1, the settings that seeded requests need."""
    config = EngineConfig(
        dtype="float32",
        max_model_len=256,
        max_num_seqs=16,
        kv_cache_bytes=16 << 20,
        block_size=32,
        chunked_prefill=False,
    )
    folder = tmp_path_factory.mktemp("untied")
    with serve(folder, tied=False, temperature=1.0, config=config) as s:
        yield s


@pytest.fixture(params=["tied", "seeded"])
def served(request: pytest.FixtureRequest) -> Served:
    return request.getfixturevalue(request.param)


async def several_tokens(engine: Engine, count: int) -> None:
    goal = engine.tokens_generated + count
    while engine.tokens_generated < goal:
        await asyncio.sleep(0.005)


def test_logprobs_agree_with_transformers_after_two_syncs(served: Served) -> None:
    async def twice() -> list[Generation]:
        generations = [await served.engine.generate(PROMPT, 4, None)]
        for _ in range(2):
            await served.sync()
            generations.append(await served.engine.generate(PROMPT, 4, None))
            before = served.engine.prefix_cache_hit_tokens
            generations.append(await served.engine.generate(PROMPT, 4, None))
            assert served.engine.prefix_cache_hit_tokens - before == 4 * 64
        return generations

    generations = served.run(twice())
    assert len({generation.label for generation in generations}) == 3
    for generation in generations:
        served.assert_agrees(generation, PROMPT)
    old, new = generations[0].completions[0], generations[-1].completions[0]
    assert served.difference(served.model, PROMPT, old) > 0.1
    assert served.difference(served.model, PROMPT, new) < AGREEMENT


def test_next_token_logprobs_are_those_of_the_sampling_path(served: Served) -> None:
    prefixes = [PROMPT[: 2 + i] for i in range(40)]

    async def beside_a_group() -> tuple[list[dict[int, float]], Generation]:
        await served.sync()
        return await asyncio.gather(
            served.engine.next_token_logprobs(prefixes, 8), served.engine.generate(PROMPT, 8, None)
        )

    rows, generation = served.run(beside_a_group())
    served.assert_agrees(generation, PROMPT)
    expected = next_token_logprobs(served.model, PROMPT, served.temperature)
    for position, row in enumerate(rows, start=1):
        assert set(torch.topk(expected[position], 8).indices.tolist()) <= set(row)
        assert max(abs(expected[position][t].item() - v) for t, v in row.items()) < AGREEMENT


def test_spans_tell_which_weights_sampled_which_token(served: Served) -> None:
    async def across() -> Generation:
        running = asyncio.create_task(served.engine.generate(PROMPT, 16, None, max_tokens=150))
        await several_tokens(served.engine, 16 * 8)
        await served.sync()
        return await running

    old = served.model
    generation = served.run(across())
    crossing = [c for c in generation.completions if len(c.spans) == 2]
    assert crossing, "no sample was in flight at the update"
    for sample in generation.completions:
        assert [s.start for s in sample.spans] == [0, *(s.end for s in sample.spans[:-1])]
        assert sample.spans[-1].end == len(sample.token_ids)
    for sample in crossing:
        before, after = sample.spans
        assert (before.version, after.version) == (
            generation.label.version,
            served.engine.label.version,
        )
        expected = logprobs_across(old, served.model, sample, before.end, served.temperature)
        np.testing.assert_allclose(sample.logprobs, expected, rtol=0, atol=AGREEMENT)


@torch.no_grad()
def logprobs_across(
    old: LlamaForCausalLM,
    new: LlamaForCausalLM,
    sample: Completion,
    boundary: int,
    temperature: float,
) -> np.ndarray:
    """float32 [response]: the first `boundary` tokens under `old`, the others under `new` on the
    keys and values that `old` left behind."""
    tokens = torch.tensor([[*PROMPT, *sample.token_ids.tolist()]])
    seam = len(PROMPT) + boundary - 1
    head = old(tokens[:, :seam], use_cache=True)
    tail = new(tokens[:, seam:], past_key_values=head.past_key_values, use_cache=True)
    logits = torch.cat([head.logits, tail.logits], dim=1)[0, len(PROMPT) - 1 : -1]
    rows = torch.log_softmax(logits / temperature, dim=-1)
    return rows.gather(1, tokens[0, len(PROMPT) :, None])[:, 0].numpy()


def test_no_request_reads_the_cache_of_other_weights(served: Served) -> None:
    """Updates hit requests in every state, also those that the engine has not yet started."""

    async def interleaved() -> list[Generation]:
        running = []
        for delay in (0.0, 0.002, 0.005, 0.01, 0.02, 0.04):
            running += [
                asyncio.create_task(served.engine.generate(PROMPT, 8, None, max_tokens=12))
                for _ in range(3)
            ]
            await asyncio.sleep(delay)
            await served.sync()
        return await asyncio.gather(*running)

    generations = served.run(interleaved())
    assert len({generation.label for generation in generations}) > 2
    for generation in generations:
        served.assert_agrees(generation, PROMPT)


def test_a_new_lineage_restarts_what_is_in_flight(served: Served) -> None:
    async def recover() -> Generation:
        running = asyncio.create_task(served.engine.generate(PROMPT, 8, None, max_tokens=150))
        await several_tokens(served.engine, 16)
        await served.sync(new_lineage=True)
        return await running

    generation = served.run(recover())
    assert generation.label == served.engine.label
    assert all(len(sample.spans) == 1 for sample in generation.completions)
    served.assert_agrees(generation, PROMPT)


def test_the_end_of_sequence_token_belongs_to_the_response(served: Served) -> None:
    async def sample() -> list[Generation]:
        return [await served.engine.generate(PROMPT[:5], 16, None) for _ in range(4)]

    samples = [c for generation in served.run(sample()) for c in generation.completions]
    ended = [s for s in samples if s.finish_reason is FinishReason.STOP]
    truncated = [s for s in samples if s.finish_reason is FinishReason.LENGTH]
    assert ended
    assert truncated
    for sample in samples:
        assert sample.token_ids.dtype == np.int32
        assert sample.logprobs.dtype == np.float32
        assert sample.logprobs.shape == sample.token_ids.shape
        assert EOS not in sample.token_ids[:-1]
    for sample in ended:
        assert sample.token_ids[-1] == EOS
        assert served.difference(served.model, PROMPT[:5], sample) < AGREEMENT
    for sample in truncated:
        assert len(sample.token_ids) == 48
        assert sample.token_ids[-1] != EOS


def test_logprobs_are_of_the_tempered_distribution(tied: Served) -> None:
    generation = tied.run(tied.engine.generate(PROMPT, 4, None))
    tied.assert_agrees(generation, PROMPT)
    for sample in generation.completions:
        raw = response_logprobs(tied.model, PROMPT, sample.token_ids.tolist(), 1.0)
        assert np.abs(raw - sample.logprobs).max() > 0.05


def test_a_seed_repeats_its_samples_whatever_else_runs(seeded: Served) -> None:
    async def alone_and_crowded() -> tuple[Generation, Generation]:
        alone = await seeded.engine.generate(PROMPT, 4, 7)
        crowd = [seeded.engine.generate(PROMPT[:9], 4, seed) for seed in (20, 30)]
        crowded, *_ = await asyncio.gather(seeded.engine.generate(PROMPT, 4, 7), *crowd)
        return alone, crowded

    alone, crowded = seeded.run(alone_and_crowded())
    for a, b in zip(alone.completions, crowded.completions, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
    assert len({tuple(c.token_ids.tolist()) for c in alone.completions}) > 1


def test_seeded_requests_survive_an_update_in_mid_generation(seeded: Served) -> None:
    long = [BOS, *(3 + i % 45 for i in range(200))]

    async def update_under_load() -> tuple[list[Generation], list[Generation]]:
        groups = [(long, 1), (PROMPT, 50), (long[:130], 100), (long, 150)]
        running = [
            asyncio.create_task(seeded.engine.generate(p, 4, s, max_tokens=40)) for p, s in groups
        ]
        await several_tokens(seeded.engine, 60)
        await seeded.sync()
        crossed = await asyncio.gather(*running)
        again = [await seeded.engine.generate(long, 4, 1, max_tokens=40) for _ in range(2)]
        return crossed, again

    crossed, (first, second) = seeded.run(update_under_load())
    assert any(len(c.spans) == 2 for generation in crossed for c in generation.completions)
    for a, b in zip(first.completions, second.completions, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
    seeded.assert_agrees(first, long)


def test_requests_that_cannot_be_served_are_refused(tied: Served) -> None:
    with pytest.raises(ValueError, match="chunked_prefill = false"):
        tied.run(tied.engine.generate(PROMPT, 1, 7))
    with pytest.raises(ValueError, match="does not fit max_model_len 256"):
        tied.run(tied.engine.generate([3] * 256, 1, None))
    with pytest.raises(ValueError, match="max_num_seqs 16"):
        tied.run(tied.engine.generate(PROMPT, 17, None))
