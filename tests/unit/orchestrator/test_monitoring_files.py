"""What is shipped for Prometheus and Grafana speaks of metrics that exist, and of all of them."""

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from orchestrator.metric_catalogue import CATALOGUE, PREFIX

REPOSITORY = Path(__file__).parents[3]
PROMETHEUS, GRAFANA = REPOSITORY / "deploy/prometheus", REPOSITORY / "deploy/grafana"
GUIDE = (REPOSITORY / "docs/operations.md").read_text(encoding="utf-8")
ENDINGS = ("", "_bucket", "_sum", "_count")


def dashboards() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").glob("*"))]


def panel_expressions() -> Iterator[tuple[str, str]]:
    """(where, expression) of every query of every panel."""
    for dashboard in dashboards():
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                yield f"{dashboard['title']}: {panel['title']}", target["expr"]


def rules() -> list[dict[str, Any]]:
    found = []
    for path in sorted((PROMETHEUS / "rules").glob("*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            found += group["rules"]
    return found


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:[a-z]+:)?slipstream_[a-z0-9_:]+", expression))


def known_names() -> set[str]:
    """Every series of ours: those exported, with a histogram's endings, and those recorded."""
    exported = {
        metric.exported + ending
        for metric in CATALOGUE
        for ending in (ENDINGS if metric.kind == "histogram" else ENDINGS[:1])
    }
    return exported | {rule["record"] for rule in rules() if "record" in rule}


def test_every_metric_named_in_a_panel_or_a_rule_exists() -> None:
    named = [*panel_expressions(), *((str(rule), rule["expr"]) for rule in rules())]
    unknown = {where: names_in(e) - known_names() for where, e in named}
    assert not {where: names for where, names in unknown.items() if names}


def test_every_metric_is_on_a_panel_or_explained() -> None:
    shown = set().union(*(names_in(expression) for _, expression in panel_expressions()))
    for rule in rules():
        if rule.get("record") in shown:
            shown |= names_in(rule["expr"])
    for metric in CATALOGUE:
        on_a_panel = any(metric.exported + ending in shown for ending in ENDINGS)
        assert on_a_panel or f"`{metric.exported.removeprefix(PREFIX)}`" in GUIDE, metric.name


def test_the_operations_guide_explains_every_metric_and_alert() -> None:
    told = set(re.findall(r"`([a-z0-9_]+)`", GUIDE))
    assert {metric.exported.removeprefix(PREFIX) for metric in CATALOGUE} - told == set()
    for rule in rules():
        if "alert" in rule:
            assert f"`{rule['alert']}`" in GUIDE


def test_each_alert_says_what_to_do_and_where_to_read_on() -> None:
    anchors = {
        re.sub(r"[^a-z -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^## (.+)$", GUIDE, re.MULTILINE)
    }
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"]["summary"]
            assert rule["annotations"]["action"].rpartition("operations.md#")[2] in anchors


def test_each_panel_says_how_to_read_it() -> None:
    for dashboard in dashboards():
        places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
        assert len(set(places)) == len(places)
        for panel in dashboard["panels"]:
            assert len(panel["description"]) >= 10 and panel["description"].endswith(".")


def test_there_is_a_dashboard_for_each_concern() -> None:
    assert {dashboard["uid"].removeprefix("slipstream-") for dashboard in dashboards()} == {
        *("overview", "learning", "staleness", "engines", "verifiers", "weight-sync", "failures")
    }


def test_the_dashboards_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GRAFANA))
    make = _load(GRAFANA / "make_dashboards.py")
    for dashboard in make.DASHBOARDS:
        path = GRAFANA / f"dashboards/{dashboard.name}.json"
        assert path.read_text(encoding="utf-8") == make.dashboard_json(dashboard), "run `make docs`"


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["local", "ray", "kubernetes"])
def test_scrape_configurations_name_their_jobs_and_rules(name: str) -> None:
    content = yaml.safe_load((PROMETHEUS / f"{name}.yml").read_text())
    assert content["rule_files"] == ["rules/*.yml"]
    assert content["scrape_configs"][0]["job_name"] == "slipstream"
    discovery = {"local": "file_sd_configs", "ray": "file_sd_configs"}.get(
        name, "kubernetes_sd_configs"
    )
    assert all(discovery in job for job in content["scrape_configs"])


def test_the_compose_file_mounts_what_exists_on_loopback() -> None:
    path = REPOSITORY / "deploy/compose.yaml"
    services = yaml.safe_load(path.read_text())["services"]
    assert set(services) == {"prometheus", "grafana"}
    for service in services.values():
        assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+", service["image"]), "a pinned release"
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (path.parent / source).resolve().exists() or source == "../runs"
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


def test_grafana_finds_its_source_and_its_dashboards() -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["type"] == "prometheus" and source["url"] == "http://127.0.0.1:9090"
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/slipstream.yml").read_text())[
        "providers"
    ]
    mounts = yaml.safe_load((REPOSITORY / "deploy/compose.yaml").read_text())["services"]
    assert any(
        volume.split(":")[1] == provider["options"]["path"]
        for volume in mounts["grafana"]["volumes"]
    )
