"""The one live run of the acts in this folder, which pytest plays in the order of their names."""

from collections.abc import Iterator

import pytest
from live import QUICKSTART, LiveRun
from play import Play


@pytest.fixture(scope="session")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    options = ["--steps", "100000", "--evaluation.max_tasks", "16"]
    play = Play(LiveRun(QUICKSTART, tmp_path_factory.mktemp("play"), options))
    try:
        play.begin()
        yield play
    finally:
        play.close()
