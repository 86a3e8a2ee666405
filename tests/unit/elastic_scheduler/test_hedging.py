"""Hedged groups: faster at the end, and every answer exactly once."""

from hypothesis import given
from hypothesis import strategies as st

from elastic_scheduler import HedgedGroup, MemberView

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
