"""Router of turns: costs, index, prefixes, lengths and paces."""

import random
from collections import deque
from dataclasses import replace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.micro import routing
from elastic_scheduler import ReplicaKind, ReplicaView, Router, TurnNeed, TurnPlacement, prefix_keys
from elastic_scheduler.routing import router
from elastic_scheduler.routing.decision_log import ReasonLog, RoutingDecision, RoutingLog
from elastic_scheduler.routing.predictors import (
    BLOCK_TOKENS,
    LengthPredictor,
    Prefix,
    PrefixAffinity,
    QuantileWindow,
    SharedPrefixes,
)

NEED = TurnNeed("s", 74, 14)
LONG = TurnNeed("l", 74, 2_000)


def view(name: str, **changes: object) -> ReplicaView:
    values: dict[str, object] = {"usable": True, "policy_version": 1, "max_sequences": 8}
    return ReplicaView(name, ReplicaKind.GUEST, **{**values, **changes})  # type: ignore[arg-type]


def router_with(*views: ReplicaView) -> Router:
    router = Router()
    router.set_table(views, 0.0)
    return router


def test_a_gated_replica_gets_only_what_it_can_chew() -> None:
    router = router_with(view("fast", decode_tok_s=1e3), view("gated", decode_tok_s=1e3))
    placed = {name: router.begin(name, LONG, 0.0) for name in ("fast", "gated")}
    for tick in range(1, 11):
        router.progress(placed["fast"], 100, tick * 0.2)
        router.choose(NEED, tick * 0.2)
    rates = {c.replica: c.decode_tok_s for c in router.explain(NEED, 2.0)}
    assert rates["gated"] < rates["fast"] / 3
    assert router.choose(NEED, 2.0) == "fast"
    router.end(placed["gated"], 2.0)
    assert {c.replica: c.decode_tok_s for c in router.explain(NEED, 30.0)}["gated"] > 900


def test_a_silent_replica_costs_what_it_has_been_silent() -> None:
    router = router_with(view("silent", decode_tok_s=1e3), view("other", decode_tok_s=0.9e3))
    turn = router.begin("silent", NEED, 0.0)
    router.progress(turn, 13, 0.01)
    # The same load on both; only the pause of one tells them apart.
    router.progress(router.begin("other", NEED, 0.01), 13, 0.01)
    assert router.choose(NEED, 0.01) == "silent"
    cost_s = {c.replica: c.cost_s for c in router.explain(NEED, 0.01)}
    router.progress(turn, 0, 0.3)
    later_s = {c.replica: c.cost_s for c in router.explain(NEED, 0.3)}
    assert later_s["other"] - cost_s["other"] > 0.29 > later_s["silent"] - cost_s["silent"]


def test_a_paused_turn_moves_once_it_has_waited_as_long_as_moving_costs() -> None:
    router = router_with(
        view("paused", decode_tok_s=1e3), view("free", decode_tok_s=100, max_sequences=2)
    )
    router.begin("paused", NEED, 0.0)
    cost_s = {c.replica: c.cost_s for c in router.explain(NEED, 0.0)}["free"]
    assert router.escape(NEED, "paused", cost_s * 0.9, 0.0, {}) is None
    assert router.escape(NEED, "paused", cost_s * 1.1, 0.0, {}) == "free"
    assert router.escape(NEED, "paused", cost_s * 1.1, 0.0, {"free": 2}) is None
    assert router.escape(NEED, "free", 1e9, 0.0, {"paused": 8}) is None


def test_the_prefix_holder_is_kept_unless_another_is_cheaper_by_a_margin() -> None:
    router = router_with(view("a", decode_tok_s=1e3), view("b", decode_tok_s=1.1e3))
    turn = router.begin("a", NEED, 0.0)
    router.progress(turn, 14, 0.014)
    router.end(turn, 0.014)
    longer = TurnNeed("s", 100, 14)
    assert router.choose(longer, 0.02) == "a"
    assert router.choose(TurnNeed("other", 100, 14), 0.02) == "b"
    router.begin("a", NEED, 0.02)
    router.begin("a", NEED, 0.02)
    assert router.choose(longer, 0.02) == "b"


