"""From the `[data]` table to tokenised tasks: reads every source, merges, tokenises once.

The one place that knows both the kinds of source and the run's tokenizer.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.config import RunConfig
from orchestrator.data import merge, read_file, tokenize_tasks
from orchestrator.data_config import FileSource, GymSource, ModelConfig
from orchestrator.data_errors import BadRow, DataError
from orchestrator.errors import RunError
from orchestrator.gym import gym_rows
from orchestrator.tasks import Task, TaskRow
from verifiers.registry import UnknownVerifierError, resolve


@dataclass(frozen=True, slots=True)
class Tasks:
    """What a run trains and evaluates on."""

    train: tuple[Task, ...]
    held_out: tuple[Task, ...]

    @property
    def fingerprint(self) -> str:
        """Hash of the training tasks in their order."""
        digest = hashlib.sha256()
        for task in self.train:
            digest.update(repr(task).encode())
        return digest.hexdigest()[:16]

    @property
    def overlap(self) -> int:
        """Held-out tasks whose prompt is a training prompt too, as small families give them."""
        trained = {task.prompt_ids for task in self.train}
        return sum(task.prompt_ids in trained for task in self.held_out)


def load_tokenizer(model: ModelConfig) -> Any:
    """The model's own tokenizer. Raises RunError with the cause when it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model.path)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RunError(
            f"cannot load the tokenizer of model.path {model.path!r}: {reason} "
            "Expected a folder in Hugging Face layout with a tokenizer, or the name of a model "
            "on a reachable model hub."
        ) from error


def fingerprint(tokenizer: Any) -> str:
    """Hash of the vocabulary: two tokenizers that number tokens differently differ in it."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(repr(vocabulary).encode()).hexdigest()[:16]


def load_tasks(config: RunConfig, tokenizer: Any) -> Tasks:
    """Every source read and tokenised. Raises DataError that names what is wrong and where."""
    limit = config.max_prompt_tokens or _model_limit(tokenizer, config)

    def tokenised(sources: Sequence[FileSource | GymSource]) -> tuple[Task, ...]:
        return tokenize_tasks(
            merge(_rows(source) for source in sources),
            tokenizer,
            max_prompt_tokens=limit,
            system_prompt=config.data.system_prompt,
            template=config.data.template,
        ).tasks

    held_out = tokenised(config.data.held_out)
    tasks = Tasks(tokenised(config.data.train), held_out[: config.evaluation.max_tasks])
    _require_verifiers((*tasks.train, *tasks.held_out))
    return tasks


def _require_verifiers(tasks: Sequence[Task]) -> None:
    """Raise DataError naming the first task of each verifier that does not exist."""
    first = {task.verifier: task for task in reversed(tasks)}
    problems = []
    for name, task in first.items():
        try:
            resolve(name)
        except UnknownVerifierError as error:
            expected = "a registered verifier, or pkg.module:Name on PYTHONPATH"
            problems.append(BadRow(task.task_id, None, "verifier", expected, str(error)))
    if problems:
        raise DataError(problems)


def _rows(source: FileSource | GymSource) -> list[TaskRow]:
    if isinstance(source, FileSource):
        return read_file(source.path, columns=source.columns, verifier=source.verifier)
    return gym_rows(
        source.reasoning_gym,
        size=source.size,
        seed=source.seed,
        config=source.config,
        verifier=source.verifier,
    )


def _model_limit(tokenizer: Any, config: RunConfig) -> int:
    """Longest prompt that the model itself leaves room for, in tokens."""
    from transformers import AutoConfig

    positions = getattr(
        AutoConfig.from_pretrained(config.model.path),
        "max_position_embeddings",
        tokenizer.model_max_length,
    )
    return max(1, int(positions) - config.rollout.sampling.max_tokens)
