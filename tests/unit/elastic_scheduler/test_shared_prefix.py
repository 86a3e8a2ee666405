"""Turns without a trajectory's name go where their beginning is cached, and nowhere for less."""

from elastic_scheduler import ReplicaKind, ReplicaView, Router, TurnNeed, prefix_keys
from elastic_scheduler.routing.predictors import BLOCK_TOKENS, SharedPrefixes

LONG = list(range(20 * BLOCK_TOKENS))
OTHER = [token + 1 for token in LONG]


def view(name: str) -> ReplicaView:
    return ReplicaView(name, ReplicaKind.DEDICATED, True, 1, 8, 0, 1_000.0, 1_000.0)


def need(tokens: list[int], salt: str = "") -> TurnNeed:
    return TurnNeed("", len(tokens), 16, prefix_keys=prefix_keys(tokens, salt))


def ran(router: Router, tokens: list[int], replica: str, at_s: float, salt: str = "") -> None:
    placement = router.begin(replica, need(tokens, salt), at_s)
    router.progress(placement, 16, at_s + 0.1)
    router.end(placement, at_s + 0.2, finished=True)


def fleet(replicas: int = 4) -> Router:
    router = Router()
    router.set_table([view(f"r{k}") for k in range(replicas)], 0.0)
    return router


def test_the_next_turn_of_a_conversation_goes_to_the_one_that_has_its_beginning() -> None:
    router = fleet()
    ran(router, LONG, "r2", 1.0)
    for grown in (LONG + [7] * 40, LONG + [7] * 640):
        assert router.choose(need(grown), 10.0) == "r2"
    costs = {each.replica: each.uncached_tokens for each in router.explain(need(LONG), 10.0)}
    assert costs["r2"] == 0
    assert costs["r0"] == len(LONG)


def test_a_conversation_that_was_rendered_anew_is_found_by_what_stayed() -> None:
    """Templates leave out the thinking of earlier turns: the prompt differs near its end."""
    router = fleet()
    ran(router, LONG, "r3", 1.0)
    anew = LONG[: 17 * BLOCK_TOKENS + 5] + [9] * 300
    assert router.choose(need(anew), 10.0) == "r3"


def test_less_than_half_of_a_prompt_or_another_salt_is_no_reason() -> None:
    router = fleet()
    ran(router, LONG[: 8 * BLOCK_TOKENS], "r3", 1.0)
    cold = {each.uncached_tokens for each in router.explain(need(LONG), 10.0)}
    assert cold == {len(LONG)}
    ran(router, LONG, "r3", 2.0)
    assert {each.uncached_tokens for each in router.explain(need(LONG, "x"), 10.0)} == {len(LONG)}
    assert {each.uncached_tokens for each in router.explain(need(OTHER), 10.0)} == {len(LONG)}


def test_of_several_holders_the_one_that_owes_least_counts() -> None:
    router = fleet()
    ran(router, LONG, "r1", 1.0)
    ran(router, LONG, "r2", 2.0)
    router.begin("r2", need(OTHER), 3.0)
    assert router.choose(need(LONG), 3.0) == "r1"


def test_a_new_version_forgets_what_was_cached() -> None:
    router = fleet(2)
    ran(router, LONG, "r1", 1.0)
    newer = [ReplicaView(f"r{k}", ReplicaKind.DEDICATED, True, 2, 8, 0, 1e3, 1e3) for k in range(2)]
    router.set_table(newer, 2.0)
    assert {each.uncached_tokens for each in router.explain(need(LONG), 10.0)} == {len(LONG)}


def test_a_short_prompt_has_no_keys_and_a_key_says_all_before_it() -> None:
    assert prefix_keys([1] * (2 * BLOCK_TOKENS - 1), "") == ()
    keys = prefix_keys(LONG, "")
    assert len(keys) == 20
    assert prefix_keys(LONG[: 5 * BLOCK_TOKENS + 3], "") == keys[:5]
    assert not set(prefix_keys(OTHER, "")) & set(keys)


def test_what_is_remembered_is_bounded_and_the_newest_stays() -> None:
    shared = SharedPrefixes(kept=100)
    for turn in range(1_000):
        shared.note(prefix_keys([turn, *LONG], ""), f"r{turn}", 1)
        assert len(shared) <= 100
    assert shared.find(prefix_keys([999, *LONG], "")).holders[0].replica == "r999"
    assert shared.find(prefix_keys([0, *LONG], "")).tokens == 0
