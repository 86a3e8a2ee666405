"""Forecasts of how long a turn will be, and what the router makes of them."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_scheduler import ReplicaKind, ReplicaView, Router, TurnNeed
from elastic_scheduler.routing.decision_log import ReasonLog, RoutingDecision, RoutingLog
from elastic_scheduler.routing.predictors import (
    LengthPredictor,
    Prefix,
    PrefixAffinity,
    QuantileWindow,
)


@given(st.integers(1, 9), st.lists(st.integers(0, 50), min_size=1), st.floats(0, 1))
def test_the_windows_quantile_is_that_of_its_newest_values(
    size: int, values: list[int], q: float
) -> None:
    window = QuantileWindow(size)
    for value in values:
        window.add(value)
    newest = sorted(deque(values, maxlen=size))
    assert window.quantile(q) == newest[min(len(newest) - 1, int(q * len(newest)))]


@given(
    st.lists(st.tuples(st.text("ab", max_size=1), st.text("cd", max_size=1), st.integers(0, 900))),
    st.integers(1, 1_000),
)
def test_a_forecast_is_always_within_the_budget(
    seen: list[tuple[str, str, int]], budget_tokens: int
) -> None:
    book = LengthPredictor(names_kept=2)
    for session, group, tokens in seen:
        book.observe("job", session, group, tokens)
    for session, group in (("a", "c"), ("", ""), ("x", "y")):
        assert 1 <= book.expected("job", session, group, budget_tokens) <= budget_tokens


def test_the_most_specific_history_speaks() -> None:
    book = LengthPredictor()
    assert book.expected("job", "s", "g", 1_000) == 1_000
    for _ in range(40):
        book.observe("job", "", "", 100)
    assert book.expected("job", "s", "g", 1_000) == 100
    for _ in range(3):
        book.observe("job", "", "g", 300)
    assert book.expected("job", "s", "g", 1_000) == 300
    book.observe("job", "s", "g", 700)
    assert book.expected("job", "s", "g", 1_000) == 700


def test_groups_of_two_jobs_may_have_the_same_name() -> None:
    book = LengthPredictor()
    for _ in range(3):
        book.observe("long", "", "group-0", 800)
        book.observe("short", "", "group-0", 20)
    assert book.expected("long", "", "group-0", 1_000) == 800
    assert book.expected("short", "", "group-0", 1_000) == 20


def test_only_the_tail_of_a_job_is_long() -> None:
    book = LengthPredictor()
    for tokens in range(100):
        book.observe("job", "", "", tokens)
        book.observe("flat", "", "", 50)
    assert book.is_long("job", 95)
    assert not book.is_long("job", 80)
    assert not book.is_long("flat", 50)
    assert not book.is_long("unseen", 10_000)


def test_a_turn_that_is_likely_long_prefers_a_dedicated_replica() -> None:
    router = Router()
    guest = ReplicaView("guest", ReplicaKind.GUEST, True, 1, 64, 0, 1_000.0)
    own = ReplicaView("own", ReplicaKind.DEDICATED, True, 1, 64, 0, 900.0)
    router.set_table([guest, own], 0.0)
    for number in range(100):
        is_hard = number % 10 == 0
        need = TurnNeed("", 50, 4_000, group="hard" if is_hard else "easy")
        turn = router.begin("guest", need, 0.0)
        router.progress(turn, 2_000 if is_hard else 100, 0.0)
        router.end(turn, 0.0, finished=True)
    router.set_table([], 1.0)
    router.set_table([guest, own], 1.0)
    for group, choice in (("hard", "own"), ("easy", "guest"), ("", "guest")):
        need = TurnNeed("", 50, 4_000, request_id=f"of {group}", group=group)
        assert router.choose(need, 1.0) == choice
        assert router.explained(need.request_id)[-1].is_long == (group == "hard")


def test_a_guest_that_is_often_revoked_costs_more() -> None:
    router = Router()
    rows = [ReplicaView(n, ReplicaKind.GUEST, True, 1, 64, 0, 100.0, 100.0) for n in ("a", "b")]
    router.set_table(rows, 0.0)
    need = TurnNeed("", 5_000, 500)
    for number in range(20):
        turn = router.begin("a", need, 10.0 * number)
        router.end(turn, 10.0 * number + 5.0, revoked=True)
    by_name = {c.replica: c for c in router.explain(need, 1_000.0)}
    assert by_name["a"].revoke_s > 2 * by_name["b"].revoke_s > 0
    assert router.choose(need, 1_000.0) == "b"


def test_a_turn_that_outlives_its_forecast_is_still_owed_something() -> None:
    router = Router()
    router.set_table([ReplicaView("a", ReplicaKind.GUEST, True, 1, 64)], 0.0)
    for _ in range(40):
        turn = router.begin("a", TurnNeed("", 10, 1_000), 0.0)
        router.progress(turn, 10, 0.0)
        router.end(turn, 0.0, finished=True)
    turn = router.begin("a", TurnNeed("", 10, 1_000), 0.0)
    assert turn.owed_tokens == 10
    router.progress(turn, 100, 0.0)
    assert turn.owed_tokens == 51
    router.progress(turn, 900, 0.0)
    assert turn.owed_tokens == 0


@given(st.lists(st.tuples(st.text("abcd", max_size=2), st.integers())))
def test_the_reason_log_keeps_the_newest_and_no_more_than_asked(
    notes: list[tuple[str, int]],
) -> None:
    log: ReasonLog[int] = ReasonLog(subjects=3, decisions=2)
    for subject, decision in notes:
        log.note(subject, decision)
        assert log.of(subject)[-1] == decision
        assert len(log) <= 3
        assert len(log.of(subject)) <= 2


@given(st.lists(st.tuples(st.text("abcd", max_size=2), st.integers(0, 60))))
def test_the_reason_log_has_so_many_bytes_however_they_are_spread(
    notes: list[tuple[str, int]],
) -> None:
    log: ReasonLog[int] = ReasonLog(9, 3, weigh=lambda size: size, capacity_bytes=100)
    for subject, size_bytes in notes:
        log.note(subject, size_bytes)
        assert log.of(subject)[-1] == size_bytes
        kept = {name for name, _ in notes}
        assert log.size_bytes == sum(sum(log.of(name)) for name in kept)
        assert log.size_bytes <= 100 or len(log) == 1


def test_long_names_of_sessions_cost_books_no_more_than_short_ones() -> None:
    lengths, prefixes, log = LengthPredictor(), PrefixAffinity(), RoutingLog()
    session, group = "s" * 512, "g" * 512
    lengths.observe("job", session, group, 50)
    prefixes.note(session, Prefix("a", 7, 1))
    need = TurnNeed(session, 1, 9, request_id="r" * 1_024)
    log.note(need, RoutingDecision(0.0, need.request_id, "a", "free", 9, False, ()))
    assert lengths.expected("job", session, "", 99) == 50
    assert prefixes.find(session) == Prefix("a", 7, 1)
    assert len(log.of(session)) == len(log.of("r" * 1_024)) == 1
    assert max(map(len, [*prefixes._held, *log._trajectories])) <= 64
    lengths.forget(session)
    prefixes.forget(session)
    assert (lengths.expected("job", session, "", 99), prefixes.find(session)) == (99, None)


def test_the_log_of_choices_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_scheduler.routing.decision_log.LOG_BYTES", 50_000)
    router = Router()
    router.set_table([ReplicaView(f"r{k}", ReplicaKind.GUEST, True, 0, 9) for k in range(12)], 0.0)
    for number in range(500):
        need = TurnNeed(f"session-{number}", 1, 9, request_id=f"turn-{number}")
        placement = router.begin(router.choose(need, 0.0) or "", need, 0.0)
        router.end(placement, 0.0, finished=True)
    newest = router.explained("turn-499")
    assert len(newest) == 1
    assert len(newest[0].weighed) == 5
    assert router.explained("turn-0") == ()
    kept = sum(len(router.explained(f"turn-{number}")) for number in range(500))
    assert 20 < kept < 100
