"""Journal of a turn, its copies, and its request id."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_scheduler import (
    Conflict,
    Continue,
    Deliver,
    End,
    HedgedGroup,
    IdempotencyCache,
    JournalError,
    MemberView,
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


# ---- copies ----


EVENT = st.tuples(
    st.sampled_from(["consider", "finish", "finish", "fail"]),
    st.integers(0, 5),
    st.integers(0, 2),
    st.lists(st.floats(0.1, 100), min_size=6, max_size=6),
)


@given(st.integers(1, 6), st.integers(0, 3), st.lists(EVENT, max_size=60))
def test_every_member_is_delivered_at_most_once_and_copies_are_bounded(
    size: int, max_hedges: int, script: list[tuple[str, int, int, list[float]]]
) -> None:
    names = tuple(f"m{number}" for number in range(size))
    group = HedgedGroup(names, max_hedges)
    copies = {name: {0} for name in names}
    delivered: set[str] = set()
    hedges = 0
    for what, pick, copy, seconds in script:
        name = names[pick % size]
        if what == "consider":
            running = tuple(
                MemberView(each, seconds[place], seconds[-1 - place])
                for place, each in enumerate(names)
                if each not in delivered
            )
            hedge = group.consider(running, free_places=pick)
            if hedge is not None:
                hedges += 1
                assert pick > 0
                assert hedge.saves_s > 0
                assert hedge.member not in delivered
                assert hedge.copy not in copies[hedge.member]
                copies[hedge.member].add(hedge.copy)
        elif what == "finish":
            won = group.finished(name, copy)
            if won is not None:
                assert name not in delivered
                assert copy in copies[name]
                assert set(won.cancel) == copies[name] - {copy}
                delivered.add(name)
                copies[name] = set()
        elif group.failed(name, copy):
            assert copies[name] == {copy}
        elif name not in delivered:
            copies[name] -= {copy}
            assert copies[name]
    assert hedges <= max_hedges
    assert group.complete == (len(delivered) == size)


def test_only_the_slowest_is_hedged_and_only_when_it_pays() -> None:
    group = HedgedGroup(("a", "b", "c", "d"), max_hedges=2)
    slow = (MemberView("c", 10.0, 4.0), MemberView("d", 40.0, 5.0))
    assert group.consider(slow, 1) is None  # half of the group must be done first
    for name in ("a", "b"):
        assert group.finished(name, 0) is not None
    assert group.consider(slow, 0) is None
    assert group.consider((slow[0], MemberView("d", 40.0, 35.0)), 1) is None
    # c holds the group up as long as d would: a copy of d alone saves little.
    assert group.consider((MemberView("c", 39.0, 4.0), slow[1]), 1) is None
    hedge = group.consider(slow, 1)
    assert hedge is not None
    assert (hedge.member, hedge.copy, hedge.saves_s) == ("d", 1, 30.0)
    won = group.finished("d", 1)
    assert won is not None
    assert won.cancel == (0,)
    assert group.finished("d", 0) is None


def test_members_that_are_about_as_slow_are_copied_all_or_none() -> None:
    names = ("a", "b", "c", "d")
    for hedges, places, started in ((1, 9, 0), (2, 1, 0), (2, 9, 2), (3, 9, 2)):
        group = HedgedGroup(names, hedges)
        for name in ("a", "b"):
            assert group.finished(name, 0) is not None
        left_s = {"c": 10.0, "d": 9.5}
        copied = []
        while True:
            views = tuple(MemberView(name, seconds, 2.0) for name, seconds in left_s.items())
            hedge = group.consider(views, places)
            if hedge is None:
                break
            copied.append(hedge.member)
            assert hedge.saves_s > 0.3 * left_s[hedge.member]
            left_s[hedge.member] = 2.0
        assert copied == ["c", "d"][:started]


def test_a_member_that_is_asked_for_again_begins_anew_and_gets_no_more_copies_than_were_left() -> (
    None
):
    group = HedgedGroup(("a", "b"), max_hedges=1)
    assert not group.may_hedge
    assert group.finished("b", 0) is not None
    assert group.may_hedge
    assert group.consider((MemberView("a", 10.0, 1.0),), 1) is not None
    assert not group.failed("a", 0)
    group.restart("a")
    group.restart("b")
    assert not group.may_hedge
    assert group.consider((MemberView("a", 10.0, 1.0),), 1) is None
    assert group.finished("b", 0) is None, "what was delivered stays delivered"
    won = group.finished("a", 0)
    assert won is not None
    assert won.cancel == ()
    assert group.complete


def test_columns_are_joined_over_attempts_and_go_with_a_copy() -> None:
    journal = TurnJournal([7], 8, max_attempts=4)
    first = journal.begin("a", "guest").number
    journal.append(first, [1], [-1.0], 0, columns={"x": b"ab"})
    journal.end(first, End.REVOKED)
    copy, anew = journal.fork(), journal.restarted()
    second = journal.begin("b", "guest").number
    assert not journal.append(first, [2], [-1.0], 0, columns={"x": b"late"})
    journal.append(second, [2], [-1.0], 0, columns={"x": b"cd"})
    with pytest.raises(JournalError):
        journal.append(second, [3] * 9, [-1.0] * 9, 0, columns={"x": b"too much"})
    assert journal.columns == {"x": b"abcd"}
    assert (copy.columns, anew.columns) == ({"x": b"ab"}, {})
