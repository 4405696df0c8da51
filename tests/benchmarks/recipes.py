"""Shipped recipes as the benchmarks use them: a learner rank in process, and batches to train on.

Prompts are a recipe's own tasks; responses are random tokens of ragged lengths, since a learner's
time does not depend on what they say.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

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
from learner.batch import GroupEntry, StepRequest
from learner.messages import LearnerSpec
from learner.rank import LearnerRank
from orchestrator.config import RunConfig
from orchestrator.config_file import load
from orchestrator.task_loading import load_tasks, load_tokenizer
from orchestrator.tasks import Task

REPOSITORY = Path(__file__).parents[2]
LOOPBACK = "127.0.0.1"
META = TrajectoryMeta(tokenizer="none", model="none")


@dataclass(frozen=True)
class Recipe:
    """A recipe of the repository whose model is there."""

    name: str
    config: RunConfig
    tasks: tuple[Task, ...]

    def rank(self, param_dtype: str) -> LearnerRank:
        """A started learner of one rank, which takes record batches in place of references. One
        per process at a time: close it before the next."""
        config = self.config.learner.model_copy(update={"param_dtype": param_dtype, "ranks": 1})
        spec = LearnerSpec(
            model=self.config.model.path,
            config=config,
            objective=config.objective,
            max_response_tokens=self.config.rollout.sampling.max_tokens,
            rollout_dtype=self.config.rollout.engine.dtype,
            seed=0,
        )
        rank = LearnerRank(spec, rank=0, world=1, fetch=lambda batches: batches)
        rank.start(rank.open_meeting(LOOPBACK), LOOPBACK)
        return rank

    def request(self, version: int, groups: int, size: int) -> StepRequest:
        """A batch of `groups` times `size` samples for a learner at `version`, sampled by the
        version before it; another one for each version."""
        rng = np.random.default_rng(version)
        entries = [self._group(rng, number, size, max(0, version - 1)) for number in range(groups)]
        return StepRequest(
            step=version,
            version=version,
            max_staleness=self.config.max_staleness,
            total_steps=1000,
            groups=tuple(entries),
        )

    def _group(
        self, rng: np.random.Generator, group_id: int, size: int, sampled_by: int
    ) -> GroupEntry:
        task = self.tasks[int(rng.integers(len(self.tasks)))]
        longest = self.config.rollout.sampling.max_tokens
        lengths = rng.integers(1, longest + 1, size).tolist()
        samples = [
            RolloutSample(
                sample_id=sample_id(group_id, 0, index),
                group_id=group_id,
                task_id=task.task_id,
                sample_index=index,
                attempt=0,
                prompt_ids=task.prompt_ids,
                response_ids=rng.integers(0, max(task.prompt_ids), length, dtype=np.int32),
                behavior_logprobs=-rng.random(length, np.float32),
                loss_mask=np.ones(length, bool),
                version_spans=[VersionSpan(sampled_by, 0, length)],
                finish_reason="stop",
                worker="bench",
                started_at=1.0,
                finished_at=2.0,
                temperature=self.config.rollout.sampling.temperature,
            )
            for index, length in enumerate(lengths)
        ]
        ids = tuple(sample.sample_id for sample in samples)
        rewards = tuple(float(index % 2) for index in range(size))
        verdicts = [VerdictRow(i, r, r, "ok") for i, r in zip(ids, rewards, strict=True)]
        return GroupEntry(
            group_id=group_id,
            ref=with_verdicts(rollout_batch(samples, META), verdict_batch(verdicts)),
            sample_ids=ids,
            prompt_tokens=len(task.prompt_ids),
            response_tokens=tuple(lengths),
            rewards=rewards,
            outcomes=rewards,
            ok=(True,) * size,
            truncated=(False,) * size,
        )


def recipes() -> list[Recipe]:
    """The quick start, and SmolLM2 where its model has been made."""
    found = []
    for path in ("quickstart/quickstart.toml", "recipes/smollm2-arithmetic.toml"):
        config = load(REPOSITORY / "deploy" / path, []).resolved()
        if Path(config.model.path).is_dir():
            tasks = load_tasks(config, load_tokenizer(config.model)).train
            found.append(Recipe(config.name, config, tasks))
    return found
