"""Ray: joining or starting a cluster, and how each role becomes actors on it.

The only module of the orchestrator that decides actor options. Knows no loop.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from actors.process_log import redirect_output
from actors.trajectory import TrajectoryMeta
from actors.worker import MAX_CONCURRENCY, RolloutWorker
from learner.group import LearnerGroup
from learner.messages import LearnerSpec
from orchestrator.capacity import Node, capacity_problems
from orchestrator.config import RunConfig
from orchestrator.errors import RunError
from orchestrator.history.trajectory_log import TrajectoryLog
from orchestrator.joining import join
from orchestrator.operation_config import NODE_HOST
from orchestrator.store import TrajectoryStore
from verifiers.worker import VerifierWorker

logger = logging.getLogger(__name__)

MAX_WORKERS = 1024
WORKERS_PER_CORE = 2
CPUS_PER_START = 4
LOCAL_STARTS = 2
CONTROL_CALLS = 8
"""Calls to a verifier worker beyond those that score, so that a ping never queues behind them."""


def connect(config: RunConfig, *, whole: bool = True) -> RunConfig:
    """Join the cluster of RAY_ADDRESS, or start a local one; the configuration as it holds there.

    On a local cluster, which nobody else uses, roles share the cores and reserve none, so that
    there is always room for another worker, and engines export no metrics to a Ray that nobody
    scrapes. Raises RunError when the cluster cannot be reached or lacks resources, those for the
    `whole` run if asked.
    """
    if is_shared():
        join(os.environ["RAY_ADDRESS"])
    else:
        config = _for_own_ray(config)
        _start_local(os.cpu_count() or 1)
    if whole:
        _require_room(config)
    return config


def is_shared() -> bool:
    """Whether the run joins a cluster instead of starting a Ray of its own."""
    return bool(os.environ.get("RAY_ADDRESS"))


def _for_own_ray(config: RunConfig) -> RunConfig:
    none = {"cpus": 0.0}
    engine = config.rollout.engine.model_copy(update={"export_metrics": False})
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={**none, "engine": engine}),
            "verifiers": config.verifiers.model_copy(update=none),
            "learner": config.learner.model_copy(update=none),
        }
    )


def _start_local(cpus: int) -> None:
    """Start Ray on this machine. Its agents have 15 s to come up, which a machine that is busy or
    reads everything for the first time may miss once; so there is a second attempt."""
    for attempt in range(LOCAL_STARTS):
        try:
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
            return
        except Exception as error:
            ray.shutdown()
            if attempt + 1 == LOCAL_STARTS:
                raise RunError(
                    f"Ray did not start on this machine: {error}. The machine may be too busy, or "
                    "short of memory or disk. Ray's logs: /tmp/ray/session_latest/logs."
                ) from error
            logger.warning("Ray did not start, trying once more: %s", error)


def most_workers() -> int:
    """Workers that one role may be told to have. On a Ray of the run's own nothing is reserved, so
    only this keeps a slip of the finger from taking the machine down."""
    return MAX_WORKERS if is_shared() else max(4, WORKERS_PER_CORE * (os.cpu_count() or 1))


def starts_at_once() -> int:
    """Workers of one role that may start at the same time while the run is live: a start takes
    several cores for a while, and those that work need theirs."""
    cpus = sum(node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"])
    return max(2, int(cpus) // CPUS_PER_START)


def host_to_bind(host: str) -> str:
    """`host` of a configuration as an address: `node` is the one that others reach this node at."""
    return ray.util.get_node_ip_address() if host == NODE_HOST else host


def groups_per_verifier(config: RunConfig) -> int:
    """Groups given to one verifier worker at once: one per process, and the next."""
    return config.verifiers.processes + 1


def _require_room(config: RunConfig) -> None:
    nodes = [
        Node(node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]
    ]
    if problems := capacity_problems(config, nodes):
        raise RunError(f"the Ray cluster is too small for this config: {' '.join(problems)}")


class RolloutSpawner:
    """Creates rollout worker actors by name, each on resources of its own."""

    def __init__(self, config: RunConfig, *, meta: TrajectoryMeta, run_id: str, logs: Path) -> None:
        self._config = config
        self._meta = meta
        self._run_id = run_id
        self._logs = logs
        self._groups: dict[str, PlacementGroup] = {}

    def __call__(self, name: str) -> Any:
        """The actor handle of a new worker."""
        model = self._config.model.path
        return (
            ray.remote(RolloutWorker)
            .options(max_concurrency=MAX_CONCURRENCY, max_restarts=0, **self._resources(name))
            .remote(
                name,
                self._config.rollout,
                model,
                model,
                self._meta,
                self._run_id,
                str(self._logs / f"{name}.log"),
            )
        )

    def release(self, name: str) -> None:
        """Give back what was reserved for a worker that is gone."""
        if group := self._groups.pop(name, None):
            remove_placement_group(group)

    def _resources(self, name: str) -> dict[str, Any]:
        rollout = self._config.rollout
        own, *others = rollout.bundles()
        if others:
            # vLLM's Ray executor starts its processes on the other bundles of the actor's group.
            group = self._groups[name] = placement_group([own, *others], strategy="PACK")
            return {
                "num_cpus": own["CPU"],
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    group,
                    placement_group_bundle_index=0,
                    placement_group_capture_child_tasks=True,
                ),
            }
        return {
            "num_cpus": rollout.cpus,
            "num_gpus": rollout.gpus,
            "resources": rollout.resources or None,
        }


def verifier_spawner(config: RunConfig, *, logs: Path) -> Callable[[str], Any]:
    """A function that creates the verifier worker actor of a given name."""
    actor_class = ray.remote(VerifierWorker)

    def spawn(name: str) -> Any:
        return actor_class.options(
            num_cpus=config.verifiers.cpus,
            resources=config.verifiers.resources or None,
            max_concurrency=groups_per_verifier(config) + CONTROL_CALLS,
            max_restarts=0,
        ).remote(name, config.verifiers, config.model.path, str(logs / f"{name}.log"))

    return spawn


def learner_group(config: RunConfig, logs: Path) -> LearnerGroup:
    """A learner group of a run, not yet started; each rank prints to a file in `logs`."""
    spec = LearnerSpec(
        model=config.model.path,
        config=config.learner,
        objective=config.learner.objective,
        max_response_tokens=config.rollout.sampling.max_tokens,
        rollout_dtype=config.rollout.engine.dtype,
        seed=config.seed,
        logs=str(logs),
    )
    return LearnerGroup(spec, redirect_output)


class _StoreActor(TrajectoryStore):
    """Ray shell of the store: puts under the actor's own ownership."""

    def __init__(self, folder: str, log_path: str) -> None:
        redirect_output(log_path)
        super().__init__(ray.put, TrajectoryLog(Path(folder)))


def create_store(folder: Path, logs: Path) -> Any:
    """The trajectory store actor, on the driver's node; its log is in `folder`."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return (
        ray.remote(_StoreActor)
        .options(num_cpus=0, scheduling_strategy=here)
        .remote(str(folder), str(logs / "store.log"))
    )
