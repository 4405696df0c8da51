from collections.abc import Iterator
from pathlib import Path

import pytest
from steering_double import Live, live


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_TOKEN", raising=False)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Live]:
    with live(tmp_path) as served:
        yield served
