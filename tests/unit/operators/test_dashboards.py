"""Dashboards ask for what exists, show gaps as gaps, and put a name beside each colour."""

import json
from typing import Any

import pytest
from operator_files import DASHBOARDS, complaints, known_labels, script

FILES = sorted(DASHBOARDS.glob("*.json"))
QUESTIONS = 9


def panels(file: Any) -> list[dict[str, Any]]:
    return list(json.loads(file.read_text())["panels"])


PANELS = [
    pytest.param(panel, id=f"{file.stem}: {panel['title']}")
    for file in FILES
    for panel in panels(file)
]


def test_the_files_are_current() -> None:
    made = script("dashboards").files()
    assert {path: path.read_text() for path in FILES} == made, "run scripts/dashboards"
    assert len(FILES) == QUESTIONS


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_asks_for_what_exists_and_shows_gaps_as_gaps(panel: dict[str, Any]) -> None:
    labels = frozenset().union(*known_labels().values()) | {"instance"}
    assert panel["targets"]
    for target in panel["targets"]:
        assert complaints(target["expr"].replace("$__rate_interval", "5m")) == []
        # Clusters and nodes in one Prometheus are told apart.
        named, chosen = target["expr"].count("rose"), target["expr"].count('cluster=~"$cluster"')
        assert chosen == named
        assert target["expr"].count("$instance") == target["expr"].count("$node")
        for word in target["legendFormat"].split("{{")[1:]:
            assert word.split("}}")[0] in labels
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["noValue"] == "no data"
    assert not defaults["custom"].get("spanNulls")
    if panel["type"] == "stat":
        assert panel["options"]["textMode"] == "value_and_name"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_panels_lie_side_by_side_and_not_on_each_other(file: Any) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels(file):
        at = panel["gridPos"]
        cells = {(x, at["y"]) for x in range(at["x"], at["x"] + at["w"])}
        assert at["x"] + at["w"] <= 24
        assert not taken & cells
        taken |= cells
    assert len({panel["id"] for panel in panels(file)}) == len(panels(file))


def test_latency_and_its_guests_duty_are_on_one_time_axis_with_the_target() -> None:
    host = json.loads((DASHBOARDS / "rose-host.json").read_text())
    drawn = str(host["panels"])
    assert host["graphTooltip"] == 1, "one crosshair over all panels"
    for metric in ("rose_host_ttft_target_seconds", "rose_guest_duty", "rose_guest_freezes_total"):
        assert metric in drawn
