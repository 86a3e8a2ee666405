"""Stories of the list and watch of policy objects: tests/traces/reflector."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from datadriven import nanoseconds, shown, stories, tell

from rose.controller.reflector import (
    Ended,
    Event,
    Listed,
    Opened,
    Probed,
    Received,
    Reflector,
    Start,
    Woke,
)

Values = dict[str, str]


def obj(said: str) -> dict[str, Any]:
    """`chat@12.3`: its name, resourceVersion, and generation, 1 where none is said."""
    name, _, version = said.partition("@")
    version, _, generation = version.partition(".")
    metadata = {
        "name": name,
        "uid": name,
        "resourceVersion": version,
        "generation": int(generation or 1),
    }
    return {"metadata": metadata}


def objects(values: Values) -> list[dict[str, Any]]:
    return [obj(each) for each in values.get("of", "").split(",") if each]


def listing(values: Values) -> bytes:
    said = {"metadata": {"resourceVersion": values.get("at", "")}, "items": objects(values)}
    return json.dumps(said).encode()


def line(kind: str, each: dict[str, Any]) -> Received:
    return Received(json.dumps({"type": kind, "object": each}).encode() + b"\n")


EVENTS: Final[dict[str, Callable[[Values, float], Event]]] = {
    "start": lambda v, _: Start(),
    "woke": lambda v, _: Woke(),
    "listed": lambda v, _: Listed(listing(v)),
    "opened": lambda v, _: Opened(),
    "added": lambda v, _: line("ADDED", obj(v["added"])),
    "modified": lambda v, _: line("MODIFIED", obj(v["modified"])),
    "deleted": lambda v, _: line("DELETED", obj(v["deleted"])),
    "bookmark": lambda v, _: line("BOOKMARK", {"metadata": {"resourceVersion": v["bookmark"]}}),
    "error": lambda v, _: line("ERROR", {"code": int(v["error"]), "message": v["why"]}),
    "torn": lambda v, _: Received(v["torn"].encode()),
    "ended": lambda v, _: Ended(v["ended"], int(v.get("code", "0"))),
    "probed": lambda v, now_s: Probed(listing(v), now_s),
}


class Story:
    """`TIME EVENT`, an event of `rose.controller.reflector` in a few words."""

    def __init__(self) -> None:
        self.core = Reflector()

    def step(self, verb: str, values: Values) -> Iterator[str]:
        now_s = nanoseconds(verb) / 1e9
        event = EVENTS[next(iter(values))](values, now_s)
        yield from map(shown, self.core.step(event, now_s))

    def status(self) -> str:
        said = self.core.status()
        names = ",".join(sorted(said.objects)) or "nothing"
        heard = "never" if said.heard_s is None else f"{said.heard_s:g}s"
        trouble = f' trouble="{said.trouble}"' if said.trouble else ""
        return f"{names} heard={heard}{trouble}"


@pytest.mark.parametrize("story", stories("reflector"))
def test_objects_are_known_as_the_story_says(story: Path) -> None:
    tell(story, Story())
