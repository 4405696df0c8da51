"""Act 1: a real Prometheus scrapes the live run; every panel and rule has something to say."""

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from live import REPOSITORY, LiveRun
from play import Play
from prometheus_server import Server, tools

pytestmark = pytest.mark.integration

PROMETHEUS = REPOSITORY / "deploy/prometheus"
LIMIT_S = 120.0
CONDITIONAL = "There is data only when"


@dataclass
class Scene:
    """A live run, and the Prometheus that has scraped it for a while."""

    run: LiveRun
    server: Server
    promtool: str

    def until(self, expression: str) -> None:
        """Wait until an expression returns something."""
        end = time.monotonic() + LIMIT_S
        while not self.server.query(expression):
            assert time.monotonic() < end, f"never: {expression}"
            time.sleep(0.5)


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return tools(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def scene(
    play: Play, binaries: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    folder, run = tmp_path_factory.mktemp("monitoring"), play.run
    server = Server(binaries["prometheus"], _config(folder, run.runs / "targets"), folder)
    try:
        play.client.checkpoint()
        yield Scene(run, server, binaries["promtool"])
    finally:
        server.close()


def _config(folder: Path, targets: Path) -> Path:
    """The shipped configuration, in a hurry and for this run's folder."""
    content = yaml.safe_load((PROMETHEUS / "local.yml").read_text())
    content["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    content["rule_files"] = [str(PROMETHEUS / "rules/*.yml")]
    content["scrape_configs"][0]["file_sd_configs"] = [
        {"files": [str(targets / "*.json")], "refresh_interval": "1s"}
    ]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(content))
    return path


def _panels() -> Iterator[dict[str, Any]]:
    for path in sorted((REPOSITORY / "deploy/grafana/dashboards").glob("*.json")):
        yield from json.loads(path.read_text())["panels"]


def _rules() -> Iterator[dict[str, Any]]:
    for path in sorted((PROMETHEUS / "rules").glob("*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from group["rules"]


def test_the_run_is_a_target_that_is_up(scene: Scene) -> None:
    scene.until('up{job="slipstream"} == 1')
    (up,) = scene.server.query('up{job="slipstream"}')
    assert up["metric"]["run"] == scene.run.directory.name


def test_every_panel_has_data_or_names_its_condition(scene: Scene) -> None:
    for panel in _panels():
        for target in panel["targets"]:
            expression = target["expr"].replace("$run", scene.run.directory.name)
            if CONDITIONAL in panel["description"]:
                scene.server.query(expression)
            else:
                scene.until(expression)


def test_every_rule_is_evaluated_and_every_recording_has_data(scene: Scene) -> None:
    for rule in _rules():
        if "record" in rule:
            scene.until(rule["expr"])
        else:
            scene.server.query(rule["expr"])
    with urllib.request.urlopen(f"http://{scene.server.address}/api/v1/rules") as answer:
        groups = json.load(answer)["data"]["groups"]
    told = [rule for group in groups for rule in group["rules"]]
    assert len(told) == len(list(_rules()))
    assert [rule["name"] for rule in told if rule.get("lastError")] == []


def test_no_alert_fires_on_a_healthy_run(scene: Scene) -> None:
    assert scene.server.query('ALERTS{alertstate="firing"}') == []


def test_promtool_finds_nothing_to_improve(scene: Scene) -> None:
    targets = json.loads((scene.run.directory / "prometheus_targets.json").read_text())
    (address,) = targets[0]["targets"]
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        page = answer.read()
    checked = subprocess.run(
        [scene.promtool, "check", "metrics"], input=page, capture_output=True, timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout + checked.stderr == b""


@pytest.mark.parametrize("name", ["local", "ray"])
def test_scrape_configurations_are_valid(binaries: dict[str, str], name: str) -> None:
    command = [binaries["promtool"], "check", "config", str(PROMETHEUS / f"{name}.yml")]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_alerts_fire_on_what_they_are_for(binaries: dict[str, str]) -> None:
    command = [binaries["promtool"], "test", "rules", str(PROMETHEUS / "tests/alerts_test.yml")]
    tested = subprocess.run(command, capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout + tested.stderr
