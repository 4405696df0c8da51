"""The generation loop: gives leases to rollout workers and passes what comes back on to scoring.

Knows the flow's leases and the workers' streaming calls; it never sees a token. A lease that
does not come back as a group goes back to the flow, whatever the reason.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayError

from actors.worker import GroupReceipt, GroupRequest
from orchestrator.calls import root_cause, waiting
from orchestrator.fleet import Fleet
from orchestrator.flow import Flow
from orchestrator.leases import Lease
from orchestrator.weight_sync import WeightSync
from orchestrator.workers import LossReason, Worker


class Generation:
    """Keeps every rollout worker as busy as admission allows."""

    def __init__(
        self,
        flow: Flow,
        fleet: Fleet,
        sync: WeightSync,
        groups_per_call: int,
        on_group: Callable[[Lease, Any], None],
        on_attempt: Callable[[str, int], None],
    ) -> None:
        self._flow = flow
        self._fleet = fleet
        self._sync = sync
        self._groups_per_call = groups_per_call
        self._on_group = on_group
        self._on_attempt = on_attempt
        self._calls: set[asyncio.Task] = set()
        self._accepting = False
        self.paused = False

    def pause(self, paused: bool) -> None:
        """Start no group while `paused`; those in flight come back normally."""
        self.paused = paused
        self._flow.changed.notify()

    def begin(self) -> None:
        """Start dispatching."""
        self._accepting = True
        self._flow.changed.notify()

    async def run(self) -> None:
        """Loop: dispatch whenever something changed. Ended by cancellation only."""
        async with asyncio.TaskGroup() as group:
            while True:
                # Leasing is a change too: look again at what it made possible before waiting.
                while self._accepting and not self.paused and self._dispatch_all(group):
                    pass
                await self._flow.changed.wait()

    async def drain(self) -> None:
        """Stop dispatching; return when no call is in flight."""
        self._accepting = False
        while self._calls:
            await self._flow.changed.wait()

    def _dispatch_all(self, group: asyncio.TaskGroup) -> bool:
        """One call to every worker that can take one; whether there was any."""
        dispatched = False
        for worker in self._fleet.ready():
            label = self._sync.label(worker)
            if label is None:
                continue
            leases = self._leases(worker, label.version)
            if leases:
                worker.in_flight += len(leases)
                call = group.create_task(self._collect(worker, leases), name=f"{worker.name} call")
                self._calls.add(call)
                dispatched = True
        return dispatched

    def _leases(self, worker: Worker, version: int) -> list[Lease]:
        free = min(worker.info.max_groups_in_flight - worker.in_flight, self._groups_per_call)
        leases: list[Lease] = []
        while len(leases) < free and (lease := self._flow.next_lease(version)) is not None:
            leases.append(lease)
        return leases

    async def _collect(self, worker: Worker, leases: list[Lease]) -> None:
        """One streaming call: receipts and groups in completion order, losses given back."""
        open_leases = {lease.group_id: lease for lease in leases}
        stream = worker.actor.generate.remote([_request(lease) for lease in leases])
        reason = "the worker ended its answer early"
        try:
            with waiting(f"{worker.name} ({len(leases)} groups)"):
                await self._receive(worker, open_leases, stream)
        except RayError as error:
            reason = root_cause(error)
            self._fleet.report_lost(worker, LossReason.DIED, reason)
        finally:
            worker.in_flight -= len(open_leases)
            code = "drained" if worker.given_up else "worker_lost"
            for lease in open_leases.values():
                self._on_attempt("lost", 0)
                self._flow.attempt_failed(
                    lease, code, f"{worker.name}: {reason}", pardoned=worker.given_up
                )
            self._calls.discard(asyncio.current_task())
            self._flow.changed.notify()

    async def _receive(self, worker: Worker, open_leases: dict[int, Lease], stream: Any) -> None:
        """Pass on what comes; what has come is taken off `open_leases`."""
        async for receipt_ref in stream:
            receipt: GroupReceipt = await receipt_ref
            # Until its batch is here the group counts as in flight: a drain waits for it.
            batch_ref = await anext(stream, None) if receipt.ok else None
            if receipt.ok and batch_ref is None:
                return
            lease = open_leases.pop(receipt.group_id)
            worker.in_flight -= 1
            if receipt.ok:
                self._flow.generated(lease, receipt)
                self._on_attempt("completed", sum(receipt.response_tokens))
                self._on_group(lease, batch_ref)
            else:
                self._on_attempt("failed", 0)
                code = "drained" if worker.given_up else "generation_failed"
                self._flow.attempt_failed(lease, code, receipt.error, pardoned=worker.given_up)


def _request(lease: Lease) -> GroupRequest:
    return GroupRequest(
        group_id=lease.group_id,
        task_id=lease.task.task_id,
        prompt_ids=lease.task.prompt_ids,
        n=lease.samples,
        attempt=lease.attempt,
        seed=lease.seed,
    )
