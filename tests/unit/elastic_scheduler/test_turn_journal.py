"""Turn journal and answer book; the journal's stories are in tests/traces/journal."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_scheduler import (
    Conflict,
    Continue,
    Deliver,
    End,
    IdempotencyCache,
    JournalError,
    TurnJournal,
)

STEP = st.tuples(
    st.sampled_from(["append", "late", "revoked", "broken", "stalled", "refused", "finish"]),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from([None, 0, 1]),
)


@given(st.integers(1, 12), st.integers(1, 4), st.lists(STEP, max_size=30))
def test_no_journaled_token_is_lost_or_doubled(
    budget: int, max_attempts: int, script: list[tuple[str, int, int, int | None]]
) -> None:
    journal = TurnJournal([1, 2], budget, max_attempts=max_attempts)
    sent: list[int] = []
    stamps: list[tuple[int, int | None]] = []
    delivered = 0
    outcome: object = Continue()
    attempt = journal.begin("r1", "guest")
    for what, count, version, oldest in script:
        if what == "append":
            tokens = list(range(len(sent), len(sent) + min(count, budget - len(sent))))
            if journal.append(attempt.number, tokens, [-1.0] * len(tokens), version, oldest):
                sent += tokens
                stamps += [(version, oldest)] * len(tokens)
            continue
        if what == "late":
            assert not journal.append(attempt.number - 1, [99], [-1.0], version)
            assert journal.end(attempt.number - 1, End.FINISHED, "stop") is None
            continue
        end = End.FINISHED if what == "finish" else End(what)
        outcome = journal.end(attempt.number, end, "stop")
        if isinstance(outcome, Continue):
            attempt = journal.begin(f"r{attempt.number + 1}", "guest")
            assert attempt.token_ids == [1, 2, *sent]
            assert attempt.max_tokens == budget - len(sent)
            continue
        if isinstance(outcome, Deliver):
            delivered += 1
            assert list(journal.tokens) == sent
            spans = journal.versions
            stamped = [(s.version, s.oldest_version) for s in spans for _ in range(s.start, s.end)]
            assert stamped == stamps
            told = [(s.version, s.oldest_version) for s in spans]
            assert all(one != other for one, other in pairwise(told))
            assert sum(s.end - s.start for s in journal.segments) == len(sent)
        break
    assert delivered <= 1
    if not isinstance(outcome, Continue):
        assert journal.end(attempt.number, End.FINISHED, "stop") is None
        with pytest.raises(JournalError):
            journal.begin("again", "guest")


def test_the_answer_book_keeps_running_requests_and_the_newest_answers() -> None:
    book: IdempotencyCache[list[str]] = IdempotencyCache(capacity=2)
    values = {name: [name] for name in "abcd"}
    for name, value in values.items():
        book.open(name, 1, value)
    for name in "abc":
        book.close(name, values[name])
    assert book.find("a", 1) is None
    assert book.find("c", 1) is values["c"]
    assert book.find("d", 1) is values["d"]
    assert book.find("d", 2) is Conflict.OTHER_BODY
    book.forget("d", ["another"])
    assert book.find("d", 1) is values["d"]
    book.forget("d", values["d"])
    assert len(book) == 2


def test_the_answer_book_keeps_so_many_bytes_and_the_newest_answer_whatever_its_size() -> None:
    book: IdempotencyCache[list[str]] = IdempotencyCache(capacity=9, capacity_bytes=100)
    values = {name: [name] for name in "abcde"}
    for name, size_bytes in (("a", 40), ("b", 40), ("c", 40)):
        book.open(name, 1, values[name])
        book.close(name, values[name], size_bytes)
    assert [book.find(name, 1) for name in "abc"] == [None, values["b"], values["c"]]
    book.forget("b", values["b"])
    assert book.size_bytes == 40
    book.open("d", 1, values["d"])
    book.close("d", values["d"], 1_000)
    assert (len(book), book.size_bytes, book.find("d", 1)) == (1, 1_000, values["d"])
    book.open("e", 1, values["e"])
    book.close("e", values["e"], 5)
    assert (len(book), book.size_bytes) == (1, 5)


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
