"""`slipstream submit`, and Ray's own, to a real cluster without token authentication."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import REPOSITORY
from ray.job_submission import JobStatus, JobSubmissionClient
from ray_cluster import CONFIG, RayCluster, submit, submit_command, wait_for

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def opened() -> Iterator[RayCluster]:
    """One node that asks for nothing."""
    cluster = RayCluster([{}])
    yield cluster
    cluster.stop()


def test_all_problems_are_told_at_once(opened: RayCluster) -> None:
    refused = submit(opened, "--learner.resources={big = 1}", "--data.train.path=none.jsonl")
    assert refused.returncode == 2
    assert "2 problems" in refused.stderr
    assert "the cluster has 0 big" in refused.stderr
    assert "data.train.path" in refused.stderr
    assert opened.state("jobs") == []


def test_the_exit_code_is_the_drivers(opened: RayCluster) -> None:
    failed = submit(opened, f"--runs-folder={opened.folder}/none", "--resume")
    assert failed.returncode == 2, failed.stderr
    assert "slipstream: no run is in" in failed.stdout
    assert "failed with exit code 2" in failed.stderr


def test_no_wait_prints_the_job(opened: RayCluster) -> None:
    before = {job["submission_id"] for job in opened.state("jobs")}
    left = submit(opened, "--no-wait", f"--runs-folder={opened.folder}/none", "--resume")
    assert left.returncode == 0
    after = {job["submission_id"] for job in opened.state("jobs")}
    assert after - before == {left.stdout.strip()}


def test_plain_ray_job_submit_joins_the_cluster(opened: RayCluster) -> None:
    """The cluster's own resources refuse it, so the driver has joined that cluster."""
    refused = subprocess.run(
        [
            str(Path(sys.executable).parent / "ray"),
            *("job", "submit", f"--address={opened.url}", "--working-dir=.", "--"),
            *("python", "-m", "orchestrator.cli", "run", CONFIG),
            *(f"--runs-folder={opened.folder}/plain", "--rollout.cpus=9"),
        ],
        cwd=REPOSITORY,
        env=opened.environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert refused.returncode == 1
    assert "the cluster has 2 CPU and the configuration needs" in refused.stdout + refused.stderr


def test_ctrl_c_leaves_the_job_alone(opened: RayCluster) -> None:
    log = opened.folder / "followed.txt"
    with log.open("w") as output:
        following = subprocess.Popen(
            submit_command(opened, f"--runs-folder={opened.folder}/left", "--steps=2000"),
            cwd=REPOSITORY,
            env=opened.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    wait_for(lambda: "training tasks" in log.read_text(), following)
    following.send_signal(signal.SIGINT)
    assert following.wait(60) == 130
    said = log.read_text()
    (job_id,) = set(re.findall(r"raysubmit_\w+", said))
    assert f"--follow {job_id}" in said
    assert "Traceback" not in said
    client = JobSubmissionClient(opened.url)
    assert client.get_job_status(job_id) == JobStatus.RUNNING
    client.stop_job(job_id)
