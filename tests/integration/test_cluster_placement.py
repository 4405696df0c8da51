"""A run submitted to two raylets that ask for a token, its roles placed by custom resources."""

import json
import subprocess
from collections.abc import Iterator

import pytest
from ray_cluster import RayCluster, submit

pytestmark = pytest.mark.integration

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
def submitted(guarded: RayCluster) -> subprocess.CompletedProcess[str]:
    """A whole run with roles placed by custom resources."""
    return submit(
        guarded,
        *SHORT,
        f"--runs-folder={guarded.folder}/runs",
        "--rollout.resources={generate = 1}",
        "--verifiers.resources={train = 1}",
        "--learner.resources={train = 1}",
        environment={"SLIPSTREAM_TOKEN": RUN_TOKEN},  # stays here
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
