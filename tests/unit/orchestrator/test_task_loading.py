"""Tasks of a run: sources read, tokenised, and refused when nobody could judge them."""

import json
from pathlib import Path

import pytest

from orchestrator.config import RunConfig
from orchestrator.data_errors import DataError
from orchestrator.task_loading import load_tasks, load_tokenizer

QUICKSTART = Path(__file__).parents[3] / "deploy/quickstart"


def config(folder: Path, train: str, held_out: str) -> RunConfig:
    (folder / "train.jsonl").write_text(train)
    (folder / "held_out.jsonl").write_text(held_out)
    content = {
        "name": "tasks",
        "steps": 1,
        "model": {"path": str(QUICKSTART / "model")},
        "data": {"train": {"path": "train.jsonl"}, "held_out": {"path": "held_out.jsonl"}},
        "rollout": {"sampling": {"max_tokens": 8}, "engine": {"max_model_len": 32}},
        "learner": {"groups_per_batch": 2},
    }
    return RunConfig.model_validate(content, context={"folder": folder})


def row(prompt: str, verifier: str = "exact") -> str:
    return (
        json.dumps({"id": prompt + verifier, "prompt": prompt, "answer": "3", "verifier": verifier})
        + "\n"
    )


def test_an_unknown_verifier_is_refused_before_anything_starts(tmp_path: Path) -> None:
    run = config(tmp_path, row("1+2=") + row("2+1=", "exakt"), row("0+3="))
    with pytest.raises(DataError, match=r"2\+1=exakt.*did you mean 'exact'"):
        load_tasks(run, load_tokenizer(run.model))


def test_held_out_prompts_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    run = config(tmp_path, row("1+2=") + row("2+1="), row("2+1=", "numeric") + row("0+3="))
    tasks = load_tasks(run, load_tokenizer(run.model))
    assert (len(tasks.train), len(tasks.held_out), tasks.overlap) == (2, 2, 1)
