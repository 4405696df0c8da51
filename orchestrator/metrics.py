"""The run's Prometheus registry and endpoint.

Builds what the catalogue lists and takes over what the reporter tells; knows nothing of the loops
behind it.
"""

import time
from collections.abc import Iterable, Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    start_http_server,
)

from orchestrator.bottleneck import FlowGauges, Phase, Stage
from orchestrator.errors import RunError
from orchestrator.metric_catalogue import (
    CATALOGUE,
    DROP_REASONS,
    LAGS,
    LEARNING,
    MASK_REASONS,
    OTHER,
    PREFIX,
    SECONDS,
    SYNC_STAGES,
    Metric,
)
from orchestrator.records import StepRecord
from orchestrator.steering import FleetStatus, RunState, RunStatus
from orchestrator.workers import WorkerState

if TYPE_CHECKING:
    from actors.worker import SyncReport

MAX_VERIFIERS = 20


class Metrics:
    """The run's own Prometheus registry; `serve` makes it an endpoint."""

    def __init__(
        self, *, run: str, model: str, objective: str, verifiers: Iterable[str] = ()
    ) -> None:
        """`verifiers` are the names that the tasks use; beyond the first few they share a label."""
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self._verifiers = (*sorted(set(verifiers))[:MAX_VERIFIERS], OTHER)
        self._families: dict[str, Any] = {metric.name: self._build(metric) for metric in CATALOGUE}
        self._totals: dict[tuple[str, tuple[str, ...]], float] = {}
        self._server: tuple | None = None
        self._of("run_info", run, model, objective).set(1)
        self._of("start_time_seconds").set(time.time())
        self._of("checkpoint_step").set(-1)
        self._of("ledger_balanced").set(1)

    def _build(self, metric: Metric) -> Gauge | Counter | Histogram:
        names = tuple(name for name, _ in metric.labels)
        title = PREFIX + metric.name
        if metric.kind == "histogram":
            family: Any = Histogram(
                title, metric.help, names, registry=self.registry, buckets=SECONDS
            )
        else:
            kind = Gauge if metric.kind == "gauge" else Counter
            family = kind(title, metric.help, names, registry=self.registry)
        values = [
            self._verifiers if name == "verifier" else tuple(known) for name, known in metric.labels
        ]
        for combination in product(*values):
            if combination:
                family.labels(*combination)
        return family

    def _of(self, name: str, *labels: str) -> Any:
        family = self._families[name]
        return family.labels(*labels) if labels else family

    def serve(self, host: str, port: int) -> str:
        """Serve the registry; returns host:port, which names the port taken. Raises RunError."""
        try:
            self._server = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise RunError(
                f"the metrics endpoint cannot bind {host}:{port}: {error.strerror}. "
                "Choose another metrics.port (0 takes a free one) or metrics.enabled = false."
            ) from error
        shown = f"[{host}]" if ":" in host else host
        return f"{shown}:{self._server[0].server_port}"

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
            self._server = None

    def observe_step(self, record: StepRecord) -> None:
        """Take over one step."""
        self._of("planned_steps").set(record.steps)
        self._of("step").set(record.step)
        self._of("policy_version").set(record.version)
        self._of("batches", record.skipped or "trained").inc()
        self._of("step_seconds").observe(record.seconds)
        for phase, seconds in record.phase_seconds.items():
            self._of("phase_seconds", phase).inc(seconds)
        for stage in Stage:
            self._of("bottleneck", stage).set(stage is record.bottleneck.stage)
        if record.seconds > 0:
            waited = record.phase_seconds.get(Phase.WAIT_FOR_GROUPS, 0.0)
            self._of("learner_idle_ratio").set(waited / record.seconds)
        if slots := record.gauges.generation_slots:
            busy = min(1.0, record.gauges.generating_groups / slots)
            self._of("engine_idle_ratio").set(1.0 - busy)
        self._of("admission_blocked_ratio").set(record.gauges.admission_blocked_share)
        self._observe_learning(record)
        for lag, tokens in record.staleness_tokens.items():
            self._of("trained_tokens", LAGS[min(lag, len(LAGS) - 1)]).inc(tokens)
        for reason, tokens in record.masked_tokens.items():
            self._of("masked_tokens", _known(reason, MASK_REASONS)).inc(tokens)

    def _observe_learning(self, record: StepRecord) -> None:
        for name, value in (
            ("reward_mean", record.reward),
            ("accuracy_ratio", record.accuracy),
            ("response_length_tokens", record.response_tokens_mean),
        ):
            if value is not None:
                self._of(name).set(value)
        for metric in LEARNING:
            if metric.source in record.learner:
                self._of(metric.name).set(record.learner[metric.source])
        computed = record.learner.get("attention_slots", 0.0)
        fed = min(computed, record.learner.get("input_tokens", 0.0))
        self._of("learner_tokens", "trained_on").inc(fed)
        self._of("learner_tokens", "padding").inc(computed - fed)

    def observe_flow(self, gauges: FlowGauges) -> None:
        """Take over where groups are now; may be called between steps."""
        self._of("queue_groups").set(gauges.queue_groups)
        self._of("queue_capacity_groups").set(gauges.queue_capacity_groups)
        self._of("queue_bytes").set(gauges.queue_bytes)
        self._of("queue_capacity_bytes").set(gauges.queue_capacity_bytes)
        self._of("generating_groups").set(gauges.generating_groups)
        self._of("generation_slots").set(gauges.generation_slots)
        self._of("verifying_groups").set(gauges.verifying_groups)

    def observe_status(self, status: RunStatus) -> None:
        """Take over what a snapshot tells beyond the flow."""
        for state in RunState:
            self._of("run_state", state).set(status.state is state)
        for activity in ("generation", "training"):
            self._of("paused", activity).set(activity in status.paused)
        self._of("planned_steps").set(status.steps)
        self._of("max_staleness").set(status.limits.max_staleness)
        self._of("queue_oldest_seconds").set(status.queue.oldest_age_s)
        self._of("under_way_groups").set(status.queue.under_way_groups)
        self._of("ledger_balanced").set(status.balanced)
        for fleet in status.fleets:
            self._observe_fleet(fleet)

    def _observe_fleet(self, fleet: FleetStatus) -> None:
        self._of("workers_target", fleet.role).set(fleet.target)
        for state in WorkerState:
            self._of("workers", fleet.role, state).set(fleet.count(state))

    def observe_progress(self) -> None:
        """Something moved."""
        self._of("last_progress_time_seconds").set(time.time())

    def observe_attempt(self, outcome: str, tokens: int = 0) -> None:
        """One attempt at a group ended, with so many response tokens."""
        self._of("rollouts", outcome).inc()
        self._of("generated_tokens").inc(tokens)

    def observe_verdicts(
        self, verifier: str, statuses: Mapping[str, int], seconds: Iterable[float]
    ) -> None:
        """Samples were scored: how many with each status, and the seconds of each verdict."""
        label = _known(verifier, self._verifiers)
        for status, samples in statuses.items():
            self._of("verdicts", label, status).inc(samples)
        for spent in seconds:
            self._of("verdict_seconds", label).observe(spent)

    def observe_fates(
        self,
        *,
        samples: Mapping[str, int],
        groups: Mapping[str, int],
        dropped_samples: Mapping[str, int] | None = None,
    ) -> None:
        """The ledger's running totals: by fate, and of dropped samples by reason.

        A total that falls back, as after a resume, is counted on from there.
        """
        for fate, total in samples.items():
            self._raise_to("samples", total, fate)
        for fate, total in groups.items():
            self._raise_to("groups", total, fate)
        dropped: dict[str, int] = {}
        for reason, total in (dropped_samples or {}).items():
            known = _known(reason, DROP_REASONS)
            dropped[known] = dropped.get(known, 0) + total
        for reason, total in dropped.items():
            self._raise_to("dropped_samples", total, reason)

    def observe_restarts(self, role: str, by_reason: Mapping[Any, int]) -> None:
        """Workers lost so far, by reason."""
        for reason, total in by_reason.items():
            self._raise_to("worker_restarts", total, role, reason)

    def _raise_to(self, name: str, total: float, *labels: str) -> None:
        before = self._totals.get((name, labels), 0.0)
        self._of(name, *labels).inc(max(0.0, total - before))
        self._totals[name, labels] = total

    def observe_publish(self, seconds: float, nbytes: int) -> None:
        """The learner published its weights."""
        self._of("sync_seconds", "publish").observe(seconds)
        self._of("published_bytes").inc(nbytes)

    def observe_sync(self, report: "SyncReport") -> None:
        """A rollout worker loaded weights, and what its probe said."""
        seconds = (
            report.stage_s,
            report.pause_s,
            report.load_s,
            report.probe_s,
            report.next_token_s,
        )
        for stage, spent in zip(SYNC_STAGES[1:], seconds, strict=True):
            if spent is not None:
                self._of("sync_seconds", stage).observe(spent)
        passed = report.parity is None or report.parity.passed
        self._of("syncs", "ok" if passed else "quarantined").inc()
        if report.parity is not None:
            self._of("parity_max_abs").set(report.parity.max_abs)

    def observe_failed_sync(self) -> None:
        """A rollout worker did not load weights."""
        self._of("syncs", "failed").inc()

    def observe_checkpoint(self, step: int, seconds: float) -> None:
        """A checkpoint was saved."""
        self._of("checkpoints", "saved").inc()
        self._of("checkpoint_seconds").observe(seconds)
        self._of("checkpoint_step").set(step)
        self._of("last_checkpoint_time_seconds").set(time.time())

    def observe_failed_checkpoint(self) -> None:
        """A checkpoint could not be saved."""
        self._of("checkpoints", "failed").inc()

    def observe_held_out(self, accuracy: float) -> None:
        """Result of one evaluation, a fraction."""
        self._of("held_out_accuracy_ratio").set(accuracy)


def _known(value: str, values: Iterable[str]) -> str:
    return value if value in values else OTHER
