"""`slipstream submit` to real clusters, with and without token authentication, and two raylets."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from live import QUICKSTART, REPOSITORY
from ray_cluster import RayCluster

pytestmark = pytest.mark.integration

CONFIG = str(QUICKSTART.relative_to(REPOSITORY))
TOKEN = "f1e2d3c4b5a60718293a4b5c6d7e8f90"
RUN_TOKEN = "this-is-shown-nowhere"
SHORT = ("--steps=2", "--evaluation.max_tasks=8")


@pytest.fixture(scope="module")
def guarded() -> Iterator[RayCluster]:
    """Two nodes that ask for a token: the head trains and verifies, the other one generates."""
    cluster = RayCluster([{"train": 4.0}, {"generate": 4.0}], token=TOKEN)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def opened() -> Iterator[RayCluster]:
    """One node that asks for nothing."""
    cluster = RayCluster([{}])
    yield cluster
    cluster.stop()


def submit(
    cluster: RayCluster, *options: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, from the repository's root."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "orchestrator.cli", "submit", CONFIG),
            *(f"--address={cluster.url}", *options),
        ],
        cwd=REPOSITORY,
        env={**cluster.environment, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def submitted(guarded: RayCluster) -> subprocess.CompletedProcess[str]:
    """A whole run with roles placed by custom resources."""
    return submit(
        guarded,
        *SHORT,
        f"--runs-folder={guarded.folder}/runs",
        "--rollout.resources={generate = 1}",
        "--verifiers.resources={train = 1}",
        "--learner.resources={train = 1}",
        environment={"SLIPSTREAM_TOKEN": RUN_TOKEN},
    )


def test_a_run_is_followed_to_its_end(
    guarded: RayCluster, submitted: subprocess.CompletedProcess[str]
) -> None:
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    assert submitted.stdout.count("bottleneck:") == 2
    (folder,) = (guarded.folder / "runs").glob("quickstart-*")
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2
    assert "127.0.0.1" not in submitted.stdout.partition("metrics: ")[2].splitlines()[0]


def test_roles_run_where_their_resources_are(
    guarded: RayCluster, submitted: subprocess.CompletedProcess[str]
) -> None:
    assert submitted.returncode == 0
    places: dict[str, set[str]] = {}
    for actor in guarded.state("actors"):
        places.setdefault(actor["class_name"], set()).add(actor["node_id"])
    train, generate = guarded.node_with("train"), guarded.node_with("generate")
    assert train != generate
    assert places["RolloutWorker"] == {generate}
    assert places["VerifierWorker"] == places["_RankActor"] == {train}


def test_the_run_token_is_shown_nowhere(
    guarded: RayCluster, submitted: subprocess.CompletedProcess[str]
) -> None:
    assert RUN_TOKEN not in submitted.stdout + submitted.stderr
    (folder,) = (guarded.folder / "runs").glob("quickstart-*")
    texts = [path for path in folder.rglob("*") if path.suffix in (".json", ".jsonl", ".log")]
    # control.json is where the token belongs; it goes when the run ends.
    assert not [path for path in texts if RUN_TOKEN in path.read_text(errors="replace")]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RAY_AUTH_MODE": "disabled"}, "set RAY_AUTH_MODE=token"),
        ({"RAY_AUTH_TOKEN": "0" * 32}, "refuses the token that was sent"),
        ({"RAY_AUTH_TOKEN_PATH": "/nowhere/token"}, "Ray finds none"),
    ],
)
def test_tokens_are_explained(guarded: RayCluster, environment: dict[str, str], said: str) -> None:
    refused = submit(guarded, environment=environment)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert TOKEN not in refused.stderr


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
    assert "slipstream: no run at 'latest'" in failed.stdout
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
    assert "CPU needed, 2 there" in refused.stdout + refused.stderr
