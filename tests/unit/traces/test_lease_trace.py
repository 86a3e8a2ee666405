"""Stories of a replica's lease state machine: tests/traces/lease."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from datadriven import nanoseconds, shown, status, stories, tell

from rose.node.lease import (
    EngineAdmitted,
    EngineDown,
    EngineDrained,
    EngineUp,
    Event,
    Granted,
    LeaseStateMachine,
    LeaseTick,
    Released,
    Revoked,
    SwitchBegun,
)

Values = dict[str, str]
EVENTS: Final[dict[str, Callable[[Values], Event]]] = {
    "engine-up": lambda v: EngineUp(int(v.get("epoch", "0")), "admitting" in v),
    "engine-down": lambda _: EngineDown(),
    "granted": lambda v: Granted(int(v["epoch"]), nanoseconds(v["for"]) / 1e9),
    "released": lambda v: Released(int(v["epoch"]), v["reason"]),
    "revoked": lambda v: Revoked(v["reason"]),
    "admitted": lambda v: EngineAdmitted(int(v["epoch"]), int(v["life"])),
    "drained": lambda v: EngineDrained(int(v["life"]), int(v.get("aborted", "0"))),
    "switch": lambda v: SwitchBegun(nanoseconds(v["for"]) / 1e9),
    "tick": lambda _: LeaseTick(),
}


class Lease:
    """`TIME EVENT`, an event of `rose.node.lease` with its fields."""

    def __init__(self) -> None:
        self.core = LeaseStateMachine()

    def step(self, verb: str, values: Values) -> Iterator[str]:
        event = EVENTS[next(iter(values))](values)
        yield from map(shown, self.core.step(event, nanoseconds(verb) / 1e9))

    def status(self) -> str:
        return status(self.core.status())


@pytest.mark.parametrize("story", stories("lease"))
def test_a_lease_comes_and_ends_as_the_story_says(story: Path) -> None:
    tell(story, Lease())
