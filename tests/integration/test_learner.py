"""The learner group on real Ray actors and gloo: gradients, versions, weights, checkpoints, death.

Four groups, of 1 to 4 ranks, serve the whole module.
"""

import asyncio
import itertools
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from learner_groups import (
    STALENESS,
    TEMPERATURE,
    TOTAL_STEPS,
    VOCABULARY,
    Sample,
    group_entry,
    random_groups,
    random_sample,
    save_tiny_model,
    spec,
    train,
    weights_of,
)
from safetensors.torch import load as load_safetensors
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from actors.process_log import redirect_output
from actors.trajectory import (
    TrajectoryError,
)
from learner.batch import GroupEntry, StepRequest
from learner.group import LearnerDied, LearnerGroup
from learner.messages import ModelError, ProbeRequest
from learner.rows import pack, read_rows

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster():
    started = not ray.is_initialized()
    if started:
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=200 << 20,
        )
    yield
    if started:
        ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def groups(cluster, model: Path):
    made = {ranks: LearnerGroup(spec(model, ranks)) for ranks in (1, 2, 3, 4)}

    async def start() -> None:
        await asyncio.gather(*(group.start() for group in made.values()))

    asyncio.run(start())
    yield made
    for group in made.values():
        asyncio.run(group.close())


@pytest.fixture(scope="module")
def origin(groups: dict[int, LearnerGroup], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the initial weights, from which each test starts."""
    folder = tmp_path_factory.mktemp("origin") / "step_0"
    asyncio.run(groups[2].save(str(folder), keep=1))
    return folder


def hf_model(settings: Path, weights: dict[str, torch.Tensor]) -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(settings))
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert missing == ["lm_head.weight"]
    model.tie_weights()
    return model.eval()


@torch.no_grad()
def hf_logprobs(
    model: LlamaForCausalLM, prompt: list[int], response: list[int], temperature: float
) -> list[float]:
    logits = model(torch.tensor([prompt + response])).logits[0] / temperature
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


def test_ranks_share_one_gradient(groups, origin: Path) -> None:
    entries = random_groups(seed=3)
    moves, results = {}, {}
    for ranks, group in groups.items():
        asyncio.run(group.load(str(origin)))
        before = weights_of(group)
        results[ranks] = train(group, 0, entries)
        after = weights_of(group)
        moves[ranks] = torch.cat([(after[name] - before[name]).flatten() for name in before])
    assert moves[1].norm() > 0.1
    for ranks in (2, 3, 4):
        assert (moves[ranks] - moves[1]).norm() < 1e-5 * moves[1].norm()
        for name, value in results[1].metrics.items():
            if not name.endswith("_s") and name != "attention_slots":
                assert results[ranks].metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (
                    name
                )
        assert sorted(results[ranks].fates, key=lambda fate: fate.sample_id) == sorted(
            results[1].fates, key=lambda fate: fate.sample_id
        )
    lengths = {n: t for e in entries for n, t in zip(e.sample_ids, e.response_tokens, strict=True)}
    assert {fate.sample_id: fate.trained_tokens for fate in results[1].fates} == lengths
    assert results[1].metrics["trained_tokens"] == sum(lengths.values())


def test_more_ranks_than_samples(groups, origin: Path) -> None:
    [entry] = random_groups(seed=4, groups=1, size=2)
    moved = {}
    for ranks in (1, 3):
        asyncio.run(groups[ranks].load(str(origin)))
        assert train(groups[ranks], 0, [entry]).changed
        moved[ranks] = weights_of(groups[ranks])
    for name, tensor in moved[1].items():
        torch.testing.assert_close(moved[3][name], tensor, rtol=1e-4, atol=1e-6)


def test_each_token_is_scored_under_the_version_that_sampled_it(
    groups, origin: Path, model: Path
) -> None:
    group = groups[2]
    asyncio.run(group.load(str(origin)))
    models = {}
    for version in range(2):
        models[version] = hf_model(model, weights_of(group))
        assert train(group, version, random_groups(seed=10 + version, version=version)).changed
    models[2] = hf_model(model, weights_of(group))
    rng = np.random.default_rng(0)
    samples = []
    for spans in ([(0, 0, 9)], [(1, 0, 7)], [(2, 0, 8)], [(0, 0, 3), (1, 3, 4), (2, 4, 9)]):
        prompt = [5, 6, 7]
        response = rng.integers(3, VOCABULARY, spans[-1][2]).tolist()
        under = {v: hf_logprobs(m, prompt, response, TEMPERATURE) for v, m in models.items()}
        logprobs = [under[v][t] for v, start, end in spans for t in range(start, end)]
        samples.append(Sample(prompt, response, logprobs, float(len(samples) % 2), tuple(spans)))
    result = train(group, 2, [group_entry(0, samples)])
    assert result.changed
    assert result.metrics["mismatch_abs_max"] < 2e-5
    assert result.metrics["movement_abs_max"] > 1e-2
    lags = [result.metrics[f"staleness_tokens/{lag}"] for lag in range(STALENESS + 1)]
    assert lags == [8 + 5, 7 + 1, 9 + 3]


def test_tokens_beyond_the_bound_are_masked_and_counted(groups, origin: Path) -> None:
    group = groups[1]
    asyncio.run(group.load(str(origin)))
    for version in range(STALENESS + 1):
        train(group, version, random_groups(seed=20 + version, version=version))
    prompt, response, logprobs = [4, 5], [6, 7, 8, 9], [-3.0] * 4
    stale = Sample(prompt, response, logprobs, 1.0, ((0, 0, 4),))
    crossing = Sample(prompt, response, logprobs, 0.0, ((0, 0, 1), (3, 1, 4)))
    unscored = Sample(prompt, response, logprobs, None, ((3, 0, 4),))
    result = train(group, STALENESS + 1, [group_entry(7, [stale, crossing, unscored])])
    fates = {fate.sample_id: (fate.trained_tokens, fate.masked) for fate in result.fates}
    assert fates == {
        "7-0-0": (0, {"stale": 4}),
        "7-0-1": (3, {"stale": 1}),
        "7-0-2": (0, {"unscored": 4}),
    }
    assert result.metrics["tokens"] == 8, "staleness does not shape the denominator"
    all_stale = group_entry(8, [stale, replace(stale, reward=0.0)])
    skipped = train(group, result.version, [all_stale])
    assert (skipped.changed, skipped.skipped, skipped.version) == (False, "empty", result.version)


def test_the_bound_may_change_from_step_to_step(groups, origin: Path) -> None:
    group = groups[1]
    asyncio.run(group.load(str(origin)))
    raised = STALENESS + 2

    def of_all_versions(version: int) -> list[GroupEntry]:
        response, logprobs = [6, 7, 8], [-3.0] * 3
        samples = [
            Sample([4, 5], response, logprobs, float(lag % 2), ((version - lag, 0, 3),))
            for lag in range(min(version, raised) + 1)
        ]
        return [group_entry(version, samples)]

    def lags(version: int, bound: int) -> list[int]:
        result = train(group, version, of_all_versions(version), bound)
        return [int(result.metrics[f"staleness_tokens/{lag}"]) for lag in range(bound + 1)]

    for version in range(STALENESS + 1):
        train(group, version, random_groups(seed=40 + version, version=version))
    assert lags(STALENESS + 1, raised) == [3, 3, 3, 0, 0], "what was given up stays unknown"
    assert lags(STALENESS + 2, raised) == [3, 3, 3, 3, 0]
    assert lags(STALENESS + 3, raised) == [3, 3, 3, 3, 3]
    assert lags(STALENESS + 4, 1) == [3, 3]


def test_non_finite_step_changes_nothing(groups, origin: Path) -> None:
    group = groups[2]
    asyncio.run(group.load(str(origin)))
    before = weights_of(group)
    rng = np.random.default_rng(0)
    sample = random_sample(rng, [3, 4])
    extreme = [replace(sample, reward=1e300), replace(sample, reward=0.0)]
    result = train(group, 0, [group_entry(0, extreme)])
    assert (result.changed, result.skipped, result.version) == (False, "non-finite", 0)
    assert result.metrics["skipped_optimizer_steps"] == 1
    assert all(fate.trained_tokens == 0 and fate.masked["skipped"] for fate in result.fates)
    after = weights_of(group)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert train(group, 0, random_groups(seed=5)).version == 1


def test_rows_that_contradict_the_request_are_refused_on_all_ranks(groups, origin: Path) -> None:
    group = groups[2]
    asyncio.run(group.load(str(origin)))
    good, other = random_groups(seed=6, groups=2)
    with pytest.raises(TrajectoryError, match="sample_id"):
        train(group, 0, [replace(good, ref=other.ref)])
    assert train(group, 0, [good]).changed


def test_publication_is_the_state_dict(groups, origin: Path, model: Path) -> None:
    asyncio.run(groups[3].load(str(origin)))
    weights = weights_of(groups[3])
    expected = load_safetensors((model / "model.safetensors").read_bytes())
    assert set(weights) == set(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_kept_versions_can_be_published_and_scored_with(groups, origin: Path) -> None:
    group = groups[2]
    asyncio.run(group.load(str(origin)))
    entries = random_groups(seed=17, groups=2)
    refs = [entry.ref for entry in entries]
    then = []
    for version in range(3):
        then.append((weights_of(group), asyncio.run(group.score(refs))))
        train(group, version, random_groups(seed=20 + version, version=version))
    for version in (1, 2):
        weights, (scaled, raw) = then[version]
        kept = weights_of(group, version)
        assert all(torch.equal(kept[name], weights[name]) for name in weights)
        again = asyncio.run(group.score(refs, version))
        assert np.array_equal(again[0], scaled) and np.array_equal(again[1], raw)
    with pytest.raises(ValueError, match=r"version 0 is not kept; there are \[1, 2\]"):
        weights_of(group, 0)
    assert train(group, 3, random_groups(seed=23, version=3)).changed, "it is in step afterwards"


def test_probe_scores_are_the_models(groups, origin: Path, model: Path) -> None:
    asyncio.run(groups[2].load(str(origin)))
    prefixes = ((5, 6, 7), (5, 6), (9, 8, 7, 6, 5), (5, 6, 7, 8))
    request = ProbeRequest(prefixes, top_k=4, temperature=TEMPERATURE)
    publication, _ = asyncio.run(groups[2].publish("0.0", request))
    reference = AutoModelForCausalLM.from_pretrained(model).eval()
    for row, prefix in enumerate(prefixes):
        with torch.no_grad():
            logits = reference(torch.tensor([prefix])).logits[0, -1]
        best = logits.topk(4).indices
        assert publication.probe.token_ids[row].tolist() == best.tolist()
        for scores, heat in (("logprobs", TEMPERATURE), ("raw_logprobs", 1.0)):
            expected = (logits / heat).log_softmax(-1)[best]
            found = torch.tensor(getattr(publication.probe, scores)[row])
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_score_gives_both_temperatures(groups, origin: Path, model: Path) -> None:
    asyncio.run(groups[2].load(str(origin)))
    entries = random_groups(seed=8, groups=3)
    scaled, raw = asyncio.run(groups[2].score([entry.ref for entry in entries]))
    reference = AutoModelForCausalLM.from_pretrained(model).eval()
    expected = {TEMPERATURE: [], 1.0: []}
    for entry in entries:
        for row in ray.get(entry.ref).to_pylist():
            for heat, into in expected.items():
                into += hf_logprobs(reference, row["prompt_ids"], row["response_ids"], heat)
    np.testing.assert_allclose(scaled, expected[TEMPERATURE], atol=1e-5)
    np.testing.assert_allclose(raw, expected[1.0], atol=1e-5)


def test_tokens_and_logprobs_reach_another_process_bit_for_bit(cluster) -> None:
    @ray.remote(num_cpus=0)
    def as_trained(refs: list[ray.ObjectRef]) -> list[bytes]:
        rows = read_rows(ray.get(refs))
        row = pack(rows, np.arange(len(rows.sample_ids)), torch.device("cpu"))
        ids = row.input_ids.numpy().astype(np.int32)
        return [ids.tobytes(), row.targets.numpy().tobytes(), rows.behavior.tobytes()]

    entries = random_groups(seed=9, groups=3)
    sent = [row for entry in entries for row in ray.get(entry.ref).to_pylist()]
    fed = [(row["prompt_ids"] + row["response_ids"])[:-1] for row in sent]
    ids, targets, behavior = ray.get(as_trained.remote([entry.ref for entry in entries]))
    chain = itertools.chain.from_iterable
    assert ids == np.array(list(chain(fed)), np.int32).tobytes()
    assert targets == np.array(list(chain(r["response_ids"] for r in sent)), np.int64).tobytes()
    flat = list(chain(row["behavior_logprobs"] for row in sent))
    assert behavior == np.array(flat, np.float32).tobytes()


def test_resume_continues_bit_for_bit(groups, origin: Path, tmp_path: Path) -> None:
    group = groups[2]
    asyncio.run(group.load(str(origin)))
    for version in range(2):
        train(group, version, random_groups(seed=30 + version, version=version))
    for step in (1, 2):
        asyncio.run(group.save(str(tmp_path / f"step_{step}"), keep=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2"]
    # Tokens of older versions are scored under them: those are in the checkpoint too.
    lagging = [random_groups(seed=32, version=0), random_groups(seed=33, version=1)]
    uninterrupted = [train(group, 2 + i, batch) for i, batch in enumerate(lagging)]
    assert uninterrupted[0].metrics["staleness_tokens/2"] > 0
    weights = weights_of(group)
    asyncio.run(group.load(str(origin)))
    state = asyncio.run(group.load(str(tmp_path / "step_2")))
    assert (state.version, state.batches) == (2, 2)
    resumed = [train(group, 2 + i, batch) for i, batch in enumerate(lagging)]
    again = weights_of(group)
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    for first, second in zip(uninterrupted, resumed, strict=True):
        assert first.fates == second.fates
        timeless = {n: v for n, v in first.metrics.items() if not n.endswith("_s")}
        assert timeless == {n: second.metrics[n] for n in timeless}


def test_another_number_of_ranks_goes_on_from_the_same_weights(
    groups, origin: Path, tmp_path: Path
) -> None:
    asyncio.run(groups[2].load(str(origin)))
    train(groups[2], 0, random_groups(seed=30))
    asyncio.run(groups[2].save(str(tmp_path / "step_1"), keep=1))
    train(groups[2], 1, random_groups(seed=31, version=1))
    weights = weights_of(groups[2])
    # As a kill leaves it in the middle of replacing the checkpoint by another of its name.
    (tmp_path / "step_1").rename(tmp_path / ".step_1.replaced")
    asyncio.run(groups[1].load(str(tmp_path / "step_1")))
    train(groups[1], 1, random_groups(seed=31, version=1))
    resharded = weights_of(groups[1])
    for name, tensor in weights.items():
        torch.testing.assert_close(resharded[name], tensor, rtol=1e-4, atol=1e-6)


def test_incomplete_checkpoint_is_refused(groups, origin: Path, tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    with pytest.raises(ValueError, match="no complete checkpoint"):
        asyncio.run(groups[2].load(str(tmp_path / "step_1")))


def test_export_is_a_model_folder(groups, origin: Path, tmp_path: Path) -> None:
    group = groups[3]
    asyncio.run(group.load(str(origin)))
    train(group, 0, random_groups(seed=40))
    entries = random_groups(seed=41, groups=2)
    _, raw = asyncio.run(group.score([entry.ref for entry in entries]))
    asyncio.run(group.export(str(tmp_path / "hf")))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "{}"
    rows = [row for entry in entries for row in ray.get(entry.ref).to_pylist()]
    expected = [
        value
        for row in rows
        for value in hf_logprobs(exported, row["prompt_ids"], row["response_ids"], 1.0)
    ]
    np.testing.assert_allclose(raw, expected, atol=1e-5)


def test_killed_rank_is_named(groups, origin: Path) -> None:
    group = groups[3]
    asyncio.run(group.load(str(origin)))
    request = StepRequest(1, 0, STALENESS, TOTAL_STEPS, tuple(random_groups(seed=50, groups=40)))
    victim = group.infos[1].pid
    survivors = [info.pid for info in group.infos if info.rank != 1]

    async def kill_during_step() -> None:
        step = asyncio.create_task(group.step(request))
        await asyncio.sleep(0.05)
        os.kill(victim, signal.SIGKILL)
        await step

    with pytest.raises(LearnerDied) as caught:
        asyncio.run(kill_during_step())
    assert caught.value.rank == 1
    with pytest.raises(LearnerDied):
        asyncio.run(group.step(request))
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in survivors):
        assert time.monotonic() < deadline, "a rank outlived its group"
        time.sleep(0.1)


def test_model_that_does_not_load_is_named(cluster, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    logs = tmp_path / "logs"
    logs.mkdir()
    group = LearnerGroup(replace(spec(tmp_path, 1), logs=str(logs)), redirect_output)
    with pytest.raises(ModelError, match=str(tmp_path)):
        asyncio.run(group.start())
    assert [path.name for path in logs.iterdir()] == ["learner-0.log"]
