"""How checkpoint folders come, replace one another and go."""

from pathlib import Path

import pytest

from learner.checkpoint import (
    commit,
    recover_replaced,
    staging_folder,
)
from learner.layout import COMPLETE, finished_steps


def write_staging(folder: Path, content: str) -> None:
    staging = staging_folder(folder)
    staging.mkdir()
    (staging / "content").write_text(content)


def contents(parent: Path) -> dict[str, str]:
    return {path.name: (path / "content").read_text() for path in parent.iterdir()}


def test_a_commit_keeps_the_newest_by_number(tmp_path: Path) -> None:
    for step in (9, 10, 11):
        write_staging(tmp_path / f"step_{step}", str(step))
        commit(tmp_path / f"step_{step}", keep=2)
    assert contents(tmp_path) == {"step_10": "10", "step_11": "11"}


def test_a_commit_replaces_a_checkpoint_of_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "step_3"
    for content in ("old", "new"):
        write_staging(folder, content)
        commit(folder, keep=2)
    assert contents(tmp_path) == {"step_3": "new"}
    assert finished_steps(tmp_path) == [3]


@pytest.mark.parametrize("renamed", [False, True])
def test_a_replacement_that_was_interrupted_leaves_a_whole_checkpoint(
    tmp_path: Path, renamed: bool
) -> None:
    folder, aside = tmp_path / "step_3", tmp_path / ".step_3.replaced"
    write_staging(folder, "old")
    commit(folder, keep=2)
    folder.rename(aside)
    if renamed:
        write_staging(folder, "new")
        (staging_folder(folder) / COMPLETE).touch()
        staging_folder(folder).rename(folder)
    recover_replaced(tmp_path)
    assert contents(tmp_path) == {"step_3": "new" if renamed else "old"}
    assert finished_steps(tmp_path) == [3]


def test_a_commit_after_an_interrupted_one_succeeds(tmp_path: Path) -> None:
    folder = tmp_path / "step_3"
    write_staging(folder, "old")
    commit(folder, keep=2)
    folder.rename(tmp_path / ".step_3.replaced")
    write_staging(folder, "new")
    commit(folder, keep=2)
    assert contents(tmp_path) == {"step_3": "new"}
