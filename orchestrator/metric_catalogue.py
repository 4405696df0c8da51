"""Every metric of a run as data: name, kind, labels with all their values, and what it tells.

Dashboards, alert rules and the operations guide are tested against this list. Label values are
known in advance, so that every series is there at zero; what is not in a list counts as `other`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from orchestrator.bottleneck import Phase, Stage
from orchestrator.steering import Activity, Role, RunState
from orchestrator.workers import LossReason, WorkerState

PREFIX: Final = "slipstream_"
OTHER: Final = "other"
LAGS: Final = (*map(str, range(9)), "more")
"""Versions behind, as labels."""
ROLES: Final = tuple(Role)
WORKER_STATES: Final = tuple(WorkerState)
SAMPLE_FATES: Final = ("generated", "trained", "masked", "dropped", "superseded")
GROUP_FATES: Final = ("admitted", "consumed", "dropped", "failed")
ATTEMPTS: Final = ("completed", "failed", "lost")
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
    OTHER,
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
    "drained",
    OTHER,
)
VERDICTS: Final = ("ok", "unscorable", "error", "timeout")
SYNC_STAGES: Final = ("publish", "stage", "pause", "load", "probe", "next_token")
SYNC_OUTCOMES: Final = ("ok", "quarantined", "failed")
BATCH_OUTCOMES: Final = ("trained", "non-finite", "empty")
CHECKPOINT_OUTCOMES: Final = ("saved", "failed")
FED: Final = ("trained_on", "padding")
SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)

Kind = Literal["gauge", "counter", "histogram"]
Label = tuple[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family; the exported name has the prefix, and a counter ends in `_total`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[Label, ...] = ()
    source: str = ""
    """The learner's own name of the measurement, where it is one."""

    @property
    def exported(self) -> str:
        """The name of the family's series, without a histogram's endings."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


def _gauge(name: str, text: str, *labels: Label) -> Metric:
    return Metric(name, "gauge", text, labels)


def _counter(name: str, text: str, *labels: Label) -> Metric:
    return Metric(name, "counter", text, labels)


def _histogram(name: str, text: str, *labels: Label) -> Metric:
    return Metric(name, "histogram", text, labels)


def _learner(source: str, name: str, text: str) -> Metric:
    return Metric(name, "gauge", text, source=source)


RUN: Final = (
    _gauge("run_info", "Always 1.", ("run", ()), ("model", ()), ("objective", ())),
    _gauge("run_state", "1 for what the run is doing.", ("state", tuple(RunState))),
    _gauge("paused", "1 while someone holds it.", ("activity", tuple(Activity))),
    _gauge("start_time_seconds", "Unix time at which the run started."),
    _gauge("last_progress_time_seconds", "Unix time at which anything moved last."),
    _gauge("planned_steps", "Batch steps that the run will do."),
    _gauge("step", "Batch steps done."),
    _gauge("policy_version", "Batches that changed the weights."),
    _counter("batches", "Batch steps.", ("outcome", BATCH_OUTCOMES)),
    _histogram("step_seconds", "Wall-clock time of a batch step."),
    _counter("phase_seconds", "Time of the training loop.", ("phase", tuple(Phase))),
    _gauge("bottleneck", "1 for what held the last step up.", ("stage", tuple(Stage))),
    _gauge("learner_idle_ratio", "Share of the last step in which the learner waited for groups."),
    _gauge("checkpoint_step", "Step of the newest checkpoint; -1 without one."),
    _gauge("last_checkpoint_time_seconds", "Unix time of the newest checkpoint; 0 without one."),
    _counter("checkpoints", "Checkpoints.", ("outcome", CHECKPOINT_OUTCOMES)),
    _histogram("checkpoint_seconds", "Wall-clock time of a checkpoint, export included."),
)
FLOW: Final = (
    _counter("generated_tokens", "Response tokens that came back from rollout workers."),
    _counter("rollouts", "Attempts at a group.", ("outcome", ATTEMPTS)),
    _counter("samples", "Samples by fate.", ("fate", SAMPLE_FATES)),
    _counter("groups", "Groups by fate.", ("fate", GROUP_FATES)),
    _counter("dropped_samples", "Left without being consumed.", ("reason", DROP_REASONS)),
    _gauge("ledger_balanced", "1 while every sample is accounted for exactly once."),
    _counter("trained_tokens", "Tokens trained, by versions behind.", ("staleness", LAGS)),
    _counter("masked_tokens", "Consumed, but kept out of the loss.", ("reason", MASK_REASONS)),
    _counter("learner_tokens", "Token slots the learner computed.", ("kind", FED)),
    _gauge("max_staleness", "Bound on versions behind."),
    _gauge("queue_groups", "Ready groups that wait for the learner."),
    _gauge("queue_oldest_seconds", "Age of the ready group that has waited longest."),
    _gauge("under_way_groups", "Groups admitted and not yet left."),
    _gauge("queue_capacity_groups", "Bound of groups under way."),
    _gauge("queue_bytes", "Bytes of groups under way, or reserved for them."),
    _gauge("queue_capacity_bytes", "Bound of those bytes."),
    _gauge("generating_groups", "Groups at rollout workers."),
    _gauge("generation_slots", "Groups that rollout workers could hold."),
    _gauge("engine_idle_ratio", "Share of free slots at rollout workers, over the last step."),
    _gauge("verifying_groups", "Groups generated and not yet scored."),
    _gauge("admission_blocked_ratio", "Share of the last step without leave to start a group."),
)
FLEET: Final = (
    _gauge("workers", "Workers by state.", ("role", ROLES), ("state", WORKER_STATES)),
    _gauge("workers_target", "Workers that the role is to have.", ("role", ROLES)),
    _counter("worker_restarts", "Losses.", ("role", ROLES), ("reason", tuple(LossReason))),
    _counter("verdicts", "Samples scored.", ("verifier", ()), ("status", VERDICTS)),
    _histogram("verdict_seconds", "Time of one verdict.", ("verifier", ())),
    _histogram("sync_seconds", "Weight synchronisation by stage.", ("stage", SYNC_STAGES)),
    _counter("syncs", "Weight loads.", ("outcome", SYNC_OUTCOMES)),
    _counter("published_bytes", "Weights published."),
    _gauge("parity_max_abs", "Largest log-probability difference of the last probe."),
)
LEARNING: Final = (
    _gauge("reward_mean", "Mean reward of the last batch."),
    _gauge("accuracy_ratio", "Mean outcome of the last batch."),
    _gauge("held_out_accuracy_ratio", "pass@1 of the last evaluation."),
    _gauge("response_length_tokens", "Mean length in the last batch."),
    _learner("loss", "loss", "Objective of the last batch, negated."),
    _learner("entropy", "entropy_nats", "Mean token entropy of the last batch."),
    _learner("grad_norm", "gradient_norm", "Gradient norm before clipping."),
    _learner("lr", "learning_rate", "Learning rate of the last step."),
    _learner("movement_abs_mean", "movement_mean_abs", "Mean |current - old| log-probability."),
    _learner("movement_abs_max", "movement_max_abs", "Largest |current - old|."),
    _learner("mismatch_abs_mean", "engine_mismatch_mean_abs", "Mean |old - behavior|."),
    _learner("mismatch_abs_max", "engine_mismatch_max_abs", "Largest |old - behavior|."),
    _learner(
        "mismatch_ess", "effective_sample_size_ratio", "Of the engine-mismatch weights, unclamped."
    ),
    _learner("clip_low_share", "clip_low_ratio", "Share of trained tokens clipped below."),
    _learner("clip_high_share", "clip_high_ratio", "Share of trained tokens clipped above."),
    _learner("cap_share", "correction_cap_ratio", "Share of trained tokens, weight capped."),
    _learner("keep_low_share", "keep_low_ratio", "Share of tokens rejected below the interval."),
    _learner("keep_high_share", "keep_high_ratio", "Share of tokens rejected above the interval."),
    _learner("stale_share", "stale_ratio", "Share of the last batch's tokens masked as too old."),
)
CATALOGUE: Final = (*RUN, *FLOW, *FLEET, *LEARNING)
