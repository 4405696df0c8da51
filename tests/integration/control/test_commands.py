"""The commands end to end, and how a run is found."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import write_certificate
from steering_double import Live, live

from orchestrator.cli import main
from orchestrator.control.client import Client
from orchestrator.control.discovery import find
from orchestrator.control.endpoint import Endpoint
from orchestrator.control.service import ControlService
from orchestrator.errors import RunError, UsageError
from orchestrator.operation_config import ControlConfig
from orchestrator.steering import Activity, Role, RunState

Capture = pytest.CaptureFixture[str]


def test_every_command_does_what_it_says(run: Live, capsys: Capture) -> None:
    where = str(run.directory)
    for words, says in (
        (["status", where], "bottleneck  rollout: learner waited 75 %"),
        (["scale", where, "--rollout", "3", "--verifiers", "2"], "rollout: target 3, 1 ready now"),
        (["limits", where], "max_staleness 2, max_groups 16"),
        (["limits", where, "--max-staleness", "4"], "max_staleness 4, max_groups 16"),
        (["pause", "training", where], "paused: training"),
        (["resume", "training", where], "nothing is paused"),
        (["checkpoint", where], "checkpoint of step 12: /runs/tiny/checkpoints/step_12"),
        (["evaluate", where], "held-out accuracy 50.0% of 40 samples, 2 without a verdict"),
        (["stop", where], "stopping"),
    ):
        assert main(words) == 0
        assert says in capsys.readouterr().out
    assert run.steering.calls == [
        ("scale", Role.ROLLOUT, 3),
        ("scale", Role.VERIFIER, 2),
        ("set_limits", 4, None),
        ("pause", Activity.TRAINING),
        ("resume", Activity.TRAINING),
        ("checkpoint",),
        ("evaluate",),
        ("stop",),
    ]


def test_json_is_one_object(run: Live, capsys: Capture) -> None:
    assert main(["status", str(run.directory), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == "tiny"


@pytest.mark.parametrize(
    ("state", "said", "code"),
    [(RunState.ENDED, "the run has ended", 0), (RunState.FAILED, "the run has failed", 1)],
)
def test_watch_shows_snapshots_until_the_run_ends(
    run: Live, state: RunState, said: str, code: int
) -> None:
    command = [sys.executable, "-m", "orchestrator.cli", "status", str(run.directory)]
    with subprocess.Popen(
        [*command, "--watch", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout and watching.stderr
        assert json.loads(watching.stdout.readline())["step"] == 12
        run.steering.snapshot = replace(run.steering.snapshot, state=state)
        run.run(run.server.stop())
        rest = watching.stdout.read().splitlines()
        assert all(json.loads(line)["step"] == 12 for line in rest)
        assert watching.stderr.read().startswith(said)
    assert watching.returncode == code


def test_refusals_end_with_the_services_own_sentence(run: Live, capsys: Capture) -> None:
    where = str(run.directory)
    assert main(["scale", where, "--rollout", "99"]) == 2
    said = capsys.readouterr().err
    assert said == "slipstream: rollout cannot have 99 workers; expected 1 to 8.\n"
    assert main(["scale", where, "--rollout", "8"]) == 1
    assert "no room" in capsys.readouterr().err
    assert main(["scale", where]) == 2
    assert "scale needs --rollout N or --verifier N" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exited:
        main(["pause", "breathing", where])
    assert exited.value.code == 2


def test_a_run_is_found_by_latest_name_and_address(
    run: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "tiny").symlink_to(run.directory)
    (runs / "latest").symlink_to("tiny")
    assert find(None) == find("tiny") == find(str(run.directory)) == run.endpoint
    assert main(["pause", "generation"]) == 0
    assert main(["status"]) == 0
    assert "generation paused" in capsys.readouterr().out
    monkeypatch.setenv("SLIPSTREAM_TOKEN", run.endpoint.token or "")
    assert main(["status", run.endpoint.address]) == 0
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "wrong")
    assert main(["status", run.endpoint.address]) == 1
    assert "the token that was shown is wrong" in capsys.readouterr().err
    monkeypatch.delenv("SLIPSTREAM_TOKEN")
    assert main(["status", run.endpoint.address]) == 1
    assert "none was shown" in capsys.readouterr().err


def test_tls_ca_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    cert, key = write_certificate(tmp_path, "run")
    config = ControlConfig(tls_cert=str(cert), tls_key=str(key))
    with live(tmp_path, config=config) as run:
        monkeypatch.setenv("SLIPSTREAM_TOKEN", run.endpoint.token or "")
        assert main(["status", run.endpoint.address, "--tls-ca", str(cert)]) == 0
    for path, says in ((key, "holds no certificate"), (tmp_path / "none", "cannot be read")):
        assert main(["status", run.endpoint.address, "--tls-ca", str(path)]) == 2
        assert says in capsys.readouterr().err


def test_a_run_that_is_not_live_is_told_from_one_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text("{}")
    with pytest.raises(RunError, match="has ended or is still starting"):
        find("old", runs_folder=tmp_path)
    (tmp_path / "old" / "summary.json").write_text("{}")
    with pytest.raises(RunError, match=r"it has ended \(summary.json"):
        find("old", runs_folder=tmp_path)
    (tmp_path / "old" / "control.json").write_text('{"address": ')
    with pytest.raises(RunError, match="is of no use"):
        find("old", runs_folder=tmp_path)
    with pytest.raises(UsageError, match="no run at 'other'"):
        find("other", runs_folder=tmp_path)


def free_address(run: Live) -> str:
    """An address where nothing answers any more."""
    run.run(run.server.stop())
    return run.endpoint.address


def test_a_stale_control_json_names_the_process_that_is_gone(run: Live) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stale = Endpoint(address=free_address(run), token="t", run="tiny", pid=gone.pid)
    with Client(stale) as client, pytest.raises(RunError, match=f"process {gone.pid} is gone"):
        client.status()


def test_an_address_where_nothing_answers(run: Live) -> None:
    silent = Endpoint(address=free_address(run), token="t")
    with (
        Client(silent, retry_delays_s=(0.01,)) as client,
        pytest.raises(RunError, match=r"cannot be reached: .*Check that the run is still live"),
    ):
        client.stop()


class LosesAnswers(ControlService):
    """Does what it is asked and then loses the first two answers."""

    lost = 0

    async def Stop(self, request: Any, context: Any) -> Any:
        answer = await super().Stop(request, context)
        if self.lost < 2:
            self.lost += 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone for a moment")
        return answer


def test_a_lost_answer_is_asked_for_again_and_nothing_is_done_twice(tmp_path: Path) -> None:
    with live(tmp_path, kind=LosesAnswers) as run:
        with Client(run.endpoint, retry_delays_s=(0.01, 0.01)) as client:
            client.stop()
        assert run.steering.calls == [("stop",)]
        assert isinstance(run.service, LosesAnswers)
        assert run.service.lost == 2


def test_a_deadline_that_passes_leaves_the_work_going(run: Live) -> None:
    run.close_gate()
    with (
        Client(run.endpoint, long_deadline_s=0.2) as client,
        pytest.raises(RunError, match=r"within 0.2 s. What was asked for goes on"),
    ):
        client.checkpoint()
    run.open_gate()


def test_clients_import_neither_ray_nor_torch(run: Live) -> None:
    code = (
        "import sys\nfrom orchestrator.cli import main\n"
        f"assert main(['status', {str(run.directory)!r}]) == 0\n"
        "assert {'ray', 'torch', 'numpy', 'vllm'}.isdisjoint(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
