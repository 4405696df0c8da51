"""A run that only says what it was told to do, and its control service in a thread."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from orchestrator.bottleneck import FlowGauges, Phase
from orchestrator.control import control_pb2_grpc as pb_grpc
from orchestrator.control.discovery import by_directory
from orchestrator.control.endpoint import Endpoint
from orchestrator.control.interceptors import Guard
from orchestrator.control.server import ControlServer
from orchestrator.control.service import ControlService
from orchestrator.operation_config import ControlConfig
from orchestrator.records import StepRecord
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

STEP = StepRecord(
    step=12,
    steps=100,
    version=11,
    phase_seconds={Phase.WAIT_FOR_GROUPS: 3.0, Phase.TRAIN: 1.0},
    gauges=FlowGauges(queue_groups=0.5, generating_groups=4, generation_slots=4),
    reward=0.5,
    accuracy=0.25,
    samples=16,
    unscored=1,
    response_tokens=320,
    staleness_tokens={0: 100, 1: 50},
    masked_tokens={"truncated": 3},
    learner={"loss": 0.1},
)
STATUS = RunStatus(
    run="tiny",
    directory="/runs/tiny",
    model="model",
    objective="grpo",
    state=RunState.TRAINING,
    paused=frozenset(),
    started_at=1000.0,
    time=1200.0,
    step=12,
    steps=100,
    version=11,
    lineage=0,
    limits=Limits(max_staleness=2, max_groups=16),
    queue=QueueStatus(
        ready_groups=3,
        under_way_groups=9,
        waiting_groups=1,
        generating_groups=4,
        generation_slots=4,
        verifying_groups=2,
        bytes=3 << 20,
        capacity_bytes=64 << 20,
        oldest_age_s=3.5,
    ),
    fleets=(
        FleetStatus(
            role=Role.ROLLOUT,
            target=2,
            restarts=1,
            workers=(
                WorkerStatus(
                    name="rollout-0", state="ready", node="n", pid=7, in_flight=4, version=11
                ),
                WorkerStatus(name="rollout-1", state="starting"),
            ),
        ),
        FleetStatus(
            role=Role.VERIFIER,
            target=1,
            restarts=0,
            workers=(WorkerStatus(name="verifier-0", state="ready"),),
        ),
    ),
    last_step=STEP,
    held_out_accuracy=0.41,
    checkpoint_step=10,
    samples={"generated": 200, "trained": 190, "pending": 10, "failed_tasks": 0},
    warnings=("engine mismatch rises; look at the learning dashboard.",),
)


class SteeringDouble:
    """Keeps what it was asked for; `gate` holds checkpoints and evaluations up while cleared."""

    def __init__(self) -> None:
        self.changed = Signal()
        self.snapshot = STATUS
        self.calls: list[tuple[Any, ...]] = []
        self.finished = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails: Exception | None = None

    def status(self) -> RunStatus:
        if self.fails:
            raise self.fails
        return self.snapshot

    def scale(self, role: Role, target: int) -> FleetStatus:
        self.calls.append(("scale", role, target))
        if role is Role.LEARNER or not 1 <= target <= 8:
            raise InvalidRequest(f"{role.value} cannot have {target} workers; expected 1 to 8.")
        if target == 8:
            raise NotNow("the cluster has no room for 8 workers;\n add nodes.")
        fleets = tuple(
            replace(fleet, target=target) if fleet.role is role else fleet
            for fleet in self.snapshot.fleets
        )
        self._change(fleets=fleets)
        return next(fleet for fleet in fleets if fleet.role is role)

    def set_limits(
        self, *, max_staleness: int | None = None, max_groups: int | None = None
    ) -> Limits:
        self.calls.append(("set_limits", max_staleness, max_groups))
        now = self.snapshot.limits
        limits = Limits(
            max_staleness=now.max_staleness if max_staleness is None else max_staleness,
            max_groups=now.max_groups if max_groups is None else max_groups,
        )
        self._change(limits=limits)
        return limits

    def pause(self, activity: Activity) -> None:
        self.calls.append(("pause", activity))
        self._change(paused=self.snapshot.paused | {activity})

    def resume(self, activity: Activity) -> None:
        self.calls.append(("resume", activity))
        self._change(paused=self.snapshot.paused - {activity})

    async def checkpoint(self) -> CheckpointDone:
        self.calls.append(("checkpoint",))
        if self.fails:
            raise self.fails
        await self.gate.wait()
        self.finished += 1
        return CheckpointDone(step=self.snapshot.step, path="/runs/tiny/checkpoints/step_12")

    async def evaluate(self) -> EvaluationDone:
        self.calls.append(("evaluate",))
        await self.gate.wait()
        return EvaluationDone(step=12, version=11, accuracy=0.5, samples=40, unscored=2)

    def stop(self) -> None:
        self.calls.append(("stop",))
        self._change(state=RunState.STOPPING)

    def _change(self, **fields: Any) -> None:
        self.snapshot = replace(self.snapshot, **fields)
        self.changed.notify()


@dataclass
class Live:
    """A served double: `stub` calls it with the token, `run` runs a coroutine on its loop."""

    steering: SteeringDouble
    server: ControlServer
    service: ControlService
    loop: asyncio.AbstractEventLoop
    directory: Path
    endpoint: Endpoint
    channel: grpc.Channel
    ticks: int = 0
    metadata: list[tuple[str, str]] = field(default_factory=list)

    @property
    def stub(self) -> pb_grpc.ControlServiceStub:
        return pb_grpc.ControlServiceStub(self.channel)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def close_gate(self) -> None:
        self.run(_in_loop(self.steering.gate.clear))

    def open_gate(self) -> None:
        self.run(_in_loop(self.steering.gate.set))

    async def tick(self) -> None:
        """What the run's own loops do meanwhile."""
        while True:
            self.ticks += 1
            await asyncio.sleep(0.001)


@contextmanager
def live(
    directory: Path,
    *,
    config: ControlConfig | None = None,
    guard: Guard | None = None,
    kind: type[ControlService] = ControlService,
    **service_options: Any,
) -> Iterator[Live]:
    """Serve a double on a loopback port until the end of the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[SteeringDouble, ControlService, ControlServer]:
        steering = SteeringDouble()
        service = kind(steering, **service_options)
        server = ControlServer(
            config or ControlConfig(), steering, "tiny", directory, service=service, guard=guard
        )
        await server.start()
        return steering, service, server

    def on_loop(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    try:
        (directory / "config.json").write_text("{}")
        steering, service, server = on_loop(start())
        endpoint = by_directory(directory)
        if endpoint.tls_ca:
            trusted = grpc.ssl_channel_credentials(endpoint.tls_ca.encode())
            channel = grpc.secure_channel(endpoint.address, trusted)
        else:
            channel = grpc.insecure_channel(endpoint.address)
        run = Live(steering, server, service, loop, directory, endpoint, channel)
        if endpoint.token:
            run.metadata = [("authorization", f"Bearer {endpoint.token}")]
        ticking = asyncio.run_coroutine_threadsafe(run.tick(), loop)
        yield run
        channel.close()
        ticking.cancel()
        on_loop(server.stop())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _in_loop(function: Any) -> None:
    function()
