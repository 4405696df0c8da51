"""A live run as others may ask and steer it: the `Steering` of the pipeline's parts.

Looks and tells parts what is wanted; what happens then is theirs. Everything here runs on the
driver's event loop and returns at once unless it says otherwise.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from learner.attribution import coarser, diagnose
from orchestrator.autoscaler import Load
from orchestrator.bottleneck import Phase
from orchestrator.checkpointing import Checkpointing
from orchestrator.cluster import MAX_WORKERS, groups_per_verifier
from orchestrator.config import RunConfig
from orchestrator.evaluation import EvaluationResult
from orchestrator.fleet import Fleet
from orchestrator.flow import Flow
from orchestrator.generation import Generation
from orchestrator.reporting import RECENT_STEPS, Reporter
from orchestrator.run_directory import RunDirectory
from orchestrator.signal import Signal
from orchestrator.steering import (
    Activity,
    CheckpointDone,
    EvaluationDone,
    FleetStatus,
    InvalidRequest,
    Limits,
    NotNow,
    QueueStatus,
    Role,
    RunState,
    RunStatus,
    WorkerStatus,
)
from orchestrator.supervised_learner import SupervisedLearner
from orchestrator.training import Training
from orchestrator.verification import Verification
from orchestrator.weight_sync import WeightSync
from orchestrator.workers import WorkerState

MAX_STALENESS = 64
LATE_START_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a live run is made of."""

    config: RunConfig
    directory: RunDirectory
    flow: Flow
    learner: SupervisedLearner
    rollout: Fleet
    verifiers: Fleet
    sync: WeightSync
    generation: Generation
    verification: Verification
    training: Training
    checkpointing: Checkpointing
    reporter: Reporter
    most_workers: int
    """Workers that one role may be told to have."""
    evaluate: Callable[[str], Awaitable[EvaluationResult]]
    """Evaluates now; the argument says when that is, for the record."""


