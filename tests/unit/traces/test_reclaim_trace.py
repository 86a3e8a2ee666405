"""Stories of the reclaim ladder: tests/traces/reclaim."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from datadriven import amount, nanoseconds, shown, status, stories, tell

from executor.kv.reclaim_ladder import (
    Answer,
    EngineReport,
    Finished,
    GuestMeasured,
    ReclaimCore,
    Settled,
    Unsupported,
)


class Ladder:
    """`begin held= wanted= within=`; then `TIME holds=BYTES` with what the engine answers to the
    level, `claims=BYTES` or `has-none`; or `TIME settled`."""

    core: ReclaimCore

    def step(self, verb: str, values: dict[str, str]) -> Iterator[str]:
        if verb == "begin":
            within_ns = nanoseconds(values["within"])
            held = _measured(values["held"])
            self.core = ReclaimCore(0, held, amount(values["wanted"]), within_ns)
            return
        event: GuestMeasured | Settled = Settled()
        if "settled" not in values:
            answer: Answer = None
            if "claims" in values:
                answer = EngineReport(amount(values["claims"]))
            elif "has-none" in values:
                answer = Unsupported("no such thing here")
            event = GuestMeasured(_measured(values["holds"]), answer)
        for action in self.core.step(event, nanoseconds(verb)):
            words = shown(action)
            if isinstance(action, Finished):
                yield from (f"  {shown(report)}" for report in action.levels)
                words = words.partition(" levels=")[0]
            yield words

    def status(self) -> str:
        return status(self.core.status())


def _measured(text: str) -> int | None:
    return None if text == "unknown" else amount(text)


@pytest.mark.parametrize("story", stories("reclaim"))
def test_the_ladder_climbs_as_the_story_says(story: Path) -> None:
    tell(story, Ladder())
