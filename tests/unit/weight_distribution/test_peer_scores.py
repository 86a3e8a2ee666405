"""Rules of which member relays an object, and which one is asked next."""

from hypothesis import given
from hypothesis import strategies as st

from weight_transfer.fetch.relay_order import CORRUPT_PAUSE_S, PeerScores, order

MEMBERS = [f"http://node-{n}:1" for n in range(8)]


@given(st.sets(st.sampled_from(MEMBERS), min_size=2), st.text(max_size=9), st.data())
def test_a_member_that_goes_moves_nothing_of_the_others(
    members: set[str], name: str, data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(sorted(members)))
    before = order(members, name)
    assert order(members - {gone}, name) == [member for member in before if member != gone]


def test_objects_spread_evenly() -> None:
    firsts = [order(MEMBERS, f"chunk-{n}")[0] for n in range(4_000)]
    counts = [firsts.count(member) for member in MEMBERS]
    assert min(counts) > 400
    assert max(counts) < 600


def test_who_failed_is_asked_last_for_a_while_and_longer_each_time() -> None:
    scores = PeerScores()
    scores.failed("a", 10.0)
    assert scores.ordered(["a", "b"], 10.1) == ["b", "a"]
    assert scores.ordered(["a", "b"], 10.6) == ["a", "b"]
    scores.failed("a", 10.6)
    assert scores.ordered(["a", "b"], 11.5) == ["b", "a"]
    scores.served("a", 100, 1.0, 10.6)
    scores.failed("a", 20.0)
    assert scores.ordered(["a", "b"], 20.6) == ["a", "b"], "forgiven once it served"


def test_who_sent_wrong_bytes_is_avoided_for_minutes() -> None:
    scores = PeerScores()
    scores.corrupt("a", 0.0)
    assert scores.ordered(["a", "b"], CORRUPT_PAUSE_S - 1) == ["b", "a"]
    assert scores.ordered(["a"], 1.0) == ["a"], "better than nobody"


def test_slow_is_said_only_beside_an_origin_that_is_fast_meanwhile() -> None:
    scores = PeerScores()
    assert not scores.dawdles("a", 1.0, "origin", 0.0)
    scores.served("b", 1_000_000, 1.0, 1.0)
    assert not scores.dawdles("a", 1.0, "origin", 0.0), "b may have had what a waits for"
    scores.served("origin", 1_000_000, 1.0, 2.0)
    assert scores.dawdles("a", 50_000, "origin", 1.0)
    assert not scores.dawdles("a", 500_000, "origin", 1.0)
    assert not scores.dawdles("a", 50_000, "origin", 2.0), "then nobody else was on the link"
    scores.served("origin", 1_000_000, 10.0, 3.0)
    assert not scores.dawdles("a", 50_000, "origin", 1.0), "many share it now"
    assert not scores.dawdles("origin", 1.0, "origin", 1.0), "nobody is behind it"
    scores.served("origin", 1_000, 1e-6, 9.0)
    assert not scores.dawdles("a", 50_000, "origin", 8.0), "a buffer on the way took that"
