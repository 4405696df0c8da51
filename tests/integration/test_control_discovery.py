"""A run's control service found through its Ray cluster, by a process that knows only that."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from steering_double import SteeringDouble

from orchestrator.control.server import ControlServer
from orchestrator.operation_config import ControlConfig

pytestmark = pytest.mark.integration


@pytest.fixture
def cluster() -> Iterator[str]:
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


async def slipstream(*words: str) -> tuple[int, str]:
    """Exit code of the command, and all it said; the services here answer meanwhile."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "orchestrator.cli", *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
    )
    said, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


def test_runs_are_found_through_their_cluster(cluster: str, tmp_path: Path) -> None:
    def served(name: str) -> ControlServer:
        (tmp_path / name).mkdir()
        config = ControlConfig(host="node")
        return ControlServer(config, SteeringDouble(), name, tmp_path / name)

    async def main() -> None:
        first, second = served("first"), served("second")
        await first.start()
        code, said = await slipstream("status", "--ray", cluster)
        assert code == 0, said
        assert "learner waited 75 %" in said
        await second.start()
        code, said = await slipstream("status", "--ray", cluster)
        assert code == 2
        assert "2 runs are on the Ray cluster" in said
        assert "first, second" in said
        code, said = await slipstream("stop", "second", "--ray", cluster)
        assert (code, "stopping" in said) == (0, True), said
        await first.stop()
        code, said = await slipstream("status", "first", "--ray", cluster)
        assert code == 2, said
        assert "there: second" in said
        await second.stop()
        code, said = await slipstream("status", "--ray", cluster)
        assert code == 1, said
        assert "no run with a control service" in said

    asyncio.run(main())