def test_a_new_version_empties_the_prefix_cache() -> None:
    router = router_with(view("a"))
    turn = router.begin("a", NEED, 0.0)
    router.progress(turn, 14, 0.1)
    router.end(turn, 0.1)
    router.set_table([view("a", policy_version=2)], 0.2)
    assert router.explain(TurnNeed("s", 100, 14), 0.2)[0].uncached_tokens == 100


def ended(router: Router, need: TurnNeed, now_s: float) -> None:
    turn = router.begin("a", need, now_s)
    router.progress(turn, need.budget_tokens, now_s)
    router.end(turn, now_s, finished=True)


def test_a_trajectory_waits_where_it_would_push_out_prefixes_that_come_back() -> None:
    router = router_with(view("a", kv_tokens=1_000))
    for number in range(4):
        ended(router, TurnNeed(f"s{number}", 186, 14), 0.0)
    new, back = TurnNeed("new", 230, 14), TurnNeed("s1", 210, 14)
    assert router.choose(new, 1.0, displaces=False) == "a", "without turns nothing is kept back"
    turn = router.begin("a", TurnNeed("s0", 210, 14), 1.0)
    assert router.choose(new, 1.0, displaces=False) is None
    assert router.explained("new")[-1].why == "waits for KV of other trajectories"
    assert router.choose(new, 1.0) == "a", "one that waited for long displaces them"
    assert router.holds(back)
    assert router.choose(back, 1.0, displaces=False) == "a"
    router.forget("s3")
    assert router.choose(new, 1.0, displaces=False) == "a", "a trajectory is over"
    ended(router, TurnNeed("s4", 400, 14), 1.0)
    assert not router.holds(back), "the oldest prefix had to make room"
    assert router.choose(back, 1.0, displaces=False) is None
    assert router.choose(back, 200.0, displaces=False) == "a", "nobody came back for so long"
    assert router.holds(TurnNeed("s2", 210, 14)), "what nobody waits for is cached all the same"
    router.end(turn, 200.0)


def test_a_turn_waits_rather_than_go_to_a_far_worse_replica() -> None:
    router = router_with(
        view("good", decode_tok_s=1e4, max_sequences=1), view("slow", decode_tok_s=1.0)
    )
    router.begin("good", NEED, 0.0)
    assert router.choose(NEED, 0.0) is None


def test_every_refusal_is_explained() -> None:
    router = router_with(
        view("a", usable=False),
        view("b", policy_version=0),
        view("c", max_sequences=0),
        view("d", kv_tokens=10),
        view("e"),
    )
    router.rest("e", 1.0)
    reasons = {c.replica: c.refusal for c in router.explain(TurnNeed("s", 9, 9, 1), 0.5)}
    assert reasons["b"] == "runs version 0"
    assert reasons["c"] == "full"
    assert all(reasons.values())
    assert router.choose(TurnNeed("s", 9, 9, 1), 1.0) == "e"


def test_a_replica_that_came_back_starts_with_a_clean_load() -> None:
    router = router_with(view("a"))
    turn = router.begin("a", NEED, 0.0)
    router.set_table([], 0.1)
    router.set_table([view("a")], 0.2)
    router.end(turn, 0.3)
    assert router.live_turns() == {"a": 0}


def test_a_renewed_replica_starts_with_a_clean_load_and_the_others_keep_theirs() -> None:
    router = router_with(view("a", decode_tok_s=1e3), view("b", decode_tok_s=1e3))
    old = router.begin("a", LONG, 0.0)
    kept = router.begin("b", LONG, 0.0)
    router.rest("a", 9.0)
    router.set_table([view("a", decode_tok_s=1e3), view("b", decode_tok_s=1e3)], 0.1, {"a"})
    assert router.live_turns() == {"a": 0, "b": 1}
    assert router.choose(NEED, 0.1) == "a", "its rest was the old lease's"
    router.progress(old, 5, 0.2)
    router.end(old, 0.2)
    router.end(kept, 0.2)
    router.choose(NEED, 10.0)
    assert router.live_turns() == {"a": 0, "b": 0}
    assert [each.owed_tokens for each in router.explain(NEED, 10.0)] == [0, 0]


