"""Stories of a turn's journal: tests/traces/journal."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from datadriven import shown, stories, tell

from elastic_scheduler import Deliver, End, JournalError, TurnJournal

ENDS = {str(end) for end in End}


class Turn:
    """`turn prompt= tokens= attempts= [stop=]`, then `begin replica=`, `append attempt= tokens=
    version= [oldest=]`, `end attempt= HOW [reason=]` and `fork as=`, all `on=` a copy where named.
    """

    def __init__(self) -> None:
        self.journals: dict[str, TurnJournal] = {}

    def step(self, verb: str, values: dict[str, str]) -> Iterator[str]:
        name = values.get("on", "")
        try:
            match verb:
                case "turn":
                    self.journals[name] = TurnJournal(
                        _numbers(values["prompt"]),
                        int(values["tokens"]),
                        max_attempts=int(values["attempts"]),
                        stop_token_ids=_numbers(values.get("stop", "")),
                    )
                case "begin":
                    begun = self.journals[name].begin(values["replica"], "guest")
                    asked = ",".join(map(str, begun.token_ids))
                    yield f"Attempt number={begun.number} continues={asked} by={begun.max_tokens}"
                case "append":
                    yield self._append(self.journals[name], values)
                case "end":
                    [how] = ENDS & values.keys()
                    yield from self._end(self.journals[name], int(values["attempt"]), how, values)
                case "fork":
                    self.journals[values["as"]] = self.journals[name].fork()
        except JournalError as error:
            yield f'refused "{error}"'

    def status(self) -> str:
        return "; ".join(
            f"{name and name + ': '}tokens={each.generated} left={each.remaining}"
            f" attempts={each.attempts}{' whole' if each.whole else ''}"
            f"{' can_begin' if each.can_begin else ''}"
            for name, each in self.journals.items()
        )

    def _append(self, journal: TurnJournal, values: dict[str, str]) -> str:
        tokens = _numbers(values["tokens"])
        logprobs = [-1.0] * int(values.get("logprobs", len(tokens)))
        oldest = int(values["oldest"]) if "oldest" in values else None
        attempt, version = int(values["attempt"]), int(values["version"])
        taken = journal.append(attempt, tokens, logprobs, version, oldest)
        return "taken" if taken else "dropped"

    def _end(
        self, journal: TurnJournal, attempt: int, how: str, values: dict[str, str]
    ) -> Iterator[str]:
        outcome = journal.end(attempt, End(how), values.get("reason", ""))
        if not isinstance(outcome, Deliver):
            yield "nothing: it was over" if outcome is None else shown(outcome)
            return
        yield f"Deliver finish_reason={outcome.finish_reason}"
        yield f"  tokens {','.join(map(str, outcome.token_ids))}"
        for span in outcome.versions:
            older = "" if span.oldest_version is None else f" on KV of {span.oldest_version}"
            yield f"  [{span.start}, {span.end}) version {span.version}{older}"
        for segment in outcome.segments:
            yield f"  [{segment.start}, {segment.end}) from {segment.replica}"


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


@pytest.mark.parametrize("story", stories("journal"))
def test_a_turn_goes_as_the_story_says(story: Path) -> None:
    tell(story, Turn())
