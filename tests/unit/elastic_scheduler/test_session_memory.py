"""Leaked sessions: trajectories that nobody finished cost a bounded amount of memory."""

from elastic_scheduler import ReplicaKind, ReplicaView, Router, TurnNeed

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
