"""One batch step on one rank: fetch, score, train, count. Runs in lockstep on all ranks.

Knows no Ray: trajectory batches come through the `fetch` callable it is given. A step either
changes the weights on every rank or on none.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from actors import trajectory
from learner.batch import GroupEntry, SampleFate, StepRequest, StepResult
from learner.batch_scoring import BatchScorer, Scored, as_tensor
from learner.collective import Collective
from learner.config import LearnerConfig
from learner.critic import Critic
from learner.model import Policy
from learner.objective import Normalizer, TokenBatch, TokenFate, evaluate, fate_counts
from learner.objective_config import ObjectiveConfig
from learner.objective_metrics import Metrics
from learner.optimizer import Optimizer
from learner.outcomes import outcome_summary
from learner.plan import BatchPlan, left_out_fates, plan_batch
from learner.rows import PackedRow, Rows, dummy_row, pack, read_rows, response_index
from learner.versions import VersionStore

Fetch = Callable[[Sequence[Any]], Sequence[pa.RecordBatch]]
"""References of a request to their record batches, in order."""

_REASONS = {fate: fate.name.lower() for fate in TokenFate} | {TokenFate.OUTSIDE: "tool"}


@dataclass(frozen=True, eq=False)
class _Work:
    """This rank's part of a batch. `row_of` maps a sample's number in the batch to its row."""

    plan: BatchPlan
    rows: Rows
    row_of: dict[int, int]
    scored: Scored
    counts: list[Normalizer]


@dataclass(eq=False)
class _Tally:
    """What this rank counts during a batch step."""

    metrics: Metrics
    lags: Tensor
    fates: list[SampleFate] = field(default_factory=list)
    input_tokens: int = 0
    attention_slots: int = 0
    norms: list[float] = field(default_factory=list)
    value_losses: list[float] = field(default_factory=list)
    value_norms: list[float] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


@dataclass(eq=False)
class _Part:
    """What this rank accumulates over the micro-batches of one optimizer step."""

    metrics: Metrics
    lags: Tensor
    loss: Tensor
    value_loss: Tensor
    fates: list[tuple[np.ndarray, Tensor]] = field(default_factory=list)


class Trainer:
    """Trains a policy on batches of groups; `objective` has the run's bounds filled in."""

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        store: VersionStore,
        scorer: BatchScorer,
        critic: Critic | None,
        ranks: Collective,
        *,
        config: LearnerConfig,
        objective: ObjectiveConfig,
        fetch: Fetch,
    ) -> None:
        if objective.max_staleness is None:
            raise ValueError("the objective has no max_staleness: fill it in with for_run")
        self._policy = policy
        self._optimizer = optimizer
        self._store = store
        self._scorer = scorer
        self._critic = critic
        self._ranks = ranks
        self._config = config
        self._objective = objective
        self._fetch = fetch

    def step(self, request: StepRequest) -> StepResult:
        """Train on the batch of `request`.

        Raises TrajectoryError or ValueError when rows break the contract or contradict the
        request, RuntimeError on the ranks that can read theirs: nothing has changed then.
        """
        clock = time.perf_counter
        started = clock()
        self._bound_staleness(request.max_staleness)
        plan = plan_batch(
            request,
            self._objective,
            ranks=self._ranks.world,
            token_budget=self._config.token_budget,
            optimizer_steps=self._config.optimizer_steps_per_batch,
        )
        rows, row_of, counts = self._gather_work(request, plan)
        fetched = clock()
        known = self._scorer.score(request, plan, rows, row_of, self._objective)
        scored = clock()
        work = _Work(plan, rows, row_of, known, counts)
        lr = self._optimizer.begin_batch(request.total_steps)
        if self._critic is not None:
            self._critic.optimizer.begin_batch(request.total_steps)
        tally = _Tally(*self._zero_counts())
        for number in range(len(plan.optimizer_steps)):
            self._optimizer_step(work, number, request.version, tally)
        if self._ranks.rank == 0:
            tally.fates += left_out_fates(request, plan)
        seconds = {
            "fetch_s": fetched - started,
            "score_s": scored - fetched,
            "train_s": clock() - scored,
        }
        result = self._result(request.version, tally, seconds, lr)
        return replace(result, metrics=result.metrics | outcome_summary(request.groups))

    @property
    def _max_staleness(self) -> int:
        return self._objective.max_staleness or 0

    def _bound_staleness(self, max_staleness: int) -> None:
        """Versions are kept for as long as their tokens may train. After the bound was raised,
        those that were given up under the old one stay unknown: their tokens are stale."""
        if max_staleness != self._objective.max_staleness:
            self._objective = self._objective.model_copy(update={"max_staleness": max_staleness})
            self._store.resize(max_staleness)

    def _gather_work(
        self, request: StepRequest, plan: BatchPlan
    ) -> tuple[Rows, dict[int, int], list[Normalizer]]:
        """This rank's rows, and the counts of the whole batch per optimizer step."""
        error: Exception | None = None
        shares = torch.zeros(1 + 2 * len(plan.optimizer_steps), dtype=torch.float64)
        try:
            rows, row_of = self._read_own_rows(request, plan)
        except Exception as caught:
            error, shares[0] = caught, 1.0
        else:
            shares[1:] = torch.from_numpy(self._own_counts(plan, rows, row_of))
        failed, *counts = self._ranks.sum(shares.to(self._ranks.device)).tolist()
        if error is not None:
            raise error
        if failed:
            raise RuntimeError("another learner rank could not read its rows")
        pairs = zip(counts[::2], counts[1::2], strict=True)
        return rows, row_of, [Normalizer(tokens, samples) for tokens, samples in pairs]

    def _read_own_rows(self, request: StepRequest, plan: BatchPlan) -> tuple[Rows, dict[int, int]]:
        own = plan.own_samples(self._ranks.rank)
        needed = sorted({int(plan.group_of[index]) for index in own})
        entries = [request.groups[number] for number in needed]
        batches = self._fetch([entry.ref for entry in entries])
        for entry, batch in zip(entries, batches, strict=True):
            _check_group(entry, batch)
        sizes = [batch.num_rows for batch in batches]
        first = dict(zip(needed, np.cumsum([0, *sizes]).tolist(), strict=False))
        rows = read_rows(batches)
        if rows.versions.size and rows.versions.max() > request.version:
            raise ValueError(
                f"a token was sampled by version {rows.versions.max()}, "
                f"but the learner is at version {request.version}"
            )
        return rows, {i: first[int(plan.group_of[i])] + int(plan.row_of[i]) for i in own}

    def _own_counts(self, plan: BatchPlan, rows: Rows, row_of: dict[int, int]) -> np.ndarray:
        """(tokens, samples) in the data mask of each optimizer step, flattened."""
        before = np.concatenate([np.zeros(1), np.cumsum(rows.mask)])
        per_row = before[rows.response_starts[1:]] - before[rows.response_starts[:-1]]
        counts = []
        for micro_batches in plan.optimizer_steps:
            own = [row_of[i] for batch in micro_batches[self._ranks.rank] for i in batch]
            counts += [per_row[own].sum(), (per_row[own] > 0).sum()]
        return np.array(counts, np.float64)

    def _optimizer_step(self, work: _Work, number: int, version: int, tally: _Tally) -> None:
        nothing = torch.zeros((), device=self._ranks.device)
        part = _Part(*self._zero_counts(), nothing, nothing.clone())
        for samples in work.plan.optimizer_steps[number][self._ranks.rank]:
            rows = np.array([work.row_of[index] for index in samples], np.int64)
            self._micro_batch(work, np.array(samples, np.int64), rows, number, part, tally)
        trained = part.metrics.total("trained_tokens")
        norm, tokens, finite = self._optimizer.total_norm(part.loss, trained)
        value_norm = 0.0
        if self._critic is not None:
            value_norm, _, sound = self._critic.optimizer.total_norm(part.value_loss, trained)
            finite = finite and sound
        reason = "non-finite" if not finite else "" if tokens and norm else "empty"
        if reason:
            self._optimizer.discard()
            if self._critic is not None:
                self._critic.optimizer.discard()
            tally.skipped.append(reason)
        else:
            self._store.keep(version)
            self._optimizer.apply(norm)
            tally.norms.append(norm)
            if self._critic is not None:
                self._critic.optimizer.apply(value_norm)
                tally.value_losses.append(self._ranks.sum(part.value_loss).item())
                tally.value_norms.append(value_norm)
            tally.lags += part.lags
        if finite:
            tally.metrics += part.metrics
        for rows, counts in part.fates:
            names = [work.rows.sample_ids[row] for row in rows]
            tally.fates += _fates(names, counts.tolist(), skipped=bool(reason))

    def _micro_batch(
        self,
        work: _Work,
        samples: np.ndarray,
        members: np.ndarray,
        number: int,
        part: _Part,
        tally: _Tally,
    ) -> None:
        """Forward and backward of some samples (none: only the collectives of both)."""
        device = self._ranks.device
        chunk = self._config.logprob_chunk_tokens
        if not len(samples):
            logprobs, _ = self._policy.logprobs(dummy_row(device), chunk)
            logprobs.sum().backward()
            if self._critic is not None:
                self._critic.take_part()
            return
        row = pack(work.rows, members, device)
        index = response_index(work.rows, members)
        logprobs, entropy = self._policy.logprobs(row, chunk)
        batch = self._token_batch(work, index, row, logprobs, entropy)
        output = evaluate(self._objective, logprobs, batch, work.counts[number])
        # FSDP averages gradients over ranks; the loss is a share of one sum.
        (output.loss * self._ranks.world).backward()
        part.loss += output.loss.detach()
        part.metrics += output.metrics
        trained = output.fates == int(TokenFate.TRAINED)
        lags = as_tensor(work.scored.lags, index, device)[trained]
        part.lags += torch.bincount(lags, minlength=len(part.lags))
        part.fates.append((members, fate_counts(output.fates, row.sample_index, row.num_samples)))
        tally.input_tokens += len(row.input_ids)
        tally.attention_slots += row.packing.slot_count
        if self._critic is not None:
            part.value_loss += self._critic.learn(
                row, index, work.scored.credit, batch.mask, self._objective, work.counts[number]
            )

    def _token_batch(
        self, work: _Work, index: np.ndarray, row: PackedRow, logprobs: Tensor, entropy: Tensor
    ) -> TokenBatch:
        """What the objective is told about the tokens of one packed row."""
        scored, rows, device = work.scored, work.rows, self._ranks.device
        old = reference = None
        if scored.old is not None:
            known = as_tensor(scored.old, index, device)
            old = torch.where(torch.isnan(known), logprobs.detach(), known)
        if scored.reference is not None:
            reference = as_tensor(scored.reference, index, device)
        return TokenBatch(
            sample_index=row.sample_index,
            mask=as_tensor(rows.mask, index, device),
            behavior_logprobs=as_tensor(rows.behavior, index, device),
            old_logprobs=old,
            reference_logprobs=reference,
            advantages=as_tensor(scored.credit.advantages, index, device),
            num_samples=row.num_samples,
            entropy=entropy if self._objective.entropy_bonus else entropy.detach(),
            version_lag=as_tensor(scored.lags, index, device),
            crossed=as_tensor(rows.crossed, index, device),
            position=as_tensor(rows.positions, index, device),
        )

    def _zero_counts(self) -> tuple[Metrics, Tensor]:
        device = self._ranks.device
        lags = torch.zeros(self._max_staleness + 1, dtype=torch.int64, device=device)
        return Metrics.zeros(device), lags

    def _result(
        self, version: int, tally: _Tally, seconds: dict[str, float], lr: float
    ) -> StepResult:
        metrics = self._merged_metrics(tally, seconds)
        applied = len(tally.norms)
        metrics |= {
            "lr": lr,
            "optimizer_steps": float(applied),
            "skipped_optimizer_steps": float(len(tally.skipped)),
        }
        if applied:
            metrics["grad_norm"] = sum(tally.norms) / applied
            metrics["loss"] /= applied
        if tally.value_norms:
            metrics["value_loss"] = sum(tally.value_losses) / applied
            metrics["value_grad_norm"] = sum(tally.value_norms) / applied
        reason = "" if applied else max(tally.skipped)
        return StepResult(
            bool(applied), version + bool(applied), reason, metrics, tuple(tally.fates)
        )

    def _merged_metrics(self, tally: _Tally, seconds: dict[str, float]) -> dict[str, float]:
        """Totals over ranks: one all-reduce of sums, one of maxima."""
        device = self._ranks.device
        work = [float(tally.input_tokens), float(tally.attention_slots)]
        own = torch.tensor(work, dtype=torch.float64, device=device)
        times = torch.tensor(list(seconds.values()), dtype=torch.float64, device=device)
        local = tally.metrics
        sums = self._ranks.sum(torch.cat([local.sums, tally.lags.double(), own]))
        maxima = self._ranks.max(torch.cat([local.maxima, times]))
        metrics = Metrics(sums[: len(local.sums)], maxima[: len(local.maxima)]).finalise()
        *lags, input_tokens, slots = sums[len(local.sums) :].tolist()
        metrics |= {f"staleness_tokens/{lag}": count for lag, count in enumerate(lags)}
        metrics |= {"input_tokens": input_tokens, "attention_slots": slots}
        slowest = maxima[len(local.maxima) :].tolist()
        return metrics | dict(zip(seconds, slowest, strict=True))