def test_a_passed_exact_version_is_unreachable_a_future_one_is_not() -> None:
    router = router_with(view("a", policy_version=3))
    assert not router.reachable(TurnNeed("s", 1, 1, exact_version=2))
    assert router.reachable(TurnNeed("s", 1, 1, exact_version=4))


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.floats(0, 0.5)), max_size=60),
)
def test_caps_are_never_exceeded_and_loads_return_to_zero(
    caps: list[int], script: list[tuple[bool, int, float]]
) -> None:
    router = router_with(*[view(f"r{i}", max_sequences=cap) for i, cap in enumerate(caps)])
    live: list[TurnPlacement] = []
    now_s = 0.0
    for begins, pick, wait_s in script:
        now_s += wait_s
        if begins:
            name = router.choose(NEED, now_s)
            if name is not None:
                live.append(router.begin(name, NEED, now_s))
        elif live:
            placement = live.pop(pick % len(live))
            router.progress(placement, pick % 15, now_s)
            router.end(placement, now_s)
        counts = router.live_turns()
        assert all(counts[f"r{i}"] <= cap for i, cap in enumerate(caps))
        assert sum(counts.values()) == len(live)
    for placement in live:
        router.end(placement, now_s)
    assert all(c.owed_tokens == 0 for c in router.explain(NEED, now_s))


def test_long_prompts_and_long_answers_go_to_the_pools_that_suit_them() -> None:
    """Compute-rich cards take prompts, bandwidth-rich ones take answers; nobody configures it."""
    router = router_with(
        *(view(f"compute-{k}", prefill_tok_s=40e3, decode_tok_s=500.0) for k in range(2)),
        *(view(f"bandwidth-{k}", prefill_tok_s=5e3, decode_tok_s=2e3) for k in range(2)),
    )
    placed = {"read": list[str](), "write": list[str]()}
    for number in range(8):
        for kind, prompt, answer in (("read", 8_000, 16), ("write", 64, 512)):
            need = TurnNeed(f"{kind}{number}", prompt, answer)
            chosen = router.choose(need, 0.0)
            assert chosen is not None
            router.begin(chosen, need, 0.0)
            placed[kind].append(chosen)
    assert all(name.startswith("compute") for name in placed["read"][:4])
    assert all(name.startswith("bandwidth") for name in placed["write"])
    by_pool = [name.startswith("compute") for name in placed["read"]]
    assert sum(by_pool) >= 6, "a pool that is full sends some to the other one"


def test_a_turn_costs_what_one_turn_takes_there_not_what_a_full_batch_would() -> None:
    """Two idle replicas that offer the same rate: a turn goes where turns were faster."""
    router = router_with(view("slow", decode_tok_s=4e3), view("quick", decode_tok_s=4e3))
    for name, pace in (("slow", 50), ("quick", 150)):
        turn = router.begin(name, TurnNeed(name, 8, 512), 0.0)
        router.progress(turn, 1, 1.0)
        router.progress(turn, 2 * pace, 3.0)
        router.end(turn, 3.0, finished=True)
    cost_s = {c.replica: c.cost_s for c in router.explain(LONG, 60.0)}
    assert cost_s["slow"] > 2 * cost_s["quick"]
    assert router.choose(LONG, 60.0) == "quick"


KEPT = 50


def one_turn(router: Router, need: TurnNeed, now_s: float, *, wanted: bool = True) -> None:
    placement = router.begin("a", need, now_s)
    router.progress(placement, 5, now_s)
    router.end(placement, now_s, finished=wanted, wanted=wanted)


def router_of_one() -> Router:
    router = Router(sessions_kept=KEPT)
    router.set_table([ReplicaView("a", ReplicaKind.DEDICATED, True, 1, 8)], 0.0)
    return router


