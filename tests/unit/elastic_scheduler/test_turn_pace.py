"""The rest of a turn, and a copy of it, are estimated by the pace of turns, not by rates."""

from dataclasses import replace

import pytest

from elastic_scheduler import ReplicaKind, ReplicaView, Router, TurnNeed, TurnPlacement

NEED = TurnNeed("", 100, 300)
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
    placement = router.begin(replica, NEED, at_s)
    for number in range(tokens):
        router.progress(placement, 1, at_s + 1.0 + number / tok_s)
    return placement


def rest_of(tokens: int) -> TurnNeed:
    return replace(NEED, prompt_tokens=100 + tokens, budget_tokens=300 - tokens, made_tokens=tokens)


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
