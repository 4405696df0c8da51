"""Weight synchronisation: publish after a step, bring every rollout worker to the newest version.

Workers pull, so a late one costs the others nothing. The published chunks stay alive as long as
a manifest that names them is kept here. Knows neither the queue nor the objective.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ray.exceptions import RayActorError, RayError

from actors.config import RolloutConfig
from actors.parity import ProbeExpectation
from actors.trajectory import WeightLabel
from actors.weights import ChunkInfo, WeightManifest
from actors.worker import SyncReport, WorkerInfo
from learner.messages import ProbeRequest, Publication
from orchestrator.calls import DeadlineExceeded, root_cause, within
from orchestrator.errors import RunError
from orchestrator.fleet import Fleet
from orchestrator.reporting import Reporter
from orchestrator.signal import Signal
from orchestrator.supervised_learner import LearnerReplaced, SupervisedLearner
from orchestrator.workers import LossReason, Worker, WorkerState

SYNC_STAGES = 3
"""Fetch, load and probe, each with its own `sync_timeout_s` inside the worker."""
KEPT_PUBLICATIONS = 2
"""A worker may still fetch the last but one while the newest appears."""


class WeightSync:
    """Publishes the learner's weights and keeps the rollout fleet at the newest label."""

    def __init__(
        self,
        learner: SupervisedLearner,
        fleet: Fleet,
        config: RolloutConfig,
        *,
        probe_prefixes: tuple[tuple[int, ...], ...],
        learner_dtype: str,
        changed: Signal,
        reporter: Reporter,
        scheduled: Callable[[], int | None] = lambda: None,
        kept: int = KEPT_PUBLICATIONS,
    ) -> None:
        """`scheduled()` is the version that every worker has to serve, which is then loaded only
        between groups; None for the newest. The last `kept` publications stay alive."""
        self._learner = learner
        self._fleet = fleet
        self._config = config
        self._probe_prefixes = probe_prefixes
        self._learner_dtype = learner_dtype
        self._changed = changed
        self._reporter = reporter
        self._manifests: deque[WeightManifest] = deque(maxlen=kept)
        self._scheduled = scheduled
        self._labels: dict[str, WeightLabel] = {}
        self._syncing: set[str] = set()
        self._parity_at_start: float | None = None
        self.parity_max_abs = 0.0
        """Largest log-probability difference of any probe so far."""
        fleet.on_ready = self._adopt

    @property
    def newest(self) -> WeightManifest | None:
        """Manifest of the newest published weights."""
        return self._manifests[-1] if self._manifests else None

    @property
    def _target(self) -> WeightManifest | None:
        """What workers have to serve."""
        version = self._scheduled()
        if version is None:
            return self.newest
        return next((m for m in reversed(self._manifests) if m.label.version == version), None)

    def label(self, worker: Worker) -> WeightLabel | None:
        """Weights that `worker` serves, None before its first sync."""
        return self._labels.get(worker.name)

    async def start_worker(self, actor: Any) -> WorkerInfo:
        """Bring a rollout worker up, on the weights that are newest when its engine runs.

        Raises RunError when they do not pass the probe there.
        """
        info: WorkerInfo = await within(
            actor.start.remote(), self._config.start_timeout_s, "the start of a rollout worker"
        )
        if (target := self._target) is None:
            return info
        report = await self._load(actor, info.name, target)
        self._reporter.synced(report)
        if report.parity is not None and not report.parity.passed:
            raise RunError(f"it failed the parity probe: {report.parity}")
        return replace(info, label=report.label)

    async def _load(self, actor: Any, name: str, manifest: WeightManifest) -> SyncReport:
        return await within(
            actor.sync.remote(manifest, self._parity_at_start),
            (SYNC_STAGES + 1) * self._config.sync_timeout_s,
            f"{name} (weight sync to {manifest.label})",
        )

    def _adopt(self, worker: Worker) -> None:
        """A late worker came up on published weights; a first one still has to load some."""
        if self._target is not None:
            self._labels[worker.name] = worker.info.label

    async def publish(self, label: WeightLabel) -> None:
        """Gather and publish the learner's weights of the version of `label`, its current one or
        one that it keeps."""
        started = time.monotonic()
        probe = ProbeRequest(
            self._probe_prefixes,
            self._config.probe.top_k,
            self._config.sampling.temperature,
        )
        try:
            publication, refs = await self._learner.publish(str(label), probe, label.version)
        except LearnerReplaced:
            return  # the new learner's weights are published already
        self._manifests.append(self._manifest(label, publication, refs))
        self._reporter.published(time.monotonic() - started, publication.total_bytes)
        self._changed.notify()

    async def run(self) -> None:
        """Loop: sync every ready worker that is behind. Ended by cancellation only."""
        async with asyncio.TaskGroup() as group:
            while True:
                for worker in self._fleet.ready():
                    target = self._target
                    if target is not None and self._behind(worker) and self._may_load(worker):
                        self._syncing.add(worker.name)
                        sync = self._sync(worker, target)
                        group.create_task(sync, name=f"sync {worker.name}")
                await self._changed.wait()

    async def sync_all(self) -> None:
        """Return once there are ready workers and all of them serve what they have to."""
        while not (ready := self._fleet.ready()) or not all(map(self._is_current, ready)):
            await self._changed.wait()

    def _is_current(self, worker: Worker) -> bool:
        return not self._behind(worker) and worker.name not in self._syncing

    def _behind(self, worker: Worker) -> bool:
        target = self._target
        if target is None or worker.name in self._syncing:
            return False
        label = self._labels.get(worker.name)
        return label is None or label < target.label

    def _may_load(self, worker: Worker) -> bool:
        return self._scheduled() is None or not worker.in_flight

    async def _sync(self, worker: Worker, manifest: WeightManifest) -> None:
        try:
            report = await self._load(worker.actor, worker.name, manifest)
        except (RayError, DeadlineExceeded) as error:
            # One that is leaving, or was ended while it loaded, has not failed.
            if worker.state not in (WorkerState.DRAINING, WorkerState.DEAD):
                self._report_failure(worker, error)
        else:
            self._accept(worker, report)
        finally:
            self._syncing.discard(worker.name)
            if worker.state is WorkerState.DEAD:
                self._labels.pop(worker.name, None)
            self._changed.notify()

    def _report_failure(self, worker: Worker, error: RayError | DeadlineExceeded) -> None:
        if isinstance(error, RayActorError):  # that it was syncing is no cause
            self._fleet.report_lost(worker, LossReason.DIED, root_cause(error))
            return
        self._reporter.sync_failed()
        cause = f"weight sync failed: {root_cause(error)}"
        self._fleet.report_lost(worker, LossReason.SYNC_FAILED, cause)

    def _accept(self, worker: Worker, report: SyncReport) -> None:
        if report.superseded:
            return
        self._reporter.synced(report)
        if report.parity is not None:
            self.parity_max_abs = max(self.parity_max_abs, report.parity.max_abs)
            if not report.parity.passed:
                self._fleet.quarantine(
                    worker,
                    f"after loading {report.label} its log-probabilities differ from the "
                    f"learner's by {report.parity.max_abs:.3g} (tolerance "
                    f"{report.parity.tolerance:.3g}): {report.parity.cause}",
                )
                return
            if self._parity_at_start is None:
                self._parity_at_start = report.parity.max_abs
        self._labels[worker.name] = report.label

    def _manifest(
        self, label: WeightLabel, publication: Publication, refs: Sequence[Any]
    ) -> WeightManifest:
        probe = None
        if (scores := publication.probe) is not None:
            probe = ProbeExpectation(
                self._probe_prefixes,
                scores.token_ids,
                scores.logprobs,
                scores.raw_logprobs,
                str(label),
                self._learner_dtype,
            )
        return WeightManifest(
            label=label,
            dtype=publication.dtype,
            chunks=tuple(map(ChunkInfo, publication.nbytes, publication.crc32)),
            refs=tuple(refs),
            names=publication.names,
            probe=probe,
        )