def test_sessions_that_are_never_finished_are_bounded_and_the_oldest_go_first() -> None:
    router = router_of_one()
    for number in range(20 * KEPT):
        group = f"g{number // 4}"
        one_turn(router, TurnNeed(f"t{number}", 10, 9, group=group), float(number))
        assert router.sessions_known <= KEPT
    last = 20 * KEPT - 1
    cached = router.explain(TurnNeed(f"t{last}", 15, 9), float(last))[0].uncached_tokens
    assert cached == 0
    assert router.explain(TurnNeed("t0", 15, 9), float(last))[0].uncached_tokens == 15


def test_a_turn_that_nobody_wants_brings_no_finished_session_back() -> None:
    router = router_of_one()
    running = TurnNeed("t", 10, 9)
    one_turn(router, running, 0.0)
    assert router.sessions_known == 1
    router.forget("t")
    one_turn(router, running, 1.0, wanted=False)
    assert router.sessions_known == 0
    assert router.live_turns() == {"a": 0}


# ---- index ----


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


# ---- shared prefixes ----


LINE = list(range(20 * BLOCK_TOKENS))
OTHER = [token + 1 for token in LINE]


def dedicated(name: str) -> ReplicaView:
    return ReplicaView(name, ReplicaKind.DEDICATED, True, 1, 8, 0, 1_000.0, 1_000.0)


def need(tokens: list[int], salt: str = "") -> TurnNeed:
    return TurnNeed("", len(tokens), 16, prefix_keys=prefix_keys(tokens, salt))


def ran(router: Router, tokens: list[int], replica: str, at_s: float, salt: str = "") -> None:
    placement = router.begin(replica, need(tokens, salt), at_s)
    router.progress(placement, 16, at_s + 0.1)
    router.end(placement, at_s + 0.2, finished=True)


def fleet(replicas: int = 4) -> Router:
    router = Router()
    router.set_table([dedicated(f"r{k}") for k in range(replicas)], 0.0)
    return router


def test_the_next_turn_of_a_conversation_goes_to_the_one_that_has_its_beginning() -> None:
    router = fleet()
    ran(router, LINE, "r2", 1.0)
    for grown in (LINE + [7] * 40, LINE + [7] * 640):
        assert router.choose(need(grown), 10.0) == "r2"
    costs = {each.replica: each.uncached_tokens for each in router.explain(need(LINE), 10.0)}
    assert costs["r2"] == 0
    assert costs["r0"] == len(LINE)


def test_a_conversation_that_was_rendered_anew_is_found_by_what_stayed() -> None:
    """Templates leave out the thinking of earlier turns: the prompt differs near its end."""
    router = fleet()
    ran(router, LINE, "r3", 1.0)
    anew = LINE[: 17 * BLOCK_TOKENS + 5] + [9] * 300
    assert router.choose(need(anew), 10.0) == "r3"


def test_less_than_half_of_a_prompt_or_another_salt_is_no_reason() -> None:
    router = fleet()
    ran(router, LINE[: 8 * BLOCK_TOKENS], "r3", 1.0)
    cold = {each.uncached_tokens for each in router.explain(need(LINE), 10.0)}
    assert cold == {len(LINE)}
    ran(router, LINE, "r3", 2.0)
    assert {each.uncached_tokens for each in router.explain(need(LINE, "x"), 10.0)} == {len(LINE)}
    assert {each.uncached_tokens for each in router.explain(need(OTHER), 10.0)} == {len(LINE)}


def test_of_several_holders_the_one_that_owes_least_counts() -> None:
    router = fleet()
    ran(router, LINE, "r1", 1.0)
    ran(router, LINE, "r2", 2.0)
    router.begin("r2", need(OTHER), 3.0)
    assert router.choose(need(LINE), 3.0) == "r1"


def test_a_new_version_forgets_what_was_cached() -> None:
    router = fleet(2)
    ran(router, LINE, "r1", 1.0)
    newer = [ReplicaView(f"r{k}", ReplicaKind.DEDICATED, True, 2, 8, 0, 1e3, 1e3) for k in range(2)]
    router.set_table(newer, 2.0)
    assert {each.uncached_tokens for each in router.explain(need(LINE), 10.0)} == {len(LINE)}


