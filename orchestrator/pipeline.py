"""The driver program: wires every part of a run from the top and plays its script.

The script is start, synchronise, probe, evaluate, train, drain, save, evaluate. Beside it run a
few endless loops; one that ends by itself ends the run with its name and cause.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError

from actors.trajectory import TrajectoryMeta, WeightLabel
from actors.weights import remove_staged
from orchestrator import cluster
from orchestrator.autoscaling import autoscale
from orchestrator.bottleneck import Phase
from orchestrator.calls import longest_waits, within
from orchestrator.checkpointing import Checkpointing
from orchestrator.config import RunConfig
from orchestrator.evaluation import Evaluation, EvaluationResult
from orchestrator.fleet import Fleet
from orchestrator.flow import Flow
from orchestrator.generation import Generation
from orchestrator.history.ledger_file import LedgerFile
from orchestrator.history.redo import Redo, recall
from orchestrator.live_run import LiveRun, Parts
from orchestrator.loops import beside
from orchestrator.reporting import PhaseTimer, Reporter
from orchestrator.restarts import RestartBudget
from orchestrator.run_directory import RunDirectory
from orchestrator.signal import Signal
from orchestrator.start_probe import check_pair, probe_prefixes
from orchestrator.steering import RunState
from orchestrator.store import STORE_TIMEOUT_S
from orchestrator.supervised_learner import SupervisedLearner
from orchestrator.task_loading import Tasks
from orchestrator.training import Training
from orchestrator.verification import Verification, store_died
from orchestrator.watchdog import Watchdog
from orchestrator.weight_sync import KEPT_PUBLICATIONS, WeightSync

STORE_WATCH_PERIOD_S = 2.0
CHILD_START_S = 2.0
"""Seconds that a verifier's process needs to start and import, generously."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished or interrupted run hands to its summary."""

    before: EvaluationResult | None
    after: EvaluationResult | None
    interrupted: bool
    """Ended early by a signal."""
    stopped: bool
    """Ended early because it was told to."""
    training_seconds: float
    parity_max_abs: float


