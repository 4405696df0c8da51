"""Checkpoints of a run.

The learner writes its shards. Everything else that a resume needs is in the ledger and in the
trajectory log, which is kept back to the oldest checkpoint.
"""

import time
from pathlib import Path
from typing import Any

from learner.messages import NotWritten
from orchestrator.calls import within
from orchestrator.errors import RunError
from orchestrator.flow import Flow
from orchestrator.operation_config import CheckpointConfig
from orchestrator.reporting import Reporter
from orchestrator.run_directory import RunDirectory
from orchestrator.store import STORE_TIMEOUT_S
from orchestrator.supervised_learner import SupervisedLearner


class CheckpointFailed(RunError):
    """No checkpoint was written; the ones before it are as they were."""


class Checkpointing:
    """Saves after a step."""

    def __init__(
        self,
        config: CheckpointConfig,
        directory: RunDirectory,
        learner: SupervisedLearner,
        flow: Flow,
        store: Any,
        reporter: Reporter,
    ) -> None:
        self._config = config
        self._directory = directory
        self._learner = learner
        self._flow = flow
        self._store = store
        self._reporter = reporter
        self.saved_step: int | None = None
        """Step of the newest checkpoint that this run wrote or started from."""

    async def save(self) -> Path:
        """The checkpoint of the flow's current step, written unless it is there; beyond `keep`,
        older ones go. Raises CheckpointFailed where it cannot be written, and older ones stay."""
        flow = self._flow
        path = self._directory.checkpoint(flow.step)
        if flow.step == self.saved_step:
            return path
        started = time.monotonic()
        try:
            # A checkpoint ahead of the ledger could not be resumed from.
            await flow.flush(durably=True)
            await self._learner.save(str(path), keep=self._config.keep, export=self._config.export)
        except NotWritten as error:
            self._reporter.checkpoint_failed()
            raise CheckpointFailed(f"{error}.", culprit="learner-0") from error
        self.saved_step = flow.step
        self._reporter.checkpointed(flow.step, time.monotonic() - started)
        await self._trim_log()
        return path

    async def try_save(self) -> None:
        """As `save`, for a checkpoint in mid-run: the run goes on without it, since steps can be
        done again from the one before."""
        try:
            await self.save()
        except CheckpointFailed as error:
            self._reporter.note(f"the run goes on without this checkpoint: {error}")

    async def _trim_log(self) -> None:
        steps = self._directory.checkpoint_steps()
        unneeded = self._flow.unneeded_segments(min(steps, default=0))
        if unneeded:
            await within(
                self._store.forget.remote(unneeded), STORE_TIMEOUT_S, "the trajectory store"
            )