def test_a_short_prompt_has_no_keys_and_a_key_says_all_before_it() -> None:
    assert prefix_keys([1] * (2 * BLOCK_TOKENS - 1), "") == ()
    keys = prefix_keys(LINE, "")
    assert len(keys) == 20
    assert prefix_keys(LINE[: 5 * BLOCK_TOKENS + 3], "") == keys[:5]
    assert not set(prefix_keys(OTHER, "")) & set(keys)


def test_what_is_remembered_is_bounded_and_the_newest_stays() -> None:
    shared = SharedPrefixes(kept=100)
    for turn in range(1_000):
        shared.note(prefix_keys([turn, *LINE], ""), f"r{turn}", 1)
        assert len(shared) <= 100
    assert shared.find(prefix_keys([999, *LINE], "")).holders[0].replica == "r999"
    assert shared.find(prefix_keys([0, *LINE], "")).tokens == 0


# ---- lengths ----


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


# ---- paces ----


LATER = TurnNeed("", 100, 300)
OFFERED_TOK_S = 2_000.0


def router_of(*names: str) -> Router:
    router = Router()
    rows = [ReplicaView(n, ReplicaKind.DEDICATED, True, 1, 8, 0, OFFERED_TOK_S, 1e4) for n in names]
    router.set_table(rows, 0.0)
    return router


def run(
    router: Router, replica: str, tokens: int, tok_s: float, at_s: float = 0.0
) -> TurnPlacement:
    """A turn on `replica` that has made `tokens` one by one, at `tok_s`."""
    placement = router.begin(replica, LATER, at_s)
    for number in range(tokens):
        router.progress(placement, 1, at_s + 1.0 + number / tok_s)
    return placement


def rest_of(tokens: int) -> TurnNeed:
    return replace(
        LATER, prompt_tokens=100 + tokens, budget_tokens=300 - tokens, made_tokens=tokens
    )


def test_of_equal_replicas_none_looks_faster_because_it_idles() -> None:
    router = router_of("a", "b")
    for name in ("a", "b"):
        router.end(run(router, name, 60, 30.0), 4.0, finished=False)
    live = run(router, "a", 60, 30.0, at_s=4.0)
    left_s = router.left_s(live, rest_of(60), 0.0)
    assert left_s == pytest.approx(240 / 30, rel=0.05)
    quote = router.copy_of(rest_of(60), "a", 7.0)
    assert quote is not None
    # The rate that it offers would promise an eighth of a second.
    assert quote.cost_s == pytest.approx(240 / 30 + 160 / 1e4, rel=0.05)


def test_a_slow_turn_is_known_by_its_own_pace_and_a_copy_goes_where_turns_are_fast() -> None:
    router = router_of("slow", "middling", "fast")
    for name, tok_s in (("middling", 40.0), ("fast", 80.0)):
        router.end(run(router, name, 60, tok_s), 4.0)
    live = run(router, "slow", 20, 5.0, at_s=4.0)
    assert router.left_s(live, rest_of(20), 0.7) == pytest.approx(280 / 5 + 0.7, rel=0.01)
    quote = router.copy_of(rest_of(20), "slow", 9.0)
    assert quote is not None
    assert (quote.replica, quote.places) == ("fast", 8)
    placement = router.take(quote, "a copy", 9.0)
    assert placement.replica == "fast"
    assert router.live_turns() == {"slow": 1, "middling": 0, "fast": 1}


def test_where_no_turn_was_seen_nothing_is_promised() -> None:
    router = router_of("a", "b")
    live = run(router, "a", 5, 1.0)
    assert router.left_s(live, rest_of(5), 3.0) == 0.0
    assert router.copy_of(rest_of(5), "a", 6.0) is None
    router.end(run(router, "a", 30, 10.0), 4.0)
    quote = router.copy_of(rest_of(5), "a", 6.0)
    assert quote is not None
    assert quote.cost_s == pytest.approx(295 / 10, rel=0.01), "as turns have it elsewhere"
