"""The resource plan, what is missing, and the warnings."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.check import missing_inputs, objective_fields, resource_plan, warnings
from orchestrator.config import RunConfig


def config(tmp_path: Path, **tables: Any) -> RunConfig:
    raw: dict[str, Any] = {
        "name": "tiny",
        "steps": 10,
        "model": {"path": "./model"},
        "data": {
            "train": {"reasoning_gym": "countdown", "size": 9, "seed": 1},
            "held_out": {"reasoning_gym": "countdown", "size": 9, "seed": 1000},
        },
        "rollout": {
            "samples_per_group": 4,
            "sampling": {"max_tokens": 16},
            "engine": {"max_num_seqs": 32},
        },
        "learner": {"groups_per_batch": 4},
    }
    for name, table in tables.items():
        raw[name] = {**raw.get(name, {}), **table} if isinstance(table, dict) else table
    return RunConfig.model_validate(raw, context={"folder": tmp_path})


def test_plan_counts_what_ray_will_reserve(tmp_path: Path) -> None:
    plan = resource_plan(
        config(
            tmp_path,
            rollout={"workers": 3, "cpus": 2, "gpus": 1, "resources": {"fast": 1}, "threads": 2},
            verifiers={"workers": 2, "cpus": 0.5},
            learner={"ranks": 2, "gpus": 1},
        )
    )
    assert plan.total == {"CPU": 3 * 2 + 2 * 0.5 + 2, "GPU": 3 + 2, "fast": 3}
    assert {role.role: role.processes for role in plan.roles}["rollout"] == 3
    assert plan.threads == 3 * 2 + 2


def test_objective_is_shown_expanded(tmp_path: Path) -> None:
    fields = objective_fields(
        config(tmp_path, max_staleness=1, learner={"objective": {"preset": "dr_grpo"}})
    )
    assert fields["advantage"]["scale"] == "none"
    assert fields["aggregation"] == {"kind": "constant", "max_tokens": 16}
    assert fields["max_staleness"] == 1


def test_missing_inputs_are_all_named(tmp_path: Path) -> None:
    train = [
        {"path": "gone.jsonl"},
        {"path": "tasks.csv"},
        {"path": "here.jsonl", "verifier": "exakt"},
    ]
    (tmp_path / "here.jsonl").touch()
    held_out = {"path": "here.jsonl", "verifier": "exact"}
    (tmp_path / "model").mkdir()
    problems = missing_inputs(config(tmp_path, data={"train": train, "held_out": held_out}))
    assert [problem.key for problem in problems] == [
        "model.path",
        "data.train.0.path",
        "data.train.1.path",
        "data.train.2.verifier",
    ]
    assert "holds no config.json" in str(problems[0])
    assert "'exact'" in str(problems[3])


def test_nothing_is_missing_when_everything_is_there(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    assert missing_inputs(config(tmp_path)) == []


@pytest.mark.parametrize(
    ("tables", "cores", "says"),
    [
        ({"rollout": {"threads": 4}}, 2, "5 compute threads share 2 cores"),
        ({"queue": {"max_groups": 9}}, 8, "max_groups 9 is below the 12 groups"),
        ({"rollout": {"workers": 4}}, 8, "32 groups at once and only 12"),
        ({"model": {"path": "org/name"}}, 8, "model-hub name"),
        ({"learner": {"schedule": {"warmup_steps": 10}}}, 8, "warm-up never ends"),
        (
            {"learner": {"objective": {"preset": "gspo", "clip": {"low": 0.2, "high": 0.2}}}},
            8,
            "never clips",
        ),
    ],
)
def test_each_warning_has_its_cause(
    tmp_path: Path, tables: dict[str, Any], cores: int, says: str
) -> None:
    assert warnings(config(tmp_path), cores=8) == []
    (note,) = warnings(config(tmp_path, **tables), cores=cores)
    assert says in note


def test_cores_of_this_machine_do_not_matter_on_a_cluster(tmp_path: Path) -> None:
    assert warnings(config(tmp_path, rollout={"threads": 64}), cores=None) == []
