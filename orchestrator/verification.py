"""Scoring: hands each generated group to a verifier worker, then to the trajectory store.

A verifier worker that dies costs a repetition, not the group: rollout columns live in the object
store. Knows neither what a verifier does nor what the learner will do with its verdicts.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from ray.exceptions import RayActorError, RayError, RayTaskError

from orchestrator.calls import DeadlineExceeded, root_cause, within
from orchestrator.errors import RunError
from orchestrator.fleet import Fleet
from orchestrator.flow import Flow
from orchestrator.leases import Lease
from orchestrator.signal import Signal
from orchestrator.store import STORE_TIMEOUT_S, ReadyGroup
from orchestrator.tasks import Task
from orchestrator.workers import LossReason, Worker
from verifiers.verdict import Question

ATTEMPTS = 3


class VerificationFailed(RunError):
    """No verifier worker could score a group in the allowed attempts."""


class Verification:
    """Scores groups on the least loaded verifier worker."""

    def __init__(
        self,
        fleet: Fleet,
        store: Any,
        flow: Flow,
        *,
        groups_per_worker: int,
        timeout_s: float,
        changed: Signal,
        on_verdicts: Callable[[str, pa.RecordBatch], None],
    ) -> None:
        self._fleet = fleet
        self._store = store
        self._flow = flow
        self._groups_per_worker = groups_per_worker
        self._timeout_s = timeout_s
        self._changed = changed
        self._on_verdicts = on_verdicts
        self._inbox: asyncio.Queue[tuple[Lease, Any]] = asyncio.Queue()
        self.backlog = 0
        """Groups generated and not yet ready."""

    def submit(self, lease: Lease, batch_ref: Any) -> None:
        """Take over a generated group; returns at once."""
        self.backlog += 1
        self._inbox.put_nowait((lease, batch_ref))

    async def run(self) -> None:
        """Loop: score what was submitted, all of it at once. Ended by cancellation only."""
        async with asyncio.TaskGroup() as group:
            while True:
                lease, batch_ref = await self._inbox.get()
                group.create_task(self._process(lease, batch_ref), name=f"verify {lease.group_id}")

    async def drain(self) -> None:
        """Return when nothing is waiting to be scored or stored."""
        while self.backlog:
            await self._changed.wait()

    async def _process(self, lease: Lease, batch_ref: Any) -> None:
        """Score one group, store it, tell the flow; a failure becomes a failed attempt."""
        try:
            verdicts = await self.score(batch_ref, lease.task)
            self._flow.verified(lease)
            ready = await self._keep(lease, batch_ref, verdicts)
        except VerificationFailed as error:
            self._flow.attempt_failed(lease, "verifier_lost", str(error))
        except RayTaskError as error:
            lost = isinstance(error.cause, RayError)
            reason = "trajectories_lost" if lost else "scoring_failed"
            self._flow.attempt_failed(lease, reason, root_cause(error))
        except RayError as error:
            self._flow.attempt_failed(lease, "trajectories_lost", root_cause(error))
        else:
            self._flow.ready(lease, ready)
        finally:
            self.backlog -= 1
            self._changed.notify()

    async def _keep(self, lease: Lease, batch_ref: Any, verdicts: pa.RecordBatch) -> ReadyGroup:
        """Have the store own the group. Raises RunError when nothing can be kept any more."""
        try:
            return await within(
                self._store.append.remote(batch_ref, verdicts),
                STORE_TIMEOUT_S,
                f"the trajectory store (group {lease.group_id})",
            )
        except RayActorError as error:
            raise store_died(error) from error
        except RayTaskError as error:
            if not isinstance(error.cause, OSError):
                raise
            raise RunError(
                f"the trajectory log cannot be written: {error.cause}. Free disk space, then go on "
                "with --resume.",
                culprit="store",
            ) from error

    async def score(self, batch_ref: Any, task: Task) -> pa.RecordBatch:
        """Verdict columns for one rollout batch.

        Raises VerificationFailed, or RayTaskError when the batch is lost or the call itself raised.
        """
        question = Question(task.task_id, task.prompt_text, task.answer, task.extra)
        cause = ""
        for _ in range(ATTEMPTS):
            worker = await self._pick()
            worker.in_flight += 1
            try:
                verdicts = await within(
                    worker.actor.score.remote(batch_ref, question, task.verifier),
                    self._timeout_s,
                    f"{worker.name} (verifier {task.verifier!r}, task {task.task_id})",
                )
                self._on_verdicts(task.verifier, verdicts)
                return verdicts
            except RayTaskError as error:
                if not worker.given_up:
                    raise  # of the task, or of an input that died with its producer
                cause = root_cause(error)
            except (RayActorError, DeadlineExceeded) as error:
                cause = root_cause(error)
                late = isinstance(error, DeadlineExceeded)
                reason = LossReason.UNRESPONSIVE if late else LossReason.DIED
                self._fleet.report_lost(worker, reason, cause)
            finally:
                worker.in_flight -= 1
                self._changed.notify()
        raise VerificationFailed(
            f"task {task.task_id}: {ATTEMPTS} verifier workers were lost scoring it; last: {cause}"
        )

    async def _pick(self) -> Worker:
        """The least loaded worker with room. What waits here waits outside of any deadline."""
        while True:
            for worker in self._fleet.ready():
                if worker.in_flight < self._groups_per_worker:
                    return worker
            await self._changed.wait()


def store_died(error: RayActorError) -> RunError:
    """Ready groups died with their owner; the trajectory log still has them."""
    return RunError(f"the trajectory store died: {root_cause(error)}", culprit="store")
