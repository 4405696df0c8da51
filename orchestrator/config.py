"""The configuration of a run: top-level keys, the tables that are no role, and cross-table rules.

Each role's own table lives with the role. Here they are composed, and whatever needs two tables
to be judged is judged. Reading files is `config_file`'s affair.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from actors.config import RolloutConfig
from learner.config import LearnerConfig, ObjectiveConfig
from orchestrator.config_base import Table
from orchestrator.data_config import DataConfig, FileSource, GymSource, ModelConfig
from orchestrator.errors import Problem
from orchestrator.operation_config import (
    AutoscalerConfig,
    CheckpointConfig,
    ControlConfig,
    EvaluationConfig,
    MetricsConfig,
    SupervisionConfig,
)
from verifiers.config import VerifierConfig

TOKEN_ID_BYTES = 4
RESPONSE_TOKEN_BYTES = 9
"""Token id, behavior log-probability, and its bit of the loss mask rounded up."""
SAMPLE_BYTES = 1024
"""Columns of a sample that hold no tokens, version spans included."""


def _is_file_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ValueError(
            f"{name!r} is part of a folder's name: up to 64 letters, digits, dots, dashes and "
            "underscores, the first a letter or digit"
        )
    return name


_Config = TypeVar("_Config", bound="RunConfig")


class QueueConfig(Table):
    """Bounds on groups between admission and training; they act at admission only."""

    max_groups: Annotated[int | None, Field(ge=1)] = None
    """Groups; by default what the staleness bound can use, (1 + max_staleness) batches."""
    max_bytes: Annotated[int, Field(ge=1 << 20)] = 1 << 30
    """Bytes of trajectories in the object store, counted at their worst case until known."""
    policy: Literal["mask", "drop", "wait"] = "mask"
    """For what is too old when it is consumed: mask the tokens, drop the group, or consume in
    admission order so that nothing becomes too old."""


class RunConfig(Table):
    """A whole run. Build it with `model_validate`, or read it through `config_file.load`."""

    name: Annotated[str, AfterValidator(_is_file_name)]
    """Name of the run, the first part of its directory's name."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of task order, initialisation and, where seeded, sampling."""
    steps: Annotated[int, Field(ge=1)]
    """Batch steps to train."""
    max_staleness: Annotated[int, Field(ge=0, le=64)] = 2
    """Versions that a trained token may be behind the learner; 0 is synchronous on-policy."""
    deterministic: bool = False
    """For debugging: groups, weights and batches follow a schedule, and samples are drawn one at a
    time by seeds of their own, so that a run can be repeated exactly. Slow."""
    model: ModelConfig
    """The model that is trained."""
    data: DataConfig
    """Training and held-out tasks."""
    rollout: RolloutConfig
    """Rollout workers and their engines."""
    verifiers: VerifierConfig = VerifierConfig()
    """Verifier workers."""
    learner: LearnerConfig
    """Learner ranks, optimizer and objective."""
    queue: QueueConfig = QueueConfig()
    """Bounds on groups in flight and ready."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and export."""
    metrics: MetricsConfig = MetricsConfig()
    """The Prometheus endpoint."""
    control: ControlConfig = ControlConfig()
    """The control service."""
    autoscaler: AutoscalerConfig = AutoscalerConfig()
    """Scaling by itself."""
    supervision: SupervisionConfig = SupervisionConfig()
    """When the run gives up."""

    @model_validator(mode="after")
    def _tables_agree(self) -> Self:
        problems = list(_contradictions(self))
        if problems:
            text = " ".join(str(problem) for problem in problems).replace("{", "{{")
            raise PydanticCustomError(
                "contradiction", text.replace("}", "}}"), {"problems": problems}
            )
        return self

    def resolved(self) -> Self:
        """This configuration with what it leaves to other keys filled in: the objective's bounds
        and the queue's capacity. Doing it twice changes nothing."""
        max_groups = self.queue.max_groups or (1 + self.max_staleness) * self.groups_per_batch
        learner = self.learner.model_copy(update={"objective": _objective(self)})
        queue = self.queue.model_copy(update={"max_groups": max_groups})
        resolved = self.model_copy(update={"learner": learner, "queue": queue})
        return _scheduled(resolved) if self.deterministic else resolved

    @property
    def groups_per_batch(self) -> int:
        """Groups that one batch step consumes (B)."""
        return self.learner.groups_per_batch

    @property
    def max_prompt_tokens(self) -> int | None:
        """Longest prompt that leaves the engine room for a response of full length; None where
        only the model knows."""
        limit = self.rollout.engine.max_model_len
        return None if limit is None else limit - self.rollout.sampling.max_tokens

    def worst_group_bytes(self, prompt_tokens: int) -> int:
        """Upper bound of the record batch of one group with prompts of up to `prompt_tokens`."""
        prompt = TOKEN_ID_BYTES * prompt_tokens
        response = RESPONSE_TOKEN_BYTES * self.rollout.sampling.max_tokens
        return self.rollout.samples_per_group * (prompt + response + SAMPLE_BYTES)