class Pipeline:
    """All parts of one run; `run` plays it once."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        *,
        tasks: Tasks,
        meta: TrajectoryMeta,
        reporter: Reporter,
        ledger_file: LedgerFile,
        resumed: bool,
    ) -> None:
        self._config = config
        self._directory = directory
        self._run_id = directory.path.name
        self._reporter = reporter
        self._ledger_file = ledger_file
        self._resumed = resumed
        self._held_out = tasks.held_out
        self._interrupted = False
        self._before: EvaluationResult | None = None
        self._script: asyncio.Task[Outcome] | None = None
        self.changed = Signal()
        self.flow = Flow(config, tasks.train, self.changed, ledger_file)
        self._store = cluster.create_store(directory.trajectories, directory.logs)
        self._learner = self._supervised_learner()
        self._rollout = self._rollout_fleet(meta, directory)
        self._verifiers = self._verifier_fleet(directory)
        self._wire_groups()
        self._wire_training(directory)
        self.live = LiveRun(self._parts(directory))
        reporter.observe(
            self.flow,
            self._rollout,
            self._verifiers,
            self._learner,
            self._verification,
            self.live.status,
        )

    def _wire_groups(self) -> None:
        """What makes groups ready: weights for the engines, generation, scoring; and evaluation."""
        config, changed, reporter = self._config, self.changed, self._reporter
        self._sync = WeightSync(
            self._learner,
            self._rollout,
            config.rollout,
            probe_prefixes=probe_prefixes(self._held_out, config.rollout.probe),
            learner_dtype=config.learner.param_dtype,
            changed=changed,
            reporter=reporter,
            scheduled=lambda: self.flow.scheduled_version,
            kept=config.max_staleness + 2 if config.deterministic else KEPT_PUBLICATIONS,
        )
        self._verification = Verification(
            self._verifiers,
            self._store,
            self.flow,
            groups_per_worker=cluster.groups_per_verifier(config),
            timeout_s=verify_timeout_s(config),
            changed=changed,
            on_verdicts=reporter.scored,
        )
        self._generation = Generation(
            self.flow,
            self._rollout,
            self._sync,
            config.rollout.groups_per_call,
            on_group=self._verification.submit,
            on_attempt=reporter.attempted,
        )
        self._evaluation = Evaluation(
            self._held_out,
            config.evaluation,
            self._rollout,
            self._verification,
            changed,
        )

    def _wire_training(self, directory: RunDirectory) -> None:
        config, reporter = self._config, self._reporter
        self._checkpointing = Checkpointing(
            config.checkpoint, directory, self._learner, self.flow, self._store, reporter
        )
        self._training = Training(
            self.flow,
            self._learner,
            self._sync,
            reporter,
            steps=config.steps,
            after_step=self._after_step,
        )

    def _parts(self, directory: RunDirectory) -> Parts:
        return Parts(
            config=self._config,
            directory=directory,
            flow=self.flow,
            learner=self._learner,
            rollout=self._rollout,
            verifiers=self._verifiers,
            sync=self._sync,
            generation=self._generation,
            verification=self._verification,
            training=self._training,
            checkpointing=self._checkpointing,
            reporter=self._reporter,
            most_workers=cluster.most_workers(),
            evaluate=self._evaluate,
        )

    def _supervised_learner(self) -> SupervisedLearner:
        redo = Redo(
            self._directory,
            self._ledger_file,
            self._store,
            note=self._reporter.note,
            progressed=self.changed.notify,
        )
        learner = SupervisedLearner(
            lambda: cluster.learner_group(self._config, self._directory.logs),
            lambda group: redo(group, step=self.flow.step),
            budget=RestartBudget(self._config.supervision.restarts_per_hour),
            note=self._reporter.note,
        )
        learner.on_replaced = self._publish_anew
        return learner

    def _rollout_fleet(self, meta: TrajectoryMeta, directory: RunDirectory) -> Fleet:
        config = self._config
        spawner = cluster.RolloutSpawner(
            config, meta=meta, run_id=self._run_id, logs=directory.logs
        )
        return Fleet(
            "rollout",
            spawner,
            lambda actor: self._sync.start_worker(actor),
            changed=self.changed,
            tell=self._reporter.note,
            release=spawner.release,
            budget=RestartBudget(config.supervision.restarts_per_hour),
            drain_timeout_s=config.supervision.drain_timeout_s,
            starts_at_once=cluster.starts_at_once,
            progress_timeout_s=config.rollout.progress_timeout_s,
        )

    def _verifier_fleet(self, directory: RunDirectory) -> Fleet:
        config = self._config
        return Fleet(
            "verifier",
            cluster.verifier_spawner(config, logs=directory.logs),
            self._start_verifier,
            changed=self.changed,
            tell=self._reporter.note,
            budget=RestartBudget(config.supervision.restarts_per_hour),
            drain_timeout_s=config.supervision.drain_timeout_s,
            starts_at_once=cluster.starts_at_once,
            progress_timeout_s=verify_timeout_s(config),
        )

    def interrupt(self) -> None:
        """First call: finish the step, save, end. Second call, or before training: end now."""
        early = self._interrupted or self._before is None
        self._interrupted = True
        self._training.stop()
        if early:
            self._reporter.note("interrupted: ending now")
            if self._script is not None:
                self._script.cancel()
        else:
            self._reporter.note("interrupted: finishing the step and saving (again to end at once)")

    async def run(self) -> Outcome:
        """Play the script beside the endless loops; closes every actor in the end."""
        config = self._config
        self._script = asyncio.create_task(self._play(), name="script")
        loops = {
            "generation": self._generation.run(),
            "verification": self._verification.run(),
            "weight sync": self._sync.run(),
            "rollout fleet": self._rollout.supervise(),
            "verifier fleet": self._verifiers.supervise(),
            "reporting": self._reporter.run(),
            "metrics": self._reporter.run_metrics(),
            "learner watch": self._learner.watch(),
            "store watch": self._watch_store(),
            "watchdog": Watchdog(
                self.changed,
                config.supervision,
                self._describe,
                lambda: self._training.paused or self._generation.paused,
            ).run(),
        }
        if config.autoscaler.enabled:
            loops["autoscaler"] = autoscale(self.live, config.autoscaler, self._reporter.note)
        try:
            return await beside(self._script, loops)
        finally:
            await self._close()

    async def _play(self) -> Outcome:
        live = self.live
        await self._start()
        live.state = RunState.EVALUATING
        self._before = await self._evaluate("before")
        started = time.monotonic()
        live.state = RunState.TRAINING
        self._generation.begin()
        await self._training.run()
        training_seconds = time.monotonic() - started
        live.state = RunState.STOPPING
        await self._generation.drain()
        await self._verification.drain()
        self._reporter.note(f"saved {await self._checkpointing.save()}")
        stopped = live.stopped
        after = None if self._interrupted or stopped else await self._evaluate("after")
        return Outcome(
            before=self._before,
            after=after,
            interrupted=self._interrupted,
            stopped=stopped,
            training_seconds=training_seconds,
            parity_max_abs=self._sync.parity_max_abs,
        )

    async def _start(self) -> None:
        if self._resumed:
            await self._restore()
        self._reporter.note("starting learner, rollout and verifier workers")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._learner.start())
            group.create_task(self._rollout.launch(self._config.rollout.workers))
            group.create_task(self._verifiers.launch(self._config.verifiers.workers))
        await self._publish_needed()
        await self._sync.sync_all()
        report = await check_pair(
            self._rollout.ready()[0], self._learner, self._held_out, self._config
        )
        self._sync.parity_max_abs = max(self._sync.parity_max_abs, report.max_abs)
        self._reporter.note(
            f"engines agree: log-probabilities differ by {report.max_abs:.2g} at most"
        )

    async def _restore(self) -> None:
        """Put the flow where it was when the run ended, whatever ended it."""
        ledger = await asyncio.to_thread(self.flow.replay, self._ledger_file.read())
        self._directory.set_aside_after(ledger.step)
        ready = await recall(self._store, ledger.ready())
        segments = await within(
            self._store.index.remote(), STORE_TIMEOUT_S, "reading the trajectory log"
        )
        self.flow.restore(ledger, ready, segments, lineage=self._directory.next_lineage())
        self._checkpointing.saved_step = max(self._directory.checkpoint_steps(), default=None)
        self._reporter.resumed(self.flow, ready_groups=len(ready))

    async def _publish_anew(self) -> None:
        """Another learner stands where the one that died stood: a recovery, so a new lineage."""
        self.flow.lineage = self._directory.next_lineage()
        self._reporter.recovered(self.flow)
        await self._publish_needed()

    async def _publish_needed(self) -> None:
        """Publish the newest weights, after those that a schedule still needs."""
        newest, oldest = self.flow.version, self.flow.scheduled_version
        for version in range(newest if oldest is None else oldest, newest + 1):
            # The lineage of now: the learner may have been replaced since the last one.
            await self._sync.publish(WeightLabel(self.flow.lineage, version))

    async def _watch_store(self) -> None:
        """Loop: notice when the store is gone. Ended by RunError or by cancellation."""
        while True:
            await asyncio.sleep(STORE_WATCH_PERIOD_S)
            try:
                await within(self._store.ping.remote(), STORE_TIMEOUT_S, "the trajectory store")
            except RayActorError as error:
                raise store_died(error) from error

    async def _start_verifier(self, actor: Any) -> Any:
        return await within(
            actor.start.remote(),
            self._config.verifiers.start_timeout_s,
            "the start of a verifier worker",
        )

    async def _after_step(self, step: int, timer: PhaseTimer) -> None:
        """What is due between two steps; the next one's record tells how long it took."""
        evaluation, checkpoint = self._config.evaluation, self._config.checkpoint
        last = step == self._config.steps
        if checkpoint.every and step % checkpoint.every == 0 and not last:
            with timer(Phase.CHECKPOINT):
                await self._checkpointing.try_save()
        if evaluation.every and step % evaluation.every == 0 and not last:
            with timer(Phase.EVALUATE):
                await self._evaluate(f"step {step}")

    async def _evaluate(self, when: str) -> EvaluationResult:
        await self._sync.sync_all()
        result = await self._evaluation.run()
        self._reporter.evaluation(when, self.flow, result)
        return result

    def _describe(self) -> str:
        """Who waits for what, for the watchdog's message."""
        return (
            f"{self.flow.describe()}; "
            f"{len(self._rollout.ready())} rollout and {len(self._verifiers.ready())} verifier "
            f"workers ready, {self._verification.backlog} groups being scored; "
            f"waiting for: {'; '.join(longest_waits(5)) or 'nothing'}"
        )

    async def _close(self) -> None:
        try:
            await asyncio.gather(
                self._rollout.close(), self._verifiers.close(), self._learner.close()
            )
        finally:
            ray.kill(self._store)
            remove_staged(self._run_id)


def verify_timeout_s(config: RunConfig) -> float:
    """Seconds for one group at a verifier worker, behind the one before it.

    Each completion may use up its deadline and cost its process, which then starts anew.
    """
    samples = max(config.rollout.samples_per_group, config.evaluation.samples_per_task)
    per_sample_s = config.verifiers.deadline_s + CHILD_START_S
    return config.verifiers.start_timeout_s + 2 * samples * per_sample_s
