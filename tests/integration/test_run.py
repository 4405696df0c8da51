"""Whole runs of the quick start with every part real, to their ends, good and bad."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from live import QUICKSTART, LiveRun
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.config import EngineConfig, SamplingConfig
from actors.engine import Engine

pytestmark = pytest.mark.integration

FAST = ("--evaluation.max_tasks", "32", "--evaluation.samples_per_task", "2")


PPO = '{ preset = "ppo", kl = { coefficient = 0.01, place = "reward" } }'


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> LiveRun:
    """A run that trained a few steps to its end, with every model that a learner may have: policy,
    critic and reference."""
    options = ["--steps", "6", "--learner.objective", PPO, "--learner.reference", "{}", *FAST]
    run = LiveRun(QUICKSTART, tmp_path_factory.mktemp("finished"), options)
    assert run.wait() == 0, run.output
    return run


def test_summary_has_its_figures(finished: LiveRun) -> None:
    summary = finished.summary()
    assert summary["steps"] == 6
    assert 0.0 <= summary["accuracy_before"] <= 1.0
    assert 0.0 <= summary["accuracy_after"] <= 1.0
    for name in ("seconds", "samples_per_second", "tokens_per_second", "parity_max_abs"):
        assert summary[name] > 0, name
    assert summary["seconds"] > summary["training_seconds"]


def test_no_trained_token_is_older_than_the_bound(finished: LiveRun) -> None:
    summary = finished.summary()
    assert summary["staleness_max"] <= 2
    assert 0 <= summary["staleness_mean"] <= summary["staleness_max"]


def test_every_sample_is_accounted_for(finished: LiveRun) -> None:
    ledger = finished.summary()["ledger"]
    assert ledger["balanced"]
    assert ledger["failed_tasks"] == 0
    ended = sum(ledger[fate] for fate in ("trained", "masked", "dropped", "superseded"))
    assert ledger["generated"] == ended + ledger["pending"]
    samples = {s for step in finished.steps() for s in [step["samples"]]}
    assert ledger["trained"] + ledger["masked"] == sum(s["samples"] for s in finished.steps())
    assert samples == {128}


def test_engines_agree_in_float32(finished: LiveRun) -> None:
    assert finished.summary()["parity_max_abs"] < 1e-4


def test_one_line_per_step_names_the_bottleneck(finished: LiveRun) -> None:
    lines = re.findall(r"^step +\d+/6 .* bottleneck: .+$", finished.output, re.MULTILINE)
    assert len(lines) == 6


def test_weights_move_and_every_version_is_published(finished: LiveRun) -> None:
    versions = [step["version"] for step in finished.steps() if not step["skipped"]]
    assert versions == list(range(1, len(versions) + 1))
    assert all(step["learner"]["grad_norm"] > 0 for step in finished.steps())


def test_export_loads_in_transformers(finished: LiveRun) -> None:
    folder = finished.directory / "checkpoints/step_6/hf"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("12+34=", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()
    before = AutoModelForCausalLM.from_pretrained(QUICKSTART.parent / "model", dtype=torch.float32)
    moved = [
        not torch.equal(new, old)
        for new, old in zip(model.parameters(), before.parameters(), strict=True)
    ]
    assert any(moved)


def test_export_loads_in_vllm(finished: LiveRun) -> None:
    folder = str(finished.directory / "checkpoints/step_6/hf")
    config = EngineConfig(dtype="float32", max_model_len=32, kv_cache_bytes=16 << 20)

    async def sample() -> int:
        engine = Engine(folder, folder, config, SamplingConfig(max_tokens=4), threads=1)
        await engine.start()
        try:
            generation = await engine.generate([5, 6, 7], n=2, seed=None)
        finally:
            await engine.close()
        return len(generation.completions)

    assert asyncio.run(sample()) == 2


def test_a_model_that_does_not_load_is_one_clear_paragraph(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in (QUICKSTART.parent / "model").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (model / "model.safetensors").write_bytes(b"not a tensor file")
    run = LiveRun(QUICKSTART, tmp_path, ["--model.path", str(model), *FAST])
    assert run.wait() == 1
    assert "Traceback" not in run.output
    assert re.search(r"slipstream: .*does not load", run.output), run.output


def test_an_unreadable_row_is_named(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "1+1=", "answer": "2", "verifier": "exact"}\n{"prompt": 7}\n')
    run = LiveRun(QUICKSTART, tmp_path, ["--data.train", f'{{path = "{tasks}"}}'])
    assert run.wait() == 2
    assert re.search(r"tasks\.jsonl.*(row|line) 2.*prompt", run.output, re.DOTALL), run.output


def test_a_wrong_key_is_answered_with_the_nearest(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "orchestrator.cli", "check", str(QUICKSTART)]
    answer = subprocess.run(
        [*command, "--learner.optimiser.lr", "1e-4"], capture_output=True, text=True, cwd=tmp_path
    )
    assert answer.returncode == 2
    assert "learner.optimiser" in answer.stderr and "optimizer" in answer.stderr


def test_ppo_with_a_critic_and_a_reference_runs_in_the_loop(finished: LiveRun) -> None:
    steps = finished.steps()
    assert all(step["learner"]["value_grad_norm"] > 0 for step in steps)
    assert abs(steps[0]["learner"]["kl"]) < 1e-5
