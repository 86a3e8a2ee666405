"""Choices in fleets too large to weigh whole: as good, as careful, and quick."""

import random
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.micro import routing
from elastic_scheduler import ReplicaKind, ReplicaView, Router, TurnNeed, TurnPlacement
from elastic_scheduler.routing import router

FLEET = 40
STEP = st.tuples(
    st.sampled_from(
        ["begin", "begin", "tokens", "end", "revoke", "rest", "version", "lose", "renew"]
    ),
    st.integers(0, 10_000),
    st.floats(0.0, 0.5),
)


def row(number: int, version: int = 1, usable: bool = True) -> ReplicaView:
    kind = ReplicaKind.DEDICATED if number % 3 == 0 else ReplicaKind.GUEST
    kv_tokens = (0, 900, 5_000, 100_000)[number % 4]
    rate_tok_s = 100.0 * (1 + number % 7)
    return ReplicaView(
        f"r{number}", kind, usable, version, number % 4, kv_tokens, rate_tok_s, 10 * rate_tok_s
    )


def change(rows: dict[str, ReplicaView], what: str, name: str, pick: int) -> None:
    if what == "version":
        rows[name] = row(pick % FLEET, 2, pick % 5 != 0)
    elif what == "lose" and len(rows) > 20:
        rows.pop(name, None)


@given(st.lists(STEP, max_size=80))
def test_a_large_fleets_choice_is_never_a_replica_that_may_not_have_the_turn(
    script: list[tuple[str, int, float]],
) -> None:
    rows = {f"r{number}": row(number) for number in range(FLEET)}
    router, now_s = Router(), 0.0
    router.set_table(rows.values(), now_s)
    live: list[TurnPlacement] = []
    for what, pick, wait_s in script:
        now_s += wait_s
        if what == "begin":
            least = pick % 3 or None
            need = TurnNeed(f"t{pick % 9}", 1 + pick % 2_000, 50, least, None, f"q{pick}")
            free = {c.replica for c in router.explain(need, now_s) if not c.refusal}
            name = router.choose(need, now_s)
            if name is None:
                assert not free or router.explained(need.request_id)[-1].why.startswith("waits")
            else:
                assert name in free
                live.append(router.begin(name, need, now_s))
        elif what in ("tokens", "end", "revoke") and live:
            placement = live[pick % len(live)]
            router.progress(placement, pick % 40, now_s)
            if what != "tokens":
                live.remove(placement)
                router.end(placement, now_s, revoked=what == "revoke", finished=what == "end")
        elif what == "rest":
            router.rest(f"r{pick % FLEET}", now_s + 0.3)
        elif what in ("version", "lose", "renew"):
            name = f"r{pick % FLEET}"
            change(rows, what, name, pick)
            router.set_table(rows.values(), now_s, {name} if what == "renew" else ())
            assert what != "renew" or not router.live_turns().get(name)
        counts = router.live_turns()
        assert all(count <= rows[name].max_sequences for name, count in counts.items())
    for placement in live:
        router.end(placement, now_s)
    assert all(c.owed_tokens == 0 for c in router.explain(TurnNeed("", 1, 1), now_s))
    assert all(count == 0 for count in router.live_turns().values())


def test_a_large_fleets_choice_costs_little_more_than_the_best_of_all() -> None:
    figures = routing.measure(replicas=500, trajectories=4_000, decisions=2_000, judged=200)
    assert figures["live_turns"] > 3_500
    assert 1.0 <= figures["regret_p50"] < 1.1
    assert figures["regret_p90"] < 1.5


def test_a_decision_among_thousands_weighs_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is measured by `bench/micro/routing.py`."""
    fleet = routing.RoutedFleet(replicas=3_000, trajectories=9_000)
    weighed = Mock(side_effect=router.cost_s)
    monkeypatch.setattr(router, "cost_s", weighed)
    counts: list[int] = []
    while len(counts) < 1_500:
        fleet.now_s += routing.SENDING / 3_000 / routing.CHUNKS_PER_S
        for _ in range(fleet.decode()):
            before, need = weighed.call_count, fleet.need()
            fleet.begin(need, fleet.router.choose(need, fleet.now_s))
            counts.append(weighed.call_count - before)
    assert fleet.live_turns() > 8_000
    assert 1 <= min(counts) <= max(counts) < 40, max(counts)


def test_equals_share_the_turns_of_a_large_fleet() -> None:
    router = Router()
    rows = [ReplicaView(f"r{n}", ReplicaKind.GUEST, True, 1, 8) for n in range(100)]
    router.set_table(rows, 0.0)
    for number in range(200):
        need = TurnNeed(f"t{number}", 100, 100)
        name = router.choose(need, 0.0)
        assert name is not None
        router.begin(name, need, 0.0)
    assert max(router.live_turns().values()) <= 4


def test_a_silent_replica_of_a_large_fleet_loses_its_place_among_the_cheapest() -> None:
    router = Router()
    rows = [ReplicaView(f"r{n}", ReplicaKind.GUEST, True, 1, 999, 0, 1e3) for n in range(30)]
    rows[0] = ReplicaView("r0", ReplicaKind.GUEST, True, 1, 999, 0, 1e5)
    router.set_table(rows, 0.0)
    need = TurnNeed("", 100, 100)
    assert router.choose(need, 0.0) == "r0"
    router.begin("r0", need, 0.0)
    rng = random.Random(1)
    late = [router.choose(need, 20.0 + rng.random()) for _ in range(100)]
    assert late.count("r0") == 0


@pytest.mark.parametrize("count", [8, 64])
def test_the_prefix_holder_is_found_among_any_number(count: int) -> None:
    router = Router()
    rows = [ReplicaView(f"r{n}", ReplicaKind.GUEST, True, 1, 8) for n in range(count)]
    router.set_table(rows, 0.0)
    for number in range(20):
        need = TurnNeed(f"t{number}", 5_000, 64, request_id=f"q{number}")
        name = router.choose(need, 0.0)
        assert name is not None
        turn = router.begin(name, need, 0.0)
        router.progress(turn, 64, 0.0)
        router.end(turn, 0.0, finished=True)
        again = TurnNeed(f"t{number}", 5_064, 64, request_id=f"q{number}.2")
        assert router.choose(again, 0.0) == name
        assert router.explained(f"q{number}.2")[-1].why == "holds the prefix"
        assert [d.request_id for d in router.explained(f"t{number}")] == [
            f"q{number}",
            f"q{number}.2",
        ]
