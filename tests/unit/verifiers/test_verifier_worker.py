import asyncio
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import verifier_doubles  # noqa: F401  registers the doubles
from pydantic import ValidationError

from actors.trajectory import (
    RolloutSample,
    TrajectoryMeta,
    VersionSpan,
    rollout_batch,
    sample_id,
    with_verdicts,
)
from verifiers.config import VerifierConfig
from verifiers.registry import UnknownVerifierError
from verifiers.verdict import Question
from verifiers.worker import VerifierWorker

CHARACTERS = "0123456789 +=exit"
END = len(CHARACTERS)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {character: index for index, character in enumerate(CHARACTERS)}
    backend = Tokenizer(models.WordLevel({**words, "<end>": END, "?": END + 1}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", unk_token="?"
    ).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs") / "verifier-0.log"


@pytest.fixture(scope="module")
def run_worker(tokenizer: str, log_path: Path) -> Iterator[tuple[asyncio.Runner, VerifierWorker]]:
    worker = VerifierWorker("verifier-0", VerifierConfig(), tokenizer, str(log_path))
    with asyncio.Runner() as runner:
        runner.run(worker.start())
        yield runner, worker
        runner.run(worker.close())


def batch_of(texts: list[str]) -> pa.RecordBatch:
    samples = []
    for index, text in enumerate(texts):
        response = [*map(CHARACTERS.index, text), END]
        samples.append(
            RolloutSample(
                sample_id=sample_id(3, 0, index),
                group_id=3,
                task_id="task",
                sample_index=index,
                attempt=0,
                prompt_ids=[1, 10, 1],
                response_ids=response,
                behavior_logprobs=[-0.5] * len(response),
                loss_mask=[True] * len(response),
                version_spans=[VersionSpan(0, 0, len(response))],
                finish_reason="stop",
                worker="rollout-0",
                started_at=1.0,
                finished_at=2.0,
                temperature=1.0,
            )
        )
    return rollout_batch(samples, TrajectoryMeta(tokenizer="t", model="m"))


QUESTION = Question("task", "1+1", "2")


def test_a_batch_is_decoded_without_its_special_tokens_and_scored(
    run_worker: tuple[asyncio.Runner, VerifierWorker],
) -> None:
    runner, worker = run_worker
    batch = batch_of(["2", "3", "1 + 1 = 2", " 2"])
    for verifier, rewards in (("exact", [1, 0, 0, 1]), ("numeric", [1, 0, 1, 1])):
        verdicts = runner.run(worker.score(batch, QUESTION, verifier))
        full = with_verdicts(batch, verdicts)
        assert full.column("reward").to_pylist() == rewards
        assert full.column("outcome").to_pylist() == rewards
        assert full.column("status").to_pylist() == ["ok"] * 4


def test_a_slice_of_a_batch_is_scored_by_its_own_rows(
    run_worker: tuple[asyncio.Runner, VerifierWorker],
) -> None:
    runner, worker = run_worker
    verdicts = runner.run(worker.score(batch_of(["2", "3", "2"]).slice(1, 2), QUESTION, "exact"))
    assert verdicts.column("sample_id").to_pylist() == ["3-0-1", "3-0-2"]
    assert verdicts.column("reward").to_pylist() == [0.0, 1.0]


def test_a_crash_is_a_status_and_never_a_reward(
    run_worker: tuple[asyncio.Runner, VerifierWorker], log_path: Path
) -> None:
    runner, worker = run_worker
    batch = batch_of(["2", "exit 3", "1"])
    verdicts = runner.run(worker.score(batch, QUESTION, "double_obedient"))
    full = with_verdicts(batch, verdicts)
    assert full.column("status").to_pylist() == ["ok", "error", "ok"]
    assert full.column("reward").to_pylist() == [1.0, None, 0.0]
    assert "exited with code 3" in full.column("detail")[1].as_py()
    assert "sample 3-0-1 is error" in log_path.read_text()


def test_an_unknown_verifier_is_refused(
    run_worker: tuple[asyncio.Runner, VerifierWorker],
) -> None:
    runner, worker = run_worker
    with pytest.raises(UnknownVerifierError, match="did you mean 'exact'"):
        runner.run(worker.score(batch_of(["2"]), QUESTION, "exakt"))


def test_a_tokenizer_that_does_not_load_is_reported(tmp_path: Path) -> None:
    worker = VerifierWorker("verifier-0", VerifierConfig(), str(tmp_path / "nothing"))
    with pytest.raises((OSError, ValueError), match="nothing"):
        asyncio.run(worker.start())


@pytest.mark.parametrize(
    "table", [{"processes": 0}, {"deadline_s": 0.0}, {"memory_limit_bytes": 1}, {"worker": 1}]
)
def test_config_refuses_what_makes_no_sense(table: dict) -> None:
    with pytest.raises(ValidationError):
        VerifierConfig(**table)
