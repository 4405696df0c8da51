"""The run's Prometheus registry and endpoint.

Knows names, units and labels, and nothing of the loops that report to it. Every label takes its
values from a list fixed here, so that a series exists at zero before anything happens.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

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
from orchestrator.records import StepRecord

if TYPE_CHECKING:
    from actors.worker import SyncReport

ROLES: Final = ("rollout", "verifier", "learner")
WORKER_STATES: Final = ("starting", "ready", "quarantined", "dead")
SAMPLE_FATES: Final = ("generated", "trained", "masked", "dropped", "superseded")
GROUP_FATES: Final = ("admitted", "consumed", "dropped", "failed")
MASK_REASONS: Final = (
    "unscored",
    "lone",
    "truncated",
    "tool",
    "stale",
    "veto",
    "keep_low",
    "keep_high",
    "skipped",
)
DROP_REASONS: Final = (
    "stale",
    "unscored",
    "zero_variance",
    "skipped_batch",
    "generation_failed",
    "worker_lost",
    "verifier_lost",
    "trajectories_lost",
    "scoring_failed",
)
VERDICTS: Final = ("ok", "unscorable", "error", "timeout")
SYNC_STAGES: Final = ("publish", "stage", "pause", "load", "probe")
SYNC_OUTCOMES: Final = ("ok", "quarantined")
BATCH_OUTCOMES: Final = ("trained", "non-finite", "empty")
LEARNER_GAUGES: Final = {
    "loss": ("loss", "Objective of the last batch, negated."),
    "entropy": ("entropy_nats", "Mean token entropy of the last batch."),
    "grad_norm": ("gradient_norm", "Gradient norm before clipping."),
    "lr": ("learning_rate", "Learning rate of the last step."),
    "movement_abs_mean": ("movement_mean_abs", "Mean |current - old| log-probability."),
    "mismatch_abs_mean": ("engine_mismatch_mean_abs", "Mean |old - behavior| log-probability."),
    "mismatch_abs_max": ("engine_mismatch_max_abs", "Largest |old - behavior| log-probability."),
    "mismatch_ess": ("effective_sample_size_ratio", "Of the engine-mismatch weights, unclamped."),
    "clip_low_share": ("clip_low_ratio", "Share of trained tokens clipped below."),
    "clip_high_share": ("clip_high_ratio", "Share of trained tokens clipped above."),
    "cap_share": ("correction_cap_ratio", "Share of trained tokens whose weight was capped."),
    "stale_share": ("stale_ratio", "Share of the last batch's tokens masked as too old."),
}
"""The learner's own name of a measurement → name and meaning of its gauge."""
SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    """The run's own Prometheus registry; `serve` makes it an endpoint."""

    def __init__(self, *, run: str, model: str, objective: str, max_staleness: int) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self._lags = [str(lag) for lag in range(max_staleness + 1)]
        self._totals: dict[object, float] = {}
        self._server: tuple | None = None
        self._run_metrics(run, model, objective)
        self._flow_metrics()
        self._sync_metrics()

    def _run_metrics(self, run: str, model: str, objective: str) -> None:
        info = self._gauge("run_info", "Always 1.", ("run", "model", "objective"))
        info.labels(run, model, objective).set(1)
        self._planned = self._gauge("planned_steps", "Batch steps that the run will do.")
        self._step = self._gauge("step", "Batch steps done.")
        self._version = self._gauge("policy_version", "Batches that changed the weights.")
        self._batches = self._counter("batches", "Batch steps.", ("outcome",), BATCH_OUTCOMES)
        self._step_seconds = self._histogram("step_seconds", "Wall-clock time of a batch step.")
        self._phase = self._counter(
            "phase_seconds", "Time of the training loop.", ("phase",), list(Phase)
        )
        self._bottleneck = self._gauge(
            "bottleneck", "1 for the stage that held the last step up.", ("stage",), list(Stage)
        )
        self._reward = self._gauge("reward_mean", "Mean reward of the last batch.")
        self._accuracy = self._gauge("accuracy_ratio", "Mean outcome of the last batch.")
        self._held_out = self._gauge("held_out_accuracy_ratio", "pass@1 of the last evaluation.")
        self._length = self._gauge("response_length_tokens", "Mean length in the last batch.")
        self._learner = {
            own_name: self._gauge(name, text) for own_name, (name, text) in LEARNER_GAUGES.items()
        }

    def _flow_metrics(self) -> None:
        self._generated_tokens = self._counter(
            "generated_tokens", "Response tokens that came back from rollout workers."
        )
        self._trained_tokens = self._counter(
            "trained_tokens", "Tokens trained, by versions behind.", ("staleness",), self._lags
        )
        self._masked_tokens = self._counter(
            "masked_tokens", "Consumed, but kept out of the loss.", ("reason",), MASK_REASONS
        )
        self._samples = self._counter("samples", "Samples by fate.", ("fate",), SAMPLE_FATES)
        self._groups = self._counter("groups", "Groups by fate.", ("fate",), GROUP_FATES)
        self._dropped = self._counter(
            "dropped_samples", "Left without being consumed.", ("reason",), DROP_REASONS
        )
        self._verdicts = self._counter("verdicts", "Samples scored.", ("status",), VERDICTS)
        self._queue = self._gauge("queue_groups", "Ready groups that wait for the learner.")
        self._queue_limit = self._gauge("queue_capacity_groups", "Bound of groups on their way.")
        self._bytes = self._gauge("queue_bytes", "Bytes of groups on their way, or reserved.")
        self._bytes_limit = self._gauge("queue_capacity_bytes", "Bound of those bytes.")
        self._generating = self._gauge("generating_groups", "Groups at rollout workers.")
        self._slots = self._gauge("generation_slots", "Groups that rollout workers could hold.")
        self._verifying = self._gauge("verifying_groups", "Groups generated and not yet scored.")
        self._blocked = self._gauge(
            "admission_blocked_ratio",
            "Share of the last step in which the staleness bound let no group start.",
        )
        self._workers = self._gauge(
            "workers", "Workers by state.", ("role", "state"), ROLES, WORKER_STATES
        )
        self._restarts = self._counter("worker_restarts", "Replacements.", ("role",), ROLES)

    def _sync_metrics(self) -> None:
        self._sync_seconds = self._histogram(
            "sync_seconds", "Weight synchronisation by stage.", ("stage",), SYNC_STAGES
        )
        self._syncs = self._counter("syncs", "Weight loads.", ("outcome",), SYNC_OUTCOMES)
        self._published_bytes = self._counter("published_bytes", "Weights published.")
        self._parity = self._gauge(
            "parity_max_abs", "Largest log-probability difference of the last probe."
        )

    def _gauge(self, name: str, text: str, labels: tuple = (), *values: Iterable[str]) -> Gauge:
        gauge = Gauge(f"slipstream_{name}", text, labels, registry=self.registry)
        _present_at_zero(gauge, values)
        return gauge

    def _counter(self, name: str, text: str, labels: tuple = (), *values: Iterable[str]) -> Counter:
        counter = Counter(f"slipstream_{name}", text, labels, registry=self.registry)
        _present_at_zero(counter, values)
        return counter

    def _histogram(
        self, name: str, text: str, labels: tuple = (), *values: Iterable[str]
    ) -> Histogram:
        histogram = Histogram(
            f"slipstream_{name}", text, labels, registry=self.registry, buckets=SECONDS
        )
        _present_at_zero(histogram, values)
        return histogram

    def serve(self, host: str, port: int) -> str:
        """Serve the registry; returns the URL, which names the port taken. Raises RunError."""
        try:
            self._server = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise RunError(
                f"the metrics endpoint cannot bind {host}:{port}: {error.strerror}. "
                "Choose another metrics.port (0 takes a free one) or metrics.enabled = false."
            ) from error
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self._server[0].server_port}/metrics"

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
        self._planned.set(record.steps)
        self._step.set(record.step)
        self._version.set(record.version)
        self._batches.labels(record.skipped or "trained").inc()
        self._step_seconds.observe(record.seconds)
        for phase, seconds in record.phase_seconds.items():
            self._phase.labels(phase).inc(seconds)
        for stage in Stage:
            self._bottleneck.labels(stage).set(stage is record.bottleneck.stage)
        for gauge, value in (
            (self._reward, record.reward),
            (self._accuracy, record.accuracy),
            (self._length, record.response_tokens_mean),
        ):
            if value is not None:
                gauge.set(value)
        for own_name, gauge in self._learner.items():
            if own_name in record.learner:
                gauge.set(record.learner[own_name])
        for lag, tokens in record.staleness_tokens.items():
            if tokens:
                self._trained_tokens.labels(str(lag)).inc(tokens)
        for reason, tokens in record.masked_tokens.items():
            self._masked_tokens.labels(reason).inc(tokens)
        self.observe_flow(record.gauges)

    def observe_flow(self, gauges: FlowGauges) -> None:
        """Take over where groups are now; may be called between steps."""
        self._queue.set(gauges.queue_groups)
        self._queue_limit.set(gauges.queue_capacity_groups)
        self._bytes.set(gauges.queue_bytes)
        self._bytes_limit.set(gauges.queue_capacity_bytes)
        self._generating.set(gauges.generating_groups)
        self._slots.set(gauges.generation_slots)
        self._verifying.set(gauges.verifying_groups)
        self._blocked.set(gauges.admission_blocked_share)

    def observe_generated(self, tokens: int) -> None:
        """`tokens` more response tokens came back from a rollout worker."""
        self._generated_tokens.inc(tokens)

    def observe_verdict(self, status: str, samples: int = 1) -> None:
        """`samples` more samples were scored with `status`."""
        self._verdicts.labels(status).inc(samples)

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
        for counter, totals in (
            (self._samples, samples),
            (self._groups, groups),
            (self._dropped, dropped_samples or {}),
        ):
            for label, total in totals.items():
                self._raise_to(counter, label, total)

    def _raise_to(self, counter: Counter, label: str, total: float) -> None:
        before = self._totals.get((counter, label), 0.0)
        counter.labels(label).inc(max(0.0, total - before))
        self._totals[counter, label] = total

    def observe_workers(self, role: str, states: Mapping[str, int], restarts: int) -> None:
        """A fleet's workers by state, and its replacements so far."""
        for state in WORKER_STATES:
            self._workers.labels(role, state).set(states.get(state, 0))
        self._raise_to(self._restarts, role, restarts)

    def observe_publish(self, seconds: float, nbytes: int) -> None:
        """The learner published its weights."""
        self._sync_seconds.labels("publish").observe(seconds)
        self._published_bytes.inc(nbytes)

    def observe_sync(self, report: "SyncReport") -> None:
        """A rollout worker loaded weights, and what its probe said."""
        seconds = (report.stage_s, report.pause_s, report.load_s, report.probe_s)
        for stage, spent in zip(SYNC_STAGES[1:], seconds, strict=True):
            self._sync_seconds.labels(stage).observe(spent)
        passed = report.parity is None or report.parity.passed
        self._syncs.labels("ok" if passed else "quarantined").inc()
        if report.parity is not None:
            self._parity.set(report.parity.max_abs)

    def observe_held_out(self, accuracy: float) -> None:
        """Result of one evaluation, a fraction."""
        self._held_out.set(accuracy)


def _present_at_zero(
    metric: Gauge | Counter | Histogram, values: tuple[Iterable[str], ...]
) -> None:
    """Create every series that `values`, one list per label, span."""
    combinations: list[tuple[str, ...]] = [()]
    for labels in values:
        combinations = [(*head, label) for head in combinations for label in labels]
    for combination in combinations:
        if combination:
            metric.labels(*combination)
