"""The package: Ray's rules, its size to the byte, and what is said of one that is too big."""

from pathlib import Path
from zipfile import ZipFile

import pytest
from ray._private.ray_constants import get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import create_package

from orchestrator.submission.package import EXCLUDES, list_package, mebibytes, size_problem


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name, size in {
        "run.toml": 10,
        "data/train.jsonl": 3000,
        "data/runs/kept.txt": 1,
        "model/weights.bin": 200_000,
        "secret/ignored.txt": 7,
        "scratch/big.bin": 50,
        "runs/old/metrics.jsonl": 99,
        ".git/objects/ab": 99,
        ".venv/bin/python": 99,
        "code/__pycache__/a.pyc": 99,
        "code/a.py": 5,
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    (folder / ".gitignore").write_text("secret/\n")
    (folder / ".rayignore").write_text("scratch\n")
    return folder


def test_what_no_run_needs_is_left_out(project: Path) -> None:
    assert sorted(list_package(project).files) == [
        ".gitignore",
        ".rayignore",
        "code/a.py",
        "data/runs/kept.txt",
        "data/train.jsonl",
        "model/weights.bin",
        "run.toml",
    ]


def test_it_is_what_ray_packs_to_the_byte(project: Path, tmp_path: Path) -> None:
    archive = tmp_path / "archive.zip"
    excludes = [*get_runtime_env_default_excludes(), *EXCLUDES]
    create_package(str(project), archive, include_gitignore=True, excludes=excludes)
    package = list_package(project)
    with ZipFile(archive) as packed:
        assert sorted(package.files) == sorted(packed.namelist())
    assert package.size_bytes == archive.stat().st_size


def test_gitignore_is_ignored_where_ray_is_told_so(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "1")
    files = list_package(project).files
    assert "secret/ignored.txt" in files
    assert "scratch/big.bin" not in files


def test_too_big_names_the_biggest(project: Path) -> None:
    package = list_package(project)
    assert size_problem(package, package.size_bytes) is None
    problem = size_problem(package, package.size_bytes - 1)
    assert problem is not None
    assert "model/weights.bin (0.2 MiB), data/train.jsonl (2.9 KiB)" in problem
    assert "\n" not in problem


def test_names_inside(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = list_package(project)
    monkeypatch.chdir(project)
    assert package.inside(Path("data/../run.toml")) == "run.toml"
    assert package.inside(Path("../other")) is None
    assert package.holds("model")
    assert not package.holds("mode")


def test_sizes_for_a_reader() -> None:
    assert mebibytes(100 << 20) == "100.0 MiB"
    assert mebibytes(2048) == "2.0 KiB"
