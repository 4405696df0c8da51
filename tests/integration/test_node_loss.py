"""A whole node is lost with everything on it: its groups are done again once there is room."""

import json
import subprocess
import sys

import pytest
from live import REPOSITORY
from ray_cluster import CONFIG, RayCluster, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.heavy]

ROLES = (
    "--rollout.resources={generate = 1}",
    "--verifiers.resources={train = 1}",
    "--learner.resources={train = 1}",
)


def test_a_lost_node_costs_no_group() -> None:
    cluster = RayCluster([{"train": 4.0}, {"generate": 4.0}])
    try:
        environment = {**cluster.environment, "RAY_ADDRESS": cluster.address}
        output = cluster.folder / "run.txt"
        with output.open("w") as file:
            run = subprocess.Popen(
                [
                    *(sys.executable, "-m", "orchestrator.cli", "run", CONFIG, "--steps=8"),
                    *("--evaluation.max_tasks=4", "--learner.groups_per_batch=4", *ROLES),
                    f"--runs-folder={cluster.folder}/runs",
                ],
                cwd=REPOSITORY,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        wait_for(lambda: "step 2/8" in output.read_text(), run, limit_s=300)
        cluster.lose_node(1)
        wait_for(lambda: "rollout-0 is lost" in output.read_text(), run, limit_s=120)
        cluster.add_node({"generate": 4.0})
        assert run.wait(400) == 0, output.read_text()
        (directory,) = (cluster.folder / "runs").glob("quickstart-*")
        summary = json.loads((directory / "summary.json").read_text())
        assert summary["steps"] == 8 and summary["rollout_restarts"] >= 1
        assert summary["ledger"]["balanced"] and summary["ledger"]["failed_tasks"] == 0
    finally:
        cluster.stop()
