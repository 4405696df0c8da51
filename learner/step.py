"""One batch step on one rank: fetch, score, train, count. Runs in lockstep on all ranks.

Knows no Ray: trajectory batches come through the `fetch` callable it is given. A step either
changes the weights on every rank or on none.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from actors import trajectory
from learner.batch import GroupEntry, SampleFate, StepRequest, StepResult
from learner.collective import Collective
from learner.config import LearnerConfig
from learner.model import Policy
from learner.objective import Normalizer, TokenBatch, TokenFate, evaluate, fate_counts
from learner.objective_config import ObjectiveConfig
from learner.objective_metrics import Metrics
from learner.optimizer import Optimizer
from learner.packing import ragged_index
from learner.plan import BatchPlan, left_out_fates, plan_batch
from learner.rows import Rows, pack, read_rows
from learner.scoring import Scorer
from learner.versions import VersionStore

Fetch = Callable[[Sequence[Any]], Sequence[pa.RecordBatch]]

_MASK_REASONS = {fate: fate.name.lower() for fate in TokenFate if fate > TokenFate.TRAINED} | {
    TokenFate.OUTSIDE: "tool"
}


@dataclass(frozen=True, eq=False)
class _Work:
    """This rank's rows; `row_of` maps a sample's number in the batch to its row."""

    plan: BatchPlan
    rows: Rows
    row_of: dict[int, int]
    old: np.ndarray | None
    version: int


@dataclass(eq=False)
class _Tally:
    """What a rank counts during a step."""

    metrics: Metrics
    lags: Tensor
    fates: list[SampleFate] = field(default_factory=list)
    input_tokens: int = 0
    attention_slots: int = 0
    grad_norm: float = 0.0
    applied: int = 0
    skipped: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


class Trainer:
    """Trains a policy on batches of groups, `objective` having the run's bounds filled in."""

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        store: VersionStore,
        scorer: Scorer,
        ranks: Collective,
        config: LearnerConfig,
        objective: ObjectiveConfig,
        max_response_tokens: int,
        fetch: Fetch,
    ) -> None:
        if objective.max_staleness is None:
            raise ValueError("the objective has no max_staleness; fill it in with for_run")
        self._policy = policy
        self._optimizer = optimizer
        self._store = store
        self._scorer = scorer
        self._ranks = ranks
        self._config = config
        self._objective = objective
        self._max_staleness = objective.max_staleness
        self._max_response_tokens = max_response_tokens
        self._fetch = fetch

    def step(self, request: StepRequest) -> StepResult:
        """Train on the batch of `request`.

        Raises TrajectoryError or ValueError when rows break the contract or disagree with the
        request: then no rank's weights have changed, but ranks may be out of step.
        """
        tally = _Tally(
            Metrics.zeros(self._ranks.device),
            torch.zeros(self._max_staleness + 1, dtype=torch.float64, device=self._ranks.device),
        )
        clock = time.perf_counter
        started = clock()
        plan = plan_batch(
            request,
            self._objective,
            ranks=self._ranks.world,
            token_budget=self._config.token_budget,
            optimizer_steps=self._config.optimizer_steps_per_batch,
            max_response_tokens=self._max_response_tokens,
        )
        rows, row_of = self._read_own_rows(request, plan)
        fetched = clock()
        old = self._old_logprobs(rows, request.version)
        scored = clock()
        lr = self._optimizer.begin_batch()
        work = _Work(plan, rows, row_of, old, request.version)
        for number in range(len(plan.optimizer_steps)):
            self._optimizer_step(work, number, tally)
        tally.seconds = {
            "fetch_s": fetched - started,
            "score_s": scored - fetched,
            "train_s": clock() - scored,
        }
        if self._ranks.rank == 0:
            tally.fates += left_out_fates(request, plan)
        return self._result(request, tally, lr)

    def _read_own_rows(
        self, request: StepRequest, plan: BatchPlan
    ) -> tuple[Rows, dict[int, int]]:
        own = plan.own_samples(self._ranks.rank)
        needed = sorted({int(plan.group_of[index]) for index in own})
        entries = [request.groups[number] for number in needed]
        batches = self._fetch([entry.ref for entry in entries])
        for entry, batch in zip(entries, batches, strict=True):
            _check_group(entry, batch, request.version)
        sizes = [batch.num_rows for batch in batches]
        first = dict(zip(needed, np.cumsum([0, *sizes]).tolist(), strict=False))
        row_of = {i: first[int(plan.group_of[i])] + int(plan.row_of[i]) for i in own}
        return read_rows(batches), row_of

    def _old_logprobs(self, rows: Rows, version: int, own: np.ndarray | None = None) -> Any:
        raise NotImplementedError
