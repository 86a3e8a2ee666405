from hypothesis import given
from hypothesis import strategies as st

from elastic_scheduler import ReplicaKind, ReplicaView, Router, TurnNeed, TurnPlacement

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
