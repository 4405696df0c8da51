"""The quick start, whole, on three seeds: it learns what it promises to learn."""

import pytest
from live import QUICKSTART, LiveRun

pytestmark = [pytest.mark.integration, pytest.mark.heavy]

RUN_LIMIT_S = 1200.0


@pytest.mark.timeout(RUN_LIMIT_S + 60)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_accuracy_rises(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    folder = tmp_path_factory.mktemp(f"seed{seed}")
    run = LiveRun(QUICKSTART, folder, ["--seed", str(seed)])
    assert run.wait(RUN_LIMIT_S) == 0, run.output
    summary = run.summary()
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    assert 0.15 <= before <= 0.45
    assert after >= before + 0.15
    assert after >= 1.5 * before
    assert summary["ledger"]["balanced"]
