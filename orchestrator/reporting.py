"""Telling people: one record per step for console, JSON lines and Prometheus, and the summary.

Gathers from the parts what they measured; decides nothing.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from actors.worker import SyncReport
from learner.batch import StepResult
from orchestrator.bottleneck import FlowGauges, Phase
from orchestrator.config import RunConfig
from orchestrator.console import Console
from orchestrator.evaluation import EvaluationResult
from orchestrator.fleet import Fleet
from orchestrator.flow import Flow
from orchestrator.metric_catalogue import SAMPLE_FATES
from orchestrator.metrics import Metrics
from orchestrator.records import JsonLines, StepRecord
from orchestrator.steering import RunStatus
from orchestrator.store import ReadyGroup
from orchestrator.supervised_learner import SupervisedLearner
from orchestrator.verification import Verification

GAUGE_PERIOD_S = 0.1
GAUGE_SAMPLES = 6000
"""Of one step: the last ten minutes of a long one."""
SNAPSHOT_PERIOD_S = 1.0
RECENT_STEPS = 5
STALENESS_PREFIX = "staleness_tokens/"


class Reporter:
    """Receives events of one run and passes them on in three forms."""

    def __init__(
        self, config: RunConfig, console: Console, metrics: Metrics, lines: JsonLines
    ) -> None:
        self._config = config
        self._console = console
        self._metrics = metrics
        self._lines = lines
        self._samples: deque[FlowGauges] = deque(maxlen=GAUGE_SAMPLES)
        self._paused_s = 0.0
        self._staleness: Counter[int] = Counter()
        self._trained_samples = 0
        self._skipped = 0
        self.recent: deque[StepRecord] = deque(maxlen=RECENT_STEPS)
        """The last steps, the newest last."""
        self.held_out_accuracy: float | None = None
        """Of the last evaluation."""

    @property
    def last_step(self) -> StepRecord | None:
        """The newest step; None before the first one."""
        return self.recent[-1] if self.recent else None

    def observe(
        self,
        flow: Flow,
        rollout: Fleet,
        verifiers: Fleet,
        learner: SupervisedLearner,
        verification: Verification,
        status: Callable[[], RunStatus],
    ) -> None:
        """Name the parts whose gauges the loops sample."""
        self._status = status
        self._flow = flow
        self._rollout = rollout
        self._verifiers = verifiers
        self._learner = learner
        self._verification = verification

    async def run(self) -> None:
        """Loop: sample the gauges several times a step. Ended by cancellation only."""
        while True:
            gauges = self._gauges_now()
            self._samples.append(gauges)
            self._metrics.observe_flow(gauges)
            await asyncio.sleep(GAUGE_PERIOD_S)

    async def run_metrics(self) -> None:
        """Loop: take a snapshot for Prometheus once a second. Ended by cancellation only."""
        changes = -1
        while True:
            self._metrics.observe_status(self._status())
            for fleet in (self._rollout, self._verifiers, self._learner):
                self._metrics.observe_restarts(fleet.role, fleet.restarts)
            if changes != self._flow.changed.count:
                changes = self._flow.changed.count
                self._metrics.observe_progress()
            await asyncio.sleep(SNAPSHOT_PERIOD_S)

    def _gauges_now(self) -> FlowGauges:
        stats = self._flow.queue_stats()
        workers = self._rollout.ready()
        generating = sum(worker.in_flight for worker in workers)
        slots = sum(worker.info.max_groups_in_flight for worker in workers)
        blocked = generating < slots and self._flow.admission_blocked(self._flow.version)
        return FlowGauges(
            queue_groups=stats.ready_groups,
            queue_capacity_groups=self._flow.limits.max_groups,
            queue_bytes=stats.admitted_bytes,
            queue_capacity_bytes=self._config.queue.max_bytes,
            generating_groups=generating,
            generation_slots=slots,
            verifying_groups=self._verification.backlog,
            admission_blocked_share=float(blocked),
        )

    def _gauges_of_step(self, seconds: float) -> FlowGauges:
        samples = list(self._samples) or [self._gauges_now()]
        self._samples.clear()
        paused, self._paused_s = self._paused_s, 0.0
        workers = max(1, len(self._rollout.ready()))

        def mean(name: str) -> float:
            return sum(getattr(sample, name) for sample in samples) / len(samples)

        return FlowGauges(
            queue_groups=mean("queue_groups"),
            queue_capacity_groups=samples[-1].queue_capacity_groups,
            queue_bytes=mean("queue_bytes"),
            queue_capacity_bytes=samples[-1].queue_capacity_bytes,
            generating_groups=mean("generating_groups"),
            generation_slots=mean("generation_slots"),
            verifying_groups=mean("verifying_groups"),
            admission_blocked_share=mean("admission_blocked_share"),
            sync_paused_share=min(1.0, paused / workers / seconds) if seconds > 0 else 0.0,
        )

    def note(self, text: str) -> None:
        """One line about what happens outside of the steps."""
        self._console.note(text)

    def resumed(self, flow: Flow, *, ready_groups: int) -> None:
        """The run goes on where its ledger ends."""
        self.note(
            f"resumed at step {flow.step}: {ready_groups} ready groups are back from the "
            f"trajectory log, {flow.waiting} are generated once more"
        )
        self._lines.write({"kind": "resume", "step": flow.step, "lineage": flow.lineage})

    def recovered(self, flow: Flow) -> None:
        """Another learner has taken over from one that died."""
        self.note(f"the learner is back at step {flow.step}, as lineage {flow.lineage}")
        self._lines.write({"kind": "recovery", "step": flow.step, "lineage": flow.lineage})

    def attempted(self, outcome: str, tokens: int) -> None:
        """An attempt at a group ended: completed with so many response tokens, failed or lost."""
        self._metrics.observe_attempt(outcome, tokens)

    def scored(self, verifier: str, verdicts: pa.RecordBatch) -> None:
        """The samples of a group got their verdicts."""
        statuses = Counter(verdicts.column("status").to_pylist())
        seconds = verdicts.column("verify_s").to_pylist()
        self._metrics.observe_verdicts(verifier, statuses, seconds)

    def published(self, seconds: float, nbytes: int) -> None:
        """The learner published its weights."""
        self._metrics.observe_publish(seconds, nbytes)

    def synced(self, report: SyncReport) -> None:
        """A worker loaded weights."""
        self._paused_s += report.pause_s + report.load_s
        self._metrics.observe_sync(report)

    def sync_failed(self) -> None:
        """A worker could not load weights."""
        self._metrics.observe_failed_sync()

    def checkpointed(self, step: int, seconds: float) -> None:
        """A checkpoint was saved."""
        self._metrics.observe_checkpoint(step, seconds)

    def checkpoint_failed(self) -> None:
        """A checkpoint could not be saved."""
        self._metrics.observe_failed_checkpoint()

    def evaluation(self, when: str, flow: Flow, result: EvaluationResult) -> None:
        """One evaluation ended."""
        self.held_out_accuracy = result.accuracy
        self._console.evaluation(when, result.accuracy, result.samples)
        self._metrics.observe_held_out(result.accuracy)
        self._lines.write(
            {
                "kind": "evaluation",
                "when": when,
                "step": flow.step,
                "version": flow.version,
                "accuracy": result.accuracy,
                "samples": result.samples,
                "unscored": result.unscored,
                "failed_tasks": result.failed_tasks,
            }
        )

    def step(
        self,
        flow: Flow,
        groups: Sequence[ReadyGroup],
        result: StepResult,
        phase_seconds: Mapping[Phase, float],
    ) -> None:
        """One batch step ended."""
        record = self._record(flow, groups, result, phase_seconds)
        self.recent.append(record)
        self._staleness.update(record.staleness_tokens)
        self._skipped += bool(result.skipped)
        self._trained_samples += sum(fate.trained_tokens > 0 for fate in result.fates)
        report = flow.ledger.report()
        samples = report.samples.as_dict()
        self._metrics.observe_fates(
            samples={fate: samples[fate] for fate in SAMPLE_FATES},
            groups={
                "admitted": report.admitted_tasks,
                "consumed": report.consumed_tasks,
                "dropped": report.dropped_tasks,
                "failed": report.failed_tasks,
            },
            dropped_samples=report.samples.dropped_by_reason,
        )
        self._metrics.observe_step(record)
        self._lines.write(record.as_json())
        self._console.step(record)

    def _record(
        self,
        flow: Flow,
        groups: Sequence[ReadyGroup],
        result: StepResult,
        phase_seconds: Mapping[Phase, float],
    ) -> StepRecord:
        rewards, outcomes = _scored(groups)
        masked: Counter[str] = Counter()
        for fate in result.fates:
            masked.update(fate.masked)
        return StepRecord(
            step=flow.step,
            steps=self._config.steps,
            version=flow.version,
            phase_seconds=phase_seconds,
            gauges=self._gauges_of_step(sum(phase_seconds.values())),
            skipped=result.skipped,
            reward=_mean(rewards),
            accuracy=_mean(outcomes),
            staleness_tokens=_staleness(result.metrics),
            masked_tokens=dict(masked),
            samples=sum(len(group.entry.sample_ids) for group in groups),
            unscored=sum(group.entry.ok.count(False) for group in groups),
            response_tokens=sum(group.total_tokens for group in groups),
            learner=result.metrics,
        )

    def summary(self, flow: Flow, *, seconds: float, training_seconds: float) -> dict[str, Any]:
        """The figures that this object has gathered; the run adds accuracies and parity."""
        trained = sum(self._staleness.values())
        lag = sum(lag * tokens for lag, tokens in self._staleness.items())
        rate = 1.0 / training_seconds if training_seconds > 0 else 0.0
        report = flow.ledger.report()
        return {
            "seconds": seconds,
            "training_seconds": training_seconds,
            "steps": flow.step,
            "version": flow.version,
            "skipped_steps": self._skipped,
            "samples_per_second": self._trained_samples * rate,
            "tokens_per_second": trained * rate,
            "staleness_mean": lag / trained if trained else None,
            "staleness_max": max(self._staleness, default=None),
            "rollout_restarts": self._rollout.restarts.total(),
            "verifier_restarts": self._verifiers.restarts.total(),
            "learner_restarts": self._learner.restarts.total(),
            "ledger": report.as_dict(),
        }


def _staleness(metrics: Mapping[str, float]) -> dict[int, int]:
    """Trained tokens by lag, from the learner's metrics."""
    return {
        int(name.removeprefix(STALENESS_PREFIX)): int(count)
        for name, count in metrics.items()
        if name.startswith(STALENESS_PREFIX)
    }


def _scored(groups: Sequence[ReadyGroup]) -> tuple[list[float], list[float]]:
    """Rewards and outcomes of the samples with an ok verdict; a missing outcome is the reward."""
    rewards: list[float] = []
    outcomes: list[float] = []
    for group in groups:
        entry = group.entry
        for reward, outcome, ok in zip(entry.rewards, entry.outcomes, entry.ok, strict=True):
            if ok and reward is not None:
                rewards.append(reward)
                outcomes.append(reward if outcome is None else outcome)
    return rewards, outcomes


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


class PhaseTimer:
    """Seconds per phase of one step: `with timer(Phase.PUBLISH): …`."""

    def __init__(self) -> None:
        self.seconds: dict[Phase, float] = {}
        self._phase = Phase.WAIT_FOR_GROUPS
        self._started = 0.0

    def __call__(self, phase: Phase) -> "PhaseTimer":
        """Name the phase that the following `with` block times."""
        self._phase = phase
        return self

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        spent = time.monotonic() - self._started
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + spent

    def move(self, source: Phase, target: Phase, seconds: float) -> None:
        """Count `seconds` of `source` towards `target` instead."""
        self.seconds[source] -= seconds
        self.seconds[target] = self.seconds.get(target, 0.0) + seconds