@dataclass
class LiveRun:
    """Implements `Steering`. The pipeline says which `state` its script is in."""

    parts: Parts
    state: RunState = RunState.STARTING
    stopped: bool = False
    """Whether the run was told to end, by `stop` and not by a signal."""
    started_at: float = field(default_factory=time.time)

    @property
    def changed(self) -> Signal:
        """Notified whenever something moved."""
        return self.parts.flow.changed

    # Looking

    def status(self) -> RunStatus:
        """A snapshot; cheap and without side effects."""
        parts = self.parts
        config, flow, reporter = parts.config, parts.flow, parts.reporter
        ledger = flow.ledger.report()
        samples = {name: n for name, n in ledger.as_dict().items() if isinstance(n, int)}
        return RunStatus(
            run=parts.directory.path.name,
            directory=str(parts.directory.path),
            model=config.model.path,
            objective=config.learner.objective.preset,
            state=self.state,
            paused=self._paused(),
            started_at=self.started_at,
            time=time.time(),
            step=flow.step,
            steps=config.steps,
            version=flow.version,
            lineage=flow.lineage,
            limits=flow.limits,
            queue=self._queue(),
            fleets=(
                self._fleet(Role.ROLLOUT, parts.rollout),
                self._fleet(Role.VERIFIER, parts.verifiers),
                self._ranks(),
            ),
            last_step=reporter.last_step,
            held_out_accuracy=reporter.held_out_accuracy,
            checkpoint_step=parts.checkpointing.saved_step,
            samples={name: n for name, n in samples.items() if name != "balanced"},
            balanced=ledger.balanced,
            warnings=tuple(self._warnings()),
        )

    def _paused(self) -> frozenset[Activity]:
        paused = {
            Activity.GENERATION: self.parts.generation.paused,
            Activity.TRAINING: self.parts.training.paused,
        }
        return frozenset(activity for activity, held in paused.items() if held)

    def _queue(self) -> QueueStatus:
        stats = self.parts.flow.queue_stats()
        able = (WorkerState.READY, WorkerState.DRAINING)
        workers = [w for w in self.parts.rollout.workers.values() if w.state in able]
        return QueueStatus(
            ready_groups=stats.ready_groups,
            under_way_groups=self.parts.flow.under_way,
            waiting_groups=self.parts.flow.waiting,
            generating_groups=sum(worker.in_flight for worker in workers),
            generation_slots=sum(w.info.max_groups_in_flight for w in workers),
            verifying_groups=self.parts.verification.backlog,
            bytes=stats.admitted_bytes,
            capacity_bytes=self.parts.config.queue.max_bytes,
            oldest_age_s=stats.oldest_age_s,
        )

    def _fleet(self, role: Role, fleet: Fleet) -> FleetStatus:
        workers = []
        for worker in fleet.workers.values():
            label = self.parts.sync.label(worker) if role is Role.ROLLOUT else None
            workers.append(
                WorkerStatus(
                    name=worker.name,
                    state=worker.state.value,
                    node=getattr(worker.info, "node_id", ""),
                    pid=getattr(worker.info, "pid", 0),
                    in_flight=worker.in_flight,
                    version=None if label is None else label.version,
                )
            )
        return FleetStatus(
            role=role,
            target=fleet.target,
            restarts=fleet.restarts.total(),
            workers=tuple(workers),
        )

    def _ranks(self) -> FleetStatus:
        ranks = tuple(
            WorkerStatus(
                name=f"learner-{info.rank}",
                state=WorkerState.READY.value,
                node=info.node_id,
                pid=info.pid,
                version=self.parts.flow.version,
            )
            for info in self.parts.learner.infos
        ) or tuple(
            WorkerStatus(name=f"learner-{rank}", state=WorkerState.STARTING.value)
            for rank in range(self.parts.config.learner.ranks)
        )
        return FleetStatus(
            role=Role.LEARNER,
            target=self.parts.config.learner.ranks,
            restarts=self.parts.learner.restarts.total(),
            workers=ranks,
        )

    def load(self) -> Load:
        """The load at this moment, for the autoscaler."""
        parts, queue = self.parts, self._queue()
        version = parts.flow.version
        slots = len(parts.verifiers.ready()) * groups_per_verifier(parts.config)
        free = queue.generating_groups < queue.generation_slots
        return Load(
            learner_idle=float(parts.training.waiting),
            rollout_busy=_share(queue.generating_groups, queue.generation_slots),
            verifiers_busy=_share(queue.verifying_groups, slots),
            admission_blocked=float(free and parts.flow.admission_blocked(version)),
        )

    def undisturbed(self) -> bool:
        """Whether the run trains: nothing is paused, and nothing is saved or evaluated now."""
        busy_elsewhere = self._paused() or self.parts.training.between
        return self.state is RunState.TRAINING and not busy_elsewhere

    def _warnings(self) -> list[str]:
        found = self._lasting_findings()
        for fleet in (self.parts.rollout, self.parts.verifiers):
            able, quarantined = fleet.count(WorkerState.READY), WorkerState.QUARANTINED
            late = [w.name for w in fleet.workers.values() if w.starting_s > LATE_START_S]
            if late:
                found.append(
                    f"{able} of {fleet.target} {fleet.role} workers are ready; {', '.join(late)} "
                    f"did not come up within {LATE_START_S:.0f} s: the cluster may lack room"
                )
            if number := fleet.count(quarantined):
                found.append(
                    f"{number} {fleet.role} workers are quarantined: their log-probabilities "
                    "disagree with the learner's; see the driver's log for the cause"
                )
        return found

    def _lasting_findings(self) -> list[str]:
        """What has been out of its usual range in each of the last steps: the first ones of a run
        move far, and a single batch says little."""
        config, recent = self.parts.config, self.parts.reporter.recent
        if len(recent) < RECENT_STEPS:
            return []
        dtype = coarser(config.rollout.engine.dtype, config.learner.param_dtype)
        findings = [diagnose(step.learner, dtype) for step in recent]
        lasting = set.intersection(*({finding.cause for finding in step} for step in findings))
        return [finding.sentence for finding in findings[-1] if finding.cause in lasting]

    # Steering

    def scale(self, role: Role, target: int) -> FleetStatus:
        """Let a role have `target` workers from now on; returns before they are there."""
        if role is Role.LEARNER:
            raise InvalidRequest(
                "learner ranks cannot be added or removed in a live run; stop it, and resume with "
                "another learner.ranks."
            )
        most = self.parts.most_workers
        if not 1 <= target <= most:
            hint = " To stop generating, pause generation." if role is Role.ROLLOUT else ""
            raise InvalidRequest(
                f"{target} {role} workers: expected 1 to {most}, what this "
                f"{'cluster' if most >= MAX_WORKERS else 'machine'} may have.{hint}"
            )
        self._require_live("fleets can be scaled")
        fleet = self.parts.rollout if role is Role.ROLLOUT else self.parts.verifiers
        if target != fleet.target:
            self.parts.reporter.note(f"{role} workers: {fleet.target} -> {target}")
        fleet.set_target(target)
        return self._fleet(role, fleet)

    def set_limits(
        self, *, max_staleness: int | None = None, max_groups: int | None = None
    ) -> Limits:
        """Change bounds, None leaving one as it is; all that hold now."""
        if max_staleness is not None and not 0 <= max_staleness <= MAX_STALENESS:
            raise InvalidRequest(f"max_staleness {max_staleness}: expected 0 to {MAX_STALENESS}.")
        self._require_live("limits can be changed")
        if self.parts.config.deterministic:
            raise InvalidRequest("the limits of a deterministic run belong to its schedule.")
        before = self.parts.flow.limits
        try:
            limits = self.parts.flow.set_limits(max_staleness=max_staleness, max_groups=max_groups)
        except ValueError as error:
            raise InvalidRequest(
                f"max_groups: {error}; expected at least learner.groups_per_batch."
            ) from None
        if limits != before:
            self.parts.reporter.note(
                f"limits: max_staleness {before.max_staleness} -> {limits.max_staleness}, "
                f"max_groups {before.max_groups} -> {limits.max_groups}"
            )
        return limits

    def pause(self, activity: Activity) -> None:
        """Start no new group, or no new batch step; what is under way ends normally."""
        self._hold(activity, True)

    def resume(self, activity: Activity) -> None:
        """Go on."""
        self._hold(activity, False)

    def _require_live(self, what: str) -> None:
        if self.state is RunState.STARTING:
            raise NotNow(f"the run is starting; {what} once it has started.")
        if self.state not in (RunState.EVALUATING, RunState.TRAINING):
            raise NotNow(f"the run is ending or has ended: it is too late, {what} before.")

    def _hold(self, activity: Activity, held: bool) -> None:
        self._require_live("it can be paused and resumed")
        if (activity in self._paused()) != held:
            self.parts.reporter.note(f"{activity} is {'paused' if held else 'resumed'}")
        part = self.parts.generation if activity is Activity.GENERATION else self.parts.training
        part.pause(held)

    async def checkpoint(self) -> CheckpointDone:
        """Save between two steps, as soon as there is one."""

        async def save() -> CheckpointDone:
            path = await self.parts.checkpointing.save()
            return CheckpointDone(step=self.parts.flow.step, path=str(path))

        self._require_live("it saves at its end anyway; a checkpoint can be asked for")
        return await self.parts.training.between_steps(Phase.CHECKPOINT, save)

    async def evaluate(self) -> EvaluationDone:
        """Evaluate between two steps, as soon as there is one."""
        flow = self.parts.flow

        async def measure() -> EvaluationDone:
            result = await self.parts.evaluate(f"step {flow.step}")
            return EvaluationDone(
                step=flow.step,
                version=flow.version,
                accuracy=result.accuracy,
                samples=result.samples,
                unscored=result.unscored,
            )

        self._require_live("an evaluation can be asked for")
        return await self.parts.training.between_steps(Phase.EVALUATE, measure)

    def stop(self) -> None:
        """Finish the step, drain, save and end the run; asking twice changes nothing."""
        if self.state is RunState.STARTING:
            raise NotNow("the run is starting; stop it once it trains, or press Ctrl-C there.")
        if not self.stopped:
            self.stopped = True
            self.parts.reporter.note("stopping: finishing the step and saving")
        self.parts.training.stop()


def _share(part: int, whole: int) -> float:
    return min(1.0, part / whole) if whole else 1.0
