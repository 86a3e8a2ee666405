"""Copies of a turn go on from the same tokens, and never meet again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_scheduler import Deliver, End, JournalError, TurnJournal

STEP = st.tuples(st.booleans(), st.integers(1, 3), st.integers(0, 2))


def deliver(journal: TurnJournal, attempt: int) -> None:
    assert journal.end(attempt, End.FINISHED, "length") == Deliver("length")


@given(st.integers(0, 5), st.lists(STEP, max_size=12))
def test_both_journals_have_the_common_tokens_and_then_only_their_own(
    common: int, script: list[tuple[bool, int, int]]
) -> None:
    first = TurnJournal([7], 50, max_attempts=8)
    begun = first.begin("a", "guest")
    first.append(begun.number, range(common), [-0.5] * common, 3)
    second = first.fork()
    other = second.begin("b", "dedicated")
    assert other.token_ids == [7, *range(common)]
    assert (other.number, other.max_tokens) == (2, 50 - common)
    made = {first: [*range(common)], second: [*range(common)]}
    for is_copy, count, version in script:
        journal, attempt = (second, other) if is_copy else (first, begun)
        tokens = [100 * (1 + is_copy) + number for number in range(count)]
        assert journal.append(attempt.number, tokens, [-1.0] * count, version)
        made[journal] += tokens
    for journal, attempt, replica in ((first, begun, "a"), (second, other, "b")):
        deliver(journal, attempt.number)
        assert [*journal.tokens] == made[journal]
        assert len(journal.logprobs) == len(journal.tokens)
        for spans in (journal.versions, journal.segments):
            assert [n for s in spans for n in range(s.start, s.end)] == [*range(len(made[journal]))]
        own = {segment.replica for segment in journal.segments if segment.end > common}
        assert own <= {replica}


def test_a_turn_without_anything_to_do_is_not_begun_twice() -> None:
    journal = TurnJournal([1], 2, max_attempts=2, stop_token_ids=(9,))
    attempt = journal.begin("a", "guest")
    assert journal.can_begin
    journal.append(attempt.number, [9], [-1.0], 0)
    assert journal.whole
    assert not journal.can_begin
    last = TurnJournal([1], 2, max_attempts=1)
    last.begin("a", "guest")
    assert not last.can_begin
    assert not last.whole
    over = TurnJournal([1], 1, max_attempts=2)
    number = over.begin("a", "guest").number
    over.append(number, [5], [-1.0], 0)
    deliver(over, number)
    with pytest.raises(JournalError, match="is over"):
        over.fork()
