"""Checkpoints of a run: the learner's state with the driver's beside it, saved as one.

The learner writes its shards and, with them, one JSON object that the driver gives: the flow's
state. Both become visible together or not at all.
"""

import time
from pathlib import Path

from learner.group import LearnerGroup
from orchestrator.flow import Flow
from orchestrator.operation_config import CheckpointConfig
from orchestrator.reporting import Reporter
from orchestrator.run_directory import RunDirectory


class Checkpointing:
    """Saves after a step and restores before the first one."""

    def __init__(
        self,
        config: CheckpointConfig,
        directory: RunDirectory,
        learner: LearnerGroup,
        flow: Flow,
        reporter: Reporter,
    ) -> None:
        self._config = config
        self._directory = directory
        self._learner = learner
        self._flow = flow
        self._reporter = reporter
        self._saved_step: int | None = None

    @property
    def saved_step(self) -> int | None:
        """Step of the newest checkpoint that this run wrote or started from."""
        return self._saved_step

    async def save(self) -> Path:
        """The checkpoint of the flow's current step, written unless it is there; beyond `keep`,
        older ones go."""
        path = self._directory.checkpoint(self._flow.step)
        if self._flow.step == self._saved_step:
            return path
        started = time.monotonic()
        try:
            await self._learner.save(
                str(path), self._flow.state(), keep=self._config.keep, export=self._config.export
            )
        except Exception:
            self._reporter.checkpoint_failed()
            raise
        self._saved_step = self._flow.step
        self._reporter.checkpointed(self._flow.step, time.monotonic() - started)
        return path

    async def load(self, path: Path) -> None:
        """Put learner and flow where they were when `path` was saved."""
        state = await self._learner.load(str(path))
        self._flow.restore(state.extra, lineage=self._directory.next_lineage())
        self._saved_step = self._flow.step
