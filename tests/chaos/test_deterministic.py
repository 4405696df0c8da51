"""A deterministic run comes to the same weights bit for bit, whatever dies outside the engine."""

import random
import time
from pathlib import Path

import pytest
from faults import LIMIT_S, Scene, kill_driver, kill_learner_rank, kill_verifier_worker
from live import QUICKSTART, LiveRun

from orchestrator.history.replay import compare

pytestmark = [pytest.mark.integration, pytest.mark.heavy]

STEPS = 8
OPTIONS = [
    *("--steps", str(STEPS)),
    *("--deterministic", "true"),
    *("--evaluation.max_tasks", "4"),
    *("--learner.groups_per_batch", "2"),
    *("--checkpoint.every", "3"),
    *("--checkpoint.export", "false"),
]


def final(run: LiveRun) -> Path:
    """The last checkpoint of a run that has ended well."""
    assert run.wait(LIMIT_S) == 0, run.output
    return run.directory / f"checkpoints/step_{STEPS}"


@pytest.mark.timeout(1200)
def test_faults_outside_the_engine_leave_no_trace(tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    (tmp_path / "disturbed").mkdir()
    undisturbed = final(LiveRun(QUICKSTART, tmp_path / "undisturbed", OPTIONS))
    scene = Scene(LiveRun(QUICKSTART, tmp_path / "disturbed", OPTIONS), OPTIONS)
    chance = random.Random(0)
    try:
        scene.until(lambda s: s.step >= 1, "at step 1")
        for fault in (kill_verifier_worker, kill_driver, kill_learner_rank):
            scene.story.append(fault.__name__)
            fault(scene, chance)
            time.sleep(0.5)
        disturbed = final(scene.run)
    finally:
        if scene.run.process.poll() is None:
            scene.run.process.kill()
    found = compare(undisturbed, disturbed, tmp_path)
    assert found.tensors > 30 and found.different == {}, scene.told
