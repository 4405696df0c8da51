"""The run configuration: what is read, what is filled in, and how refusals read."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import RunConfig
from orchestrator.config_file import known_keys, load, parse_value
from orchestrator.config_reference import reference
from orchestrator.data_config import FileSource, GymSource
from orchestrator.errors import ConfigError, Problem, UsageError
from orchestrator.run_directory import RunDirectory

MINIMAL = """
name = "tiny"
steps = 10
[model]
path = "./model"
[data]
train = {reasoning_gym = "basic_arithmetic", size = 100, seed = 1}
held_out = {reasoning_gym = "basic_arithmetic", size = 10, seed = 1000}
[rollout]
samples_per_group = 4
sampling = {max_tokens = 16}
engine = {max_model_len = 64, max_num_seqs = 32}
[learner]
groups_per_batch = 4
objective = {preset = "dr_grpo"}
"""


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def refused(path: Path, *overrides: tuple[str, str]) -> dict[str, Problem]:
    """Problems of a configuration that must be refused, by key."""
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return {problem.key: problem for problem in caught.value.problems}


def test_bounds_of_the_run_are_filled_into_objective_and_queue(config_path: Path) -> None:
    config = load(config_path, [("max_staleness", "3")])
    assert config.learner.objective.max_staleness == 3
    assert config.learner.objective.aggregation.max_tokens == 16
    assert config.queue.max_groups == 4 * 4
    assert config.resolved() == config


def test_the_written_config_reads_back_as_the_same_run(config_path: Path, tmp_path: Path) -> None:
    config = load(config_path, [("learner.optimizer.lr", "1e-4")])
    run = RunDirectory.create(tmp_path / "runs", config.name)
    run.write_config(config.model_dump(mode="json"))
    assert load(run.config_json) == config


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-2.5", -2.5),
        ("1e-4", 1e-4),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ('"3"', "3"),
        ("dapo", "dapo"),
        ("a b", "a b"),
        ("2024-01-01", "2024-01-01"),
        ("1\nother = 2", "1\nother = 2"),
        ("{seed = 1}", {"seed": 1}),
    ],
)
def test_override_values_are_toml_or_bare_strings(text: str, value: Any) -> None:
    assert parse_value(text) == value


def test_overrides_reach_every_depth_and_lists(config_path: Path) -> None:
    overrides = [
        ("seed", "3"),
        ("learner.optimizer.lr", "1e-4"),
        ("learner.objective.clip.high", "0.3"),
        ("data.train", '[{reasoning_gym = "countdown", size = 5}, {path = "a.jsonl"}]'),
        ("data.train.0.size", "7"),
        ("evaluation.every", "5"),
    ]
    config = load(config_path, overrides)
    assert (config.seed, config.learner.optimizer.lr) == (3, 1e-4)
    assert config.learner.objective.clip.high == 0.3
    assert config.learner.objective.advantage.scale == "none"  # the preset still holds
    assert config.data.train == (
        GymSource(reasoning_gym="countdown", size=7),
        FileSource(path=config_path.parent / "a.jsonl"),
    )
    assert config.evaluation.every == 5


def test_override_of_a_value_as_if_it_were_a_table(config_path: Path) -> None:
    with pytest.raises(UsageError, match="steps is 10, a value and not a table"):
        load(config_path, [("steps.more", "1")])
    with pytest.raises(UsageError, match=r"data\.train is a list of 1"):
        load(config_path, [("data.train", "[{path = 'a.jsonl'}]"), ("data.train.4", "1")])


def test_relative_paths_count_from_the_file(
    config_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(elsewhere)
    config = load(config_path, [("data.held_out", '{path = "../tasks.parquet"}')])
    assert config.model.path == str(tmp_path / "model")
    assert config.data.held_out == (FileSource(path=tmp_path.parent / "tasks.parquet"),)


def test_model_path_is_a_folder_where_it_can_be_and_else_a_hub_name(config_path: Path) -> None:
    hub = load(config_path, [("model.path", "org/some-model")]).model
    assert (hub.path, hub.is_folder) == ("org/some-model", False)
    (config_path.parent / "org" / "some-model").mkdir(parents=True)
    assert load(config_path, [("model.path", "org/some-model")]).model.is_folder
    assert load(config_path, [("model.path", "../absent")]).model.is_folder


def test_all_problems_are_reported_at_once_each_with_its_key(config_path: Path) -> None:
    problems = refused(
        config_path,
        ("steps", "0"),
        ("name", "a/b"),
        ("learner.optimizer.learning_rate", "1"),
        ("learner.lr", "1"),
        ("data.train.sze", "3"),
        ("data.held_out.size", "many"),
        ("data.template", "no slot"),
        ("rollout", "3"),
        ("frobnicate", "1"),
    )
    assert problems.keys() == {
        "steps",
        "name",
        "learner.optimizer.learning_rate",
        "learner.lr",
        "data.train.sze",
        "data.held_out.size",
        "data.template",
        "rollout",
        "frobnicate",
    }
    assert str(problems["steps"]) == "steps: 0; expected greater than or equal to 1."
    assert problems["learner.optimizer.learning_rate"].hint == "Did you mean learner.optimizer.lr?"
    assert problems["learner.lr"].hint == "Did you mean learner.optimizer.lr?"
    assert problems["data.train.sze"].hint == "Did you mean data.train.size?"
    assert "'many'" in problems["data.held_out.size"].found
    assert "{prompt}" in problems["data.template"].found
    assert problems["rollout"].expected == "a table of keys"
    assert "max_staleness" in problems["frobnicate"].expected


def test_missing_keys_are_named(tmp_path: Path) -> None:
    path = tmp_path / "empty.toml"
    path.write_text("")
    problems = refused(path)
    assert problems.keys() == {"name", "steps", "model", "data", "rollout", "learner"} - {
        name for name, field in RunConfig.model_fields.items() if not field.is_required()
    }
    assert problems["steps"].found == "missing"


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        ([("queue.max_groups", "3")], "queue.max_groups", "at least learner.groups_per_batch, 4"),
        (
            [
                ("rollout.sampling.max_tokens", "40000"),
                ("rollout.engine.max_model_len", "80000"),
                ("queue.max_bytes", "1048576"),
            ],
            "queue.max_bytes",
            "may not hold one batch",
        ),
        ([("rollout.samples_per_group", "1")], "learner.objective", "at least two samples"),
        ([("learner.objective.max_staleness", "5")], "learner.objective", "contradicts the run's"),
        ([("evaluation.samples_per_task", "33")], "evaluation.samples_per_task", "at most"),
        ([("rollout.samples_per_group", "33")], "rollout", "max_num_seqs"),
        ([("rollout.engine.max_model_len", "16")], "rollout", "no room for a prompt"),
        (
            [("data.held_out.seed", "1"), ("data.held_out.size", "100")],
            "data.held_out",
            "training source too",
        ),
    ],
)
def test_tables_that_contradict_each_other(
    config_path: Path, overrides: list[tuple[str, str]], key: str, says: str
) -> None:
    problems = refused(config_path, *overrides)
    assert problems.keys() == {key}
    assert says in str(problems[key])


def test_several_contradictions_come_together(config_path: Path) -> None:
    problems = refused(config_path, ("queue.max_groups", "1"), ("rollout.samples_per_group", "1"))
    assert problems.keys() == {"queue.max_groups", "learner.objective"}


def test_one_sample_per_group_is_fine_without_a_group_baseline(config_path: Path) -> None:
    one = ("rollout.samples_per_group", "1")
    assert load(config_path, [one, ("learner.objective", '{preset = "reinforce_pp"}')])


def test_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text('name = "x"\nsteps = = 3\n')
    with pytest.raises(ConfigError, match=r"bad\.toml(?s:.*)line 2"):
        load(path)


def test_unreadable_files_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load(tmp_path / "absent.toml")
    with pytest.raises(UsageError, match="directory"):
        load(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"name = \xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        load(tmp_path / "latin.toml")


def test_every_field_of_every_table_is_documented() -> None:
    def undocumented(model: Any, prefix: str = "") -> list[str]:
        return [prefix + n for n, field in model.model_fields.items() if not field.description]

    assert undocumented(RunConfig) == []
    for name, field in RunConfig.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            assert undocumented(field.annotation, f"{name}.") == []
    assert "learner.optimizer.lr" in set(known_keys())


def test_reading_a_config_imports_nothing_heavy(config_path: Path) -> None:
    code = (
        "import sys, json; from pathlib import Path; from orchestrator.config_file import load; "
        "load(Path(sys.argv[1])); print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(config_path)], capture_output=True, text=True, check=True
    )
    assert {"torch", "ray", "vllm", "transformers"}.isdisjoint(json.loads(done.stdout))


@pytest.mark.parametrize("seed", ["1", "100"])
def test_generated_held_out_tasks_must_be_clear_of_the_training_ones(
    config_path: Path, seed: str
) -> None:
    problems = refused(config_path, ("data.held_out.seed", seed))
    assert "training source too" in str(problems["data.held_out"])
    assert load(config_path, [("data.held_out.seed", "101")]).seed == 0


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("steps", "'\"40\"'", "steps: '40'; expected a whole number"),
        ("seed", "true", "seed: true; expected a whole number"),
        ("learner.optimizer.lr", "'\"1e-4\"'", "learner.optimizer.lr: '1e-4'; expected a number"),
        ("learner.optimizer.betas", "[0.9, true]", "betas.1: true; expected a number"),
        ("metrics.enabled", "1", "metrics.enabled: 1; expected true or false"),
        ("rollout.resources", '{ node = "1" }', "rollout.resources.node: '1'; expected a number"),
        ("queue.max_groups", '"64"', "queue.max_groups: '64'; expected a whole number"),
        ("data.train", '{ reasoning_gym = "x", size = "9" }', "data.train.size: '9'"),
    ],
)
def test_a_value_of_another_kind_is_refused(
    config_path: Path, key: str, value: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(config_path, [(key, value.strip("'"))])
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"host": "0.0.0.0", "token": "none"}, "without a token"),
        ({"host": "node", "token": "none"}, "without a token"),
        ({"tls_cert": "cert.pem"}, "go together"),
    ],
)
def test_an_open_control_port_is_refused(
    config_path: Path, table: dict[str, str], words: str
) -> None:
    overrides = [(f"control.{key}", value) for key, value in table.items()]
    with pytest.raises(ConfigError, match=words):
        load(config_path, overrides)


def test_workers_must_start_within_the_autoscaler_s_bounds(config_path: Path) -> None:
    overrides = [("autoscaler.enabled", "true"), ("rollout.workers", "3")]
    with pytest.raises(ConfigError, match=r"autoscaler.rollout: .*3, is outside of 1 to 1"):
        load(config_path, overrides)


def test_the_configuration_reference_is_current() -> None:
    page = Path(__file__).parents[3] / "docs/configuration.md"
    assert page.read_text(encoding="utf-8") == reference(), "run `make docs`"


def test_the_configuration_reference_has_every_key() -> None:
    page, keys = reference(), list(known_keys())
    leaves = {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}
    missing = [key for key in leaves if f"| `{key}` |" not in page]
    assert {key.split(".")[1] for key in missing} == {*("held_out", "value_model", "verifiers")}, (
        "told before"
    )
