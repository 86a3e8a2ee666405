"""Write helm/rose/files/dashboards, the Grafana dashboards that scripts/dashboards.yaml describes.

Every number has its threshold beside it where there is one, gaps stay gaps (no data is not zero),
and what a colour says a word says too. Tests check each expression against the metrics reference,
and a real Prometheus answers all of them.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from scripts.generated import ROOT, main

DATA: Final = ROOT / "scripts" / "dashboards.yaml"
FOLDER: Final = ROOT / "helm" / "rose" / "files" / "dashboards"
WIDTH: Final = 24
HEIGHT: Final = 8
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


class GraphPanel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One graph. queries, limits: expressions by their legends; a limit's line is drawn dashed."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12
    what: str = ""
    limits: Mapping[str, str] = {}
    red_from: int | None = None
    words: Mapping[str, str] = {}
    bars: bool = False


class Dashboard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One question, and the panels that answer it."""

    name: str
    title: str
    question: str
    panels: list[GraphPanel]
    by_instance: bool = False


def dashboards() -> list[Dashboard]:
    """Return all dashboards. Raises msgspec.ValidationError for fields that there are not."""
    return msgspec.yaml.decode(DATA.read_bytes(), type=list[Dashboard])


def rendered(dashboard: Dashboard) -> str:
    """One dashboard as Grafana imports it, or reads it from a ConfigMap."""
    panels: list[dict[str, Any]] = []
    x = y = 0
    for number, panel in enumerate(dashboard.panels, 1):
        if x + panel.width > WIDTH:
            x, y = 0, y + HEIGHT
        panels.append(_panel(panel, number, x, y))
        x += panel.width
    whole = {
        "uid": f"rose-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.question,
        "tags": ["rose"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["rose"], "title": "ROSE", "asDropdown": True}],
        "templating": {"list": _variables(by_instance=dashboard.by_instance)},
        "panels": panels,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _variables(*, by_instance: bool) -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource"}
    variables: list[dict[str, Any]] = [
        source | {"query": "prometheus"},
        _labels("Cluster", "cluster", '{__name__=~"rose_build_info|rose_scheduler_leader"}'),
    ]
    if by_instance:
        nodes = 'rose_build_info{cluster=~"$cluster"}'
        variables.append(_labels("Node", "node", nodes))
        variables.append(_labels("Address", "instance", nodes))
    return variables


def _labels(title: str, label: str, series: str) -> dict[str, Any]:
    return {
        "name": label,
        "label": title,
        "type": "query",
        "datasource": SOURCE,
        "query": f"label_values({series}, {label})",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        # Targets without the label are of all.
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _chosen(expression: str) -> str:
    """Return the expression with each series chosen by $cluster, and $node beside $instance."""
    expression = expression.replace("instance=~", 'node=~"$node",instance=~')
    return re.sub(r"\b(rose[_:][\w:]+)\b(\{)?", _of_cluster, expression)


def _of_cluster(series: "re.Match[str]") -> str:
    return f'{series[1]}{{cluster=~"$cluster"{"," if series[2] else "}"}'


def _panel(panel: GraphPanel, number: int, x: int, y: int) -> dict[str, Any]:
    queries = [*panel.queries.items(), *panel.limits.items()]
    targets = [
        {
            "refId": chr(ord("A") + place),
            "datasource": SOURCE,
            "expr": _chosen(expression),
            "legendFormat": legend,
            **({"instant": True, "format": "table"} if panel.kind == "table" else {}),
        }
        for place, (legend, expression) in enumerate(queries)
    ]
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.red_from is not None:
        steps.append({"color": "red", "value": panel.red_from})
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": None if panel.red_from is None else 0,
        "thresholds": {"mode": "absolute", "steps": steps},
        # No data is never drawn as zero.
        "noValue": "no data",
        "custom": _drawing(panel),
    }
    if panel.words:
        options = {value: {"text": word} for value, word in panel.words.items()}
        defaults["mappings"] = [{"type": "value", "options": options}]
    drawn = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.what,
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": panel.width, "x": x, "y": y},
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": [*map(_dashed, panel.limits)]},
    }
    if panel.kind == "stat":
        # The value's name is shown as well: a colour alone says nothing to some.
        drawn["options"] = {"textMode": "value_and_name", "colorMode": "value"}
    return drawn


def _drawing(panel: GraphPanel) -> dict[str, Any]:
    if panel.kind != "timeseries":
        return {}
    stacked = {"mode": "normal" if panel.bars else "none"}
    style = "bars" if panel.bars else "line"
    return {
        "drawStyle": style,
        "fillOpacity": 60 if panel.bars else 5,
        "stacking": stacked,
        "spanNulls": False,
        "thresholdsStyle": {"mode": "off" if panel.red_from is None else "line"},
    }


def _dashed(legend: str) -> dict[str, Any]:
    dashed = {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 6]}}
    return {"matcher": {"id": "byName", "options": legend}, "properties": [dashed]}


def files() -> dict[Path, str | None]:
    """Return the text of each dashboard's file, and None for a file of none."""
    made: dict[Path, str | None] = dict.fromkeys(FOLDER.glob("*.json"))
    return made | {FOLDER / f"rose-{each.name}.json": rendered(each) for each in dashboards()}


if __name__ == "__main__":
    sys.exit(main(files, "scripts/dashboards"))
