"""How a control service starts and ends: control.json, tokens, TLS, ports."""

import json
import logging
import os
import socket
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from certificates import write_certificate
from steering_double import STATUS, Live, live

from orchestrator.control.client import Client
from orchestrator.control.endpoint import Endpoint
from orchestrator.errors import RunError
from orchestrator.operation_config import ControlConfig


def test_control_json_is_its_owners_alone_and_goes_with_the_run(run: Live) -> None:
    path = run.directory / "control.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = json.loads(path.read_text())
    assert content == {
        "address": run.endpoint.address,
        "token": run.endpoint.token,
        "tls_ca": None,
        "run": "tiny",
        "pid": os.getpid(),
    }
    assert content["address"].startswith("127.0.0.1:")
    assert len(content["token"]) >= 32
    run.run(run.server.stop())
    assert [entry.name for entry in run.directory.iterdir()] == ["config.json"]


def test_a_token_of_the_environment_is_taken_and_never_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "a-very-special-token")
    with caplog.at_level(logging.DEBUG), live(tmp_path) as run:
        assert run.endpoint.token == "a-very-special-token"
        with Client(run.endpoint) as client:
            assert client.status() == STATUS
        with Client(replace(run.endpoint, token="not-it")) as client, pytest.raises(RunError):
            client.status()
    assert "control service at" in caplog.text
    assert "special" not in caplog.text
    assert "special" not in repr(run.endpoint)


@pytest.mark.parametrize("token", ["two words", "umläut", "line\nbreak"])
def test_a_token_that_cannot_be_sent_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", token)
    with pytest.raises(RunError, match="SLIPSTREAM_TOKEN holds"), live(tmp_path):
        pass


def test_tls_serves_who_trusts_the_certificate(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path, "run")
    other, _ = write_certificate(tmp_path, "other")
    config = ControlConfig(tls_cert=str(cert), tls_key=str(key))
    with live(tmp_path, config=config) as run:
        assert run.endpoint.tls_ca == cert.read_text()
        with Client(run.endpoint) as client:
            assert client.status() == STATUS
        for endpoint, says in (
            (replace(run.endpoint, tls_ca=other.read_text()), "must name this address"),
            (replace(run.endpoint, tls_ca=None), "If it uses TLS, name its certificate"),
        ):
            with (
                Client(endpoint, retry_delays_s=()) as client,
                pytest.raises(RunError, match=says),
            ):
                client.status()


@pytest.mark.parametrize("broken", ["absent", "garbage", "mismatch", "password"])
def test_certificates_that_do_not_load_are_refused_at_the_start(
    tmp_path: Path, broken: str
) -> None:
    cert, key = write_certificate(tmp_path, "run", password="x" if broken == "password" else "")
    if broken == "absent":
        key.unlink()
    elif broken == "garbage":
        cert.write_text("no certificate")
    elif broken == "mismatch":
        key = write_certificate(tmp_path, "other")[1]
    config = ControlConfig(tls_cert=str(cert), tls_key=str(key))
    with (
        pytest.raises(RunError, match=r"do not load: .*Expected a certificate chain"),
        live(tmp_path, config=config),
    ):
        pass
    assert not (tmp_path / "control.json").exists()


def test_a_taken_port_is_refused_even_if_its_owner_would_share_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(RunError, match=f"{port}: Address already"),
            live(tmp_path, config=ControlConfig(port=port)),
        ):
            pass


def test_two_services_never_share_a_port(run: Live, tmp_path: Path) -> None:
    port = int(run.endpoint.address.rpartition(":")[2])
    second = tmp_path / "second"
    second.mkdir()
    with (
        pytest.raises(RunError, match=r"Set control.port to a free port"),
        live(second, config=ControlConfig(port=port)),
    ):
        pass


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_an_address_that_is_not_here_is_refused(tmp_path: Path, host: str) -> None:
    with (
        pytest.raises(RunError, match=f"cannot listen at {host}"),
        live(tmp_path, config=ControlConfig(host=host)),
    ):
        pass


def test_without_a_token_only_loopback_is_served(tmp_path: Path) -> None:
    with live(tmp_path, config=ControlConfig(token="none")) as run:
        assert run.endpoint.token is None
        with Client(run.endpoint) as client:
            assert client.status() == STATUS
    unsafe = ControlConfig.model_construct(
        enabled=True, host="0.0.0.0", port=0, token="none", tls_cert=None, tls_key=None
    )
    with (
        pytest.raises(RunError, match="everyone who reaches it could steer"),
        live(tmp_path, config=unsafe),
    ):
        pass


@pytest.mark.parametrize("host", ["node", "0.0.0.0"])
def test_the_address_is_one_that_others_can_call(tmp_path: Path, host: str) -> None:
    import ray

    with live(tmp_path, config=ControlConfig(host=host)) as run:
        assert run.endpoint.host == ray.util.get_node_ip_address()
        with Client(run.endpoint) as client:
            assert client.status() == STATUS


def test_an_endpoint_lacking_something_is_refused() -> None:
    good = Endpoint(address="h:1", token=None).as_dict()
    assert Endpoint.parse(good).address == "h:1"
    for bad in ({}, [], None, {**good, "pid": "1"}, {**good, "token": 5}):
        with pytest.raises(ValueError):
            Endpoint.parse(bad)
