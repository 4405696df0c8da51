"""What a configuration names has to be in the package, or be a path of the cluster."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator.config_file import load, read
from orchestrator.submission.inputs import cluster_paths, input_problems
from orchestrator.submission.package import list_package

CONFIG = """
name = "test"
steps = 1
[model]
path = "./model"
[data]
train = { path = "train.jsonl" }
held_out = { path = "held_out.jsonl" }
[rollout]
[learner]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "configs/model").mkdir(parents=True)
    (folder / "configs/run.toml").write_text(CONFIG)
    (folder / "configs/model/config.json").write_text("{}")
    for name in ("train.jsonl", "held_out.jsonl"):
        (folder / "configs" / name).write_text("{}\n")
    (tmp_path / "outside.jsonl").write_text("{}\n")
    return folder


def problems(project: Path, *overrides: tuple[str, str], config: str = "") -> list[str]:
    path = Path(config) if config else project / "configs/run.toml"
    return [
        str(problem)
        for problem in input_problems(
            read(path, overrides), load(path, overrides), path, list_package(project)
        )
    ]


def keys(found: Sequence[str]) -> list[str]:
    return [problem.split(":")[0] for problem in found]


def test_all_inside_is_fine(project: Path) -> None:
    assert problems(project) == []


def test_a_hub_name_needs_no_folder(project: Path) -> None:
    assert problems(project, ("model.path", "org/model")) == []


def test_missing_here(project: Path) -> None:
    found = problems(project, ("model.path", "./nowhere"), ("data.train.path", "none.jsonl"))
    assert keys(found) == ["model.path", "data.train.path"]


def test_outside_of_the_working_directory(project: Path) -> None:
    (found,) = problems(project, ("data.train.path", "../../outside.jsonl"))
    assert "leads out of the working directory" in found


def test_absolute_paths_are_of_the_cluster(project: Path) -> None:
    overrides = ("model.path", "/mnt/shared/model"), ("data.train.path", "/mnt/shared/a.parquet")
    assert problems(project, *overrides) == []
    raw = read(project / "configs/run.toml", overrides)
    assert [path.key for path in cluster_paths(raw)] == ["model.path", "data.train.path"]


def test_an_absolute_path_into_the_working_directory(project: Path) -> None:
    (found,) = problems(project, ("data.train.path", str(project / "configs/train.jsonl")))
    assert "expected a path relative to the configuration" in found


def test_left_out_by_an_ignore_file(project: Path) -> None:
    (project / ".gitignore").write_text("model/\n*.jsonl\n")
    found = problems(project)
    assert keys(found) == ["model.path", "data.train.path", "data.held_out.path"]
    assert all("is not uploaded" in problem for problem in found)


def test_a_configuration_outside(project: Path, tmp_path: Path) -> None:
    outside = tmp_path / "run.toml"
    outside.write_text(CONFIG.replace('"./model"', '"org/model"'))
    found = problems(project, config=str(outside))
    assert any("run.toml lies outside of the working directory" in problem for problem in found)
