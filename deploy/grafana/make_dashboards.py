"""Write dashboards/*.json from the panels beside it: `make docs`."""

import json
from pathlib import Path
from typing import Any

from panel import Dashboard, Panel
from panels_learning import LEARNING, OVERVIEW, STALENESS
from panels_operation import ENGINES, FAILURES, SYNC, VERIFIERS

DASHBOARDS = (OVERVIEW, LEARNING, STALENESS, ENGINES, VERIFIERS, SYNC, FAILURES)

FOLDER = Path(__file__).parent / "dashboards"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, STAT_WIDTH, STAT_HEIGHT = 12, 8, 6, 4


def dashboard_json(dashboard: Dashboard) -> str:
    """Grafana's JSON of one dashboard."""
    content = {
        "uid": f"slipstream-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["slipstream"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {
                "type": "dashboards",
                "tags": ["slipstream"],
                "title": "Slipstream",
                "asDropdown": True,
            }
        ],
        "templating": {"list": _variables()},
        "panels": _panels(dashboard),
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _variables() -> list[dict[str, Any]]:
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"},
        {
            "name": "run",
            "type": "query",
            "label": "Run",
            "datasource": SOURCE,
            "query": "label_values(slipstream_step, run)",
            "refresh": 2,
            "sort": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
        },
    ]


def _panels(dashboard: Dashboard) -> list[dict[str, Any]]:
    """Figures in rows of four on top, graphs in rows of two below them."""
    found: list[dict[str, Any]] = []
    x = y = 0
    last_height = 0
    for panel in sorted(dashboard.panels, key=lambda panel: not panel.stat):
        width, height = (STAT_WIDTH, STAT_HEIGHT) if panel.stat else (WIDTH, HEIGHT)
        if x + width > 24 or (last_height and height != last_height):
            x, y = 0, y + last_height
        place = {"x": x, "y": y, "w": width, "h": height}
        found.append(_panel(panel, len(found) + 1, place))
        x, last_height = x + width, height
    return found


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    reading = panel.reading
    if panel.condition:
        reading += f" There is data only when {panel.condition}."
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": SOURCE,
            "expr": expression,
            "legendFormat": legend,
        }
        for index, (legend, expression) in enumerate(panel.queries.items())
    ]
    return {
        "id": number,
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": reading,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": targets,
    }


if __name__ == "__main__":
    for page in DASHBOARDS:
        path = FOLDER / f"{page.name}.json"
        path.write_text(dashboard_json(page), encoding="utf-8")
        print(path)