def _scheduled(config: _Config) -> _Config:
    """With what a deterministic run needs: groups in admission order; and engines whose arithmetic
    depends on the sample alone, not on what else they compute at the same time or have cached."""
    engine = config.rollout.engine.model_copy(
        update={"one_at_a_time": True, "enable_prefix_caching": False, "chunked_prefill": False}
    )
    return config.model_copy(
        update={
            "queue": config.queue.model_copy(update={"policy": "wait"}),
            "rollout": config.rollout.model_copy(update={"seeded": True, "engine": engine}),
        }
    )


def _objective(config: RunConfig) -> ObjectiveConfig:
    return config.learner.objective.for_run(
        max_staleness=config.max_staleness,
        max_response_tokens=config.rollout.sampling.max_tokens,
        samples_per_group=config.rollout.samples_per_group,
        has_reference=config.learner.reference is not None,
        has_critic=True,
    )


def _contradictions(config: RunConfig) -> Iterator[Problem]:
    """What each table allows by itself and another one does not."""
    try:
        _objective(config)
    except ValueError as error:
        yield Problem("learner.objective", str(error).rstrip("."))
    yield from _queue_below_a_batch(config)
    if config.supervision.no_progress_timeout_s <= config.learner.step_timeout_s:
        yield Problem(
            "supervision.no_progress_timeout_s",
            f"{config.supervision.no_progress_timeout_s:g} would end a run in mid-step",
            f"more than learner.step_timeout_s, {config.learner.step_timeout_s:g}",
        )
    yield from _not_deterministic(config)
    yield from _outside_the_autoscaler(config)
    samples, limit = config.evaluation.samples_per_task, config.rollout.engine.max_num_seqs
    if samples > limit:
        yield Problem(
            "evaluation.samples_per_task",
            f"{samples} samples cannot run at once",
            f"at most rollout.engine.max_num_seqs, {limit}",
        )
    for source in config.data.held_out:
        if any(_share_tasks(source, other) for other in config.data.train):
            yield Problem(
                "data.held_out",
                f"{source.title} is (partly) a training source too, so accuracy would be measured "
                "on trained tasks",
                "other tasks",
                "Use another file; of a reasoning-gym family, whose tasks are numbered seed, "
                "seed + 1, …, seeds that lie further apart than size.",
            )


def _share_tasks(one: FileSource | GymSource, other: FileSource | GymSource) -> bool:
    if isinstance(one, FileSource) or isinstance(other, FileSource):
        return one == other
    if (one.reasoning_gym, one.config) != (other.reasoning_gym, other.config):
        return False
    return one.seed < other.seed + other.size and other.seed < one.seed + one.size


def _not_deterministic(config: RunConfig) -> Iterator[Problem]:
    if not config.deterministic:
        return
    why = "cannot be part of a deterministic run"
    if config.evaluation.every:
        yield Problem("evaluation.every", f"{config.evaluation.every} {why}", "0")
    if config.autoscaler.enabled:
        yield Problem("autoscaler.enabled", f"true {why}", "false")
    if config.learner.param_dtype != "float32":
        yield Problem(
            "learner.param_dtype",
            f"{config.learner.param_dtype} {why}: kept versions would be rounded",
            "float32",
        )


def _outside_the_autoscaler(config: RunConfig) -> Iterator[Problem]:
    if not config.autoscaler.enabled:
        return
    for role, workers, bounds in (
        ("rollout", config.rollout.workers, config.autoscaler.rollout),
        ("verifiers", config.verifiers.workers, config.autoscaler.verifiers),
    ):
        if not bounds.min_workers <= workers <= bounds.max_workers:
            yield Problem(
                f"autoscaler.{role}",
                f"{role}.workers, {workers}, is outside of {bounds.min_workers} to "
                f"{bounds.max_workers}",
                "bounds that hold the workers the run starts with",
            )


def _queue_below_a_batch(config: RunConfig) -> Iterator[Problem]:
    queue, batch = config.queue, config.groups_per_batch
    if queue.max_groups is not None and queue.max_groups < batch:
        yield Problem(
            "queue.max_groups",
            f"{queue.max_groups} can never hold one batch",
            f"at least learner.groups_per_batch, {batch}",
        )
    batch_bytes = batch * config.worst_group_bytes(config.max_prompt_tokens or 0)
    if queue.max_bytes < batch_bytes:
        yield Problem(
            "queue.max_bytes",
            f"{queue.max_bytes} may not hold one batch of responses at their full length",
            f"at least {batch_bytes}",
            "Raise it, or lower rollout.sampling.max_tokens or rollout.engine.max_model_len.",
        )
