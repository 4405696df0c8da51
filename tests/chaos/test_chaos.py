"""Seeded random faults on a live run of the quick start; afterwards everything has to add up.

`make chaos SEEDS=30` plays thirty seeds; the tests play the few of `FIXED`.
"""

import json
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from faults import FAULTS, LIMIT_S, Scene
from live import QUICKSTART, LiveRun

from orchestrator.history.ledger_file import read_history
from orchestrator.history.transitions import Consumed, Stepped
from orchestrator.steering import Role, RunStatus

pytestmark = pytest.mark.integration

FIXED = (0,)
SEEDS = range(int(os.environ["CHAOS_SEEDS"])) if "CHAOS_SEEDS" in os.environ else FIXED
FAULTS_PER_SEED = 3
MAX_STALENESS = 2
OPTIONS = [
    *("--steps", "100000"),
    *("--max_staleness", str(MAX_STALENESS)),
    *("--evaluation.max_tasks", "4"),
    *("--learner.groups_per_batch", "4"),
    *("--checkpoint.every", "5"),
    *("--checkpoint.export", "false"),
    # Hung processes are given up soon.
    *("--rollout.progress_timeout_s", "20"),
    *("--rollout.sync_timeout_s", "20"),
    *("--learner.step_timeout_s", "30"),
    *("--learner.collective_timeout_s", "20"),
    *("--supervision.restarts_per_hour", "50"),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.timeout(1500)
def test_nothing_is_lost_whatever_dies(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    scene = Scene(LiveRun(QUICKSTART, tmp_path, OPTIONS), OPTIONS)
    try:
        scene.more_steps(2)
        for fault in chance.sample(FAULTS, FAULTS_PER_SEED):
            time.sleep(chance.uniform(0, 3))
            scene.story.append(fault.__name__)
            fault(scene, chance)
            scene.more_steps(2)
        scene.until(_whole, "whole again, with every worker at the newest weights")
        assert scene.run.command("stop").returncode == 0
        assert scene.run.wait(LIMIT_S) == 0, scene.told
    finally:
        if scene.run.process.poll() is None:
            scene.run.process.kill()
    _adds_up(scene)


def _whole(status: RunStatus) -> bool:
    """Whether every fleet is at its target, and nobody generates with old weights."""
    full = all(f.count("ready") == f.target == len(f.workers) for f in status.fleets)
    rollout = next(fleet for fleet in status.fleets if fleet.role is Role.ROLLOUT)
    return full and all(worker.version == status.version for worker in rollout.workers)


def _adds_up(scene: Scene) -> None:
    told = scene.run.command("ledger", "--check")
    assert told.returncode == 0, told.stdout + scene.told
    report = json.loads(told.stdout.splitlines()[-1])
    assert report["balanced"] and report["failed_tasks"] == 0, report
    history = list(read_history(scene.run.directory / "ledger.sqlite"))
    steps = [t for t in history if isinstance(t, Stepped)]
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    versions = [step.version for step in steps]
    assert versions == sorted(versions), "labels grow"
    consumed = Counter(t.group_id for t in history if isinstance(t, Consumed))
    assert set(consumed.values()) == {1}, "each group is trained once"
    lags = [record["staleness_max"] for record in scene.run.steps()]
    assert max(lag for lag in lags if lag is not None) <= MAX_STALENESS
