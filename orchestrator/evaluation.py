"""Held-out evaluation with the run's own rollout and verifier workers, outside the ledger.

pass@1 is the mean outcome over samples drawn at the evaluation's own temperature. A sample
without an ok verdict is no answer to the question; it is counted apart and never scored as wrong.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from actors.trajectory import VerdictStatus
from actors.worker import GroupReceipt, GroupRequest
from orchestrator.calls import root_cause
from orchestrator.errors import RunError
from orchestrator.fleet import Fleet
from orchestrator.operation_config import EvaluationConfig
from orchestrator.signal import Signal
from orchestrator.tasks import Task
from orchestrator.verification import Verification
from orchestrator.workers import LossReason, Worker

ATTEMPTS = 3
MAX_FAILED_SHARE = 0.05
"""More failed tasks than this and the figure would not mean what it says."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """One pass over the held-out tasks."""

    accuracy: float
    """Mean outcome of the scored samples: pass@1."""
    samples: int
    unscored: int
    """Samples whose verdict was not ok."""
    failed_tasks: int


class Evaluation:
    """Samples each held-out task on whichever worker has room."""

    def __init__(
        self,
        tasks: Sequence[Task],
        config: EvaluationConfig,
        fleet: Fleet,
        verification: Verification,
        changed: Signal,
    ) -> None:
        self._tasks = tasks
        self._config = config
        self._fleet = fleet
        self._verification = verification
        self._changed = changed

    async def run(self) -> EvaluationResult:
        """Evaluate every held-out task. Raises RunError when too many tasks fail."""
        outcomes: list[float] = []
        unscored = 0
        failed: list[str] = []
        async with asyncio.TaskGroup() as group:
            calls = []
            for index, task in enumerate(self._tasks):
                worker = await self._worker_with_room()
                worker.in_flight += 1
                calls.append(group.create_task(self._one(worker, index, task)))
        for call in calls:
            verdicts, error = call.result()
            if verdicts is None:
                failed.append(error)
                continue
            for verdict in verdicts:
                if verdict["status"] != VerdictStatus.OK:
                    unscored += 1
                    continue
                outcome = verdict["outcome"]
                outcomes.append(verdict["reward"] if outcome is None else outcome)
        if not outcomes or len(failed) > MAX_FAILED_SHARE * len(self._tasks):
            last = failed[-1] if failed else "no sample had an ok verdict"
            raise RunError(f"evaluation: {len(failed)} of {len(self._tasks)} tasks failed: {last}")
        return EvaluationResult(
            sum(outcomes) / len(outcomes), len(outcomes) + unscored, unscored, len(failed)
        )

    async def _worker_with_room(self) -> Worker:
        while True:
            for worker in self._fleet.ready():
                if worker.in_flight < worker.info.max_groups_in_flight:
                    return worker
            await self._changed.wait()

    async def _one(self, worker: Worker, index: int, task: Task) -> tuple[Any, str]:
        """Verdict rows of one task, or None and why; a lost worker costs an attempt only."""
        for _ in range(ATTEMPTS - 1):
            verdicts, error = await self._attempt(worker, index, task)
            if verdicts is not None:
                return verdicts, error
            worker = await self._worker_with_room()
            worker.in_flight += 1
        return await self._attempt(worker, index, task)

    async def _attempt(self, worker: Worker, index: int, task: Task) -> tuple[Any, str]:
        request = GroupRequest(
            group_id=-1 - index,
            task_id=task.task_id,
            prompt_ids=task.prompt_ids,
            n=self._config.samples_per_task,
            temperature=self._config.temperature,
        )
        stream = worker.actor.generate.remote([request])
        try:
            receipt: GroupReceipt = await (await anext(stream))
            if not receipt.ok:
                return None, receipt.error
            batch_ref = await anext(stream)
        except RayError as error:
            self._fleet.report_lost(worker, LossReason.DIED, root_cause(error))
            return None, root_cause(error)
        finally:
            worker.in_flight -= 1
            self._changed.notify()
        try:
            return (await self._verification.score(batch_ref, task)).to_pylist(), ""
        except (RayError, RunError) as error:
            return None, root_cause(error)