def _check_group(entry: GroupEntry, batch: pa.RecordBatch) -> None:
    """Raises TrajectoryError where the rows break the contract or contradict the request."""
    trajectory.validate(batch, verdicts=True)
    if tuple(batch.column("sample_id").to_pylist()) != entry.sample_ids:
        rule = f"the rows of group {entry.group_id} are not the samples that the request names"
        raise trajectory.TrajectoryError("(batch)", "sample_id", rule)
    for column, expected in (
        ("prompt_ids", (entry.prompt_tokens,) * batch.num_rows),
        ("response_ids", entry.response_tokens),
    ):
        lengths = tuple(np.diff(trajectory.tokens(batch, column)[1]).tolist())
        if lengths != expected:
            row = next(
                i
                for i, pair in enumerate(zip(lengths, expected, strict=True))
                if len(set(pair)) > 1
            )
            rule = f"{lengths[row]} tokens, but the request says {expected[row]}"
            raise trajectory.TrajectoryError(entry.sample_ids[row], column, rule)


def _fates(names: list[str], counts: list[list[int]], *, skipped: bool) -> list[SampleFate]:
    fates = []
    for name, row in zip(names, counts, strict=True):
        masked = {_REASONS[TokenFate(fate)]: n for fate, n in enumerate(row) if n}
        trained = masked.pop("trained", 0)
        if skipped and trained:
            masked["skipped"], trained = trained, 0
        fates.append(SampleFate(name, trained, masked))
    return fates
