"""A second copy of a group's slowest member, when it pays; the first answer wins.

    start --> copy 0 ---------------------finish--> Won, the other copy is to be cancelled
                 |  consider: Hedge                    (every later answer of the member: None)
                 +--> copy 1 ----------finish--> Won

A group is trained on when its last member is there, so only the slowest members hold it up. A copy
goes on from the tokens journaled so far, on a replica that would be done sooner by a margin; it
costs that replica's time and is given back when either copy ends. Whichever answers first wins: of
two unequal continuations that is more often the shorter one, so copies are bounded for each group.
"""

from dataclasses import dataclass

# A copy must be expected to save the group this share of the time that is left.
MARGIN = 0.3
# Members that must be done before the rest counts as the tail.
DONE_SHARE = 0.5
COPIES = 2


@dataclass(frozen=True, slots=True)
class Hedge:
    """Action: start copy `copy` of a group's member; saves_s: seconds that the group should
    gain.
    """

    member: str
    copy: int
    saves_s: float


@dataclass(frozen=True, slots=True)
class Won:
    """Action: deliver the answer of this copy of a member, and cancel its other copies."""

    member: str
    copy: int
    cancel: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MemberView:
    """Running member of a group: seconds that it still needs, and that a new copy would need."""

    member: str
    left_s: float
    copy_s: float


@dataclass(slots=True)
class _Member:
    live: set[int]
    begun: int = 1
    done: bool = False


class HedgedGroup:
    """Group of samples trained on together, whose slowest member may get a second copy.

    Each member's answer is delivered exactly once.
    """

    def __init__(self, members: tuple[str, ...], max_hedges: int = 1) -> None:
        if not members or len(set(members)) < len(members) or max_hedges < 0:
            raise ValueError("a group needs members with names of their own, and max_hedges >= 0")
        self._members = {name: _Member({0}) for name in members}
        self._hedges_left = max_hedges

    @property
    def complete(self) -> bool:
        """True if every member's answer was delivered."""
        return all(member.done for member in self._members.values())

    @property
    def may_hedge(self) -> bool:
        """True if a copy may be started: some are left, and half of the members are done."""
        done = sum(member.done for member in self._members.values())
        return self._hedges_left > 0 and done >= DONE_SHARE * len(self._members)

    def restart(self, member: str) -> None:
        """Start a member again that ended without an answer; copies that were started still
        count.
        """
        entry = self._members[member]
        if not entry.done:
            entry.live, entry.begun = {0}, 1

    def is_done(self, member: str) -> bool:
        """Return True if the member's answer was delivered."""
        return self._members[member].done

    def consider(self, running: tuple[MemberView, ...], free_places: int) -> Hedge | None:
        """Return the copy of a member to start now, None if none would pay; ask again after
        changes.

        Only the slowest member decides when the group is done, so a copy of another saves nothing.
        If several are about as slow, the first is copied if copies and places are left for the
        others.
        """
        if free_places < 1 or not self.may_hedge:
            return None
        views = [view for view in running if not self._members[view.member].done]
        views.sort(key=lambda view: -view.left_s)
        saves_s = self._saves_s(views, min(free_places, self._hedges_left))
        if not views or saves_s <= MARGIN * views[0].left_s:
            return None
        member = self._members[views[0].member]
        copy, member.begun = member.begun, member.begun + 1
        member.live.add(copy)
        self._hedges_left -= 1
        return Hedge(views[0].member, copy, saves_s)

    def _saves_s(self, views: list[MemberView], copies: int) -> float:
        """Return the group's gain from copies of the best number of its slowest members."""
        best_s = copied_s = 0.0
        for number, view in enumerate(views[:copies]):
            if self._members[view.member].begun >= COPIES:
                break
            copied_s = max(copied_s, view.copy_s)
            rest_s = views[number + 1].left_s if number + 1 < len(views) else 0.0
            best_s = max(best_s, views[0].left_s - max(copied_s, rest_s))
        return best_s

    def finished(self, member: str, copy: int) -> Won | None:
        """Take a copy's whole answer; return which copies to cancel, None if already delivered."""
        entry = self._members[member]
        if entry.done or copy not in entry.live:
            return None
        entry.done = True
        others = tuple(sorted(entry.live - {copy}))
        entry.live.clear()
        return Won(member, copy, others)

    def failed(self, member: str, copy: int) -> bool:
        """End a copy without an answer; return True if it was the last one, to be tried again.

        The last copy still counts as running.
        """
        entry = self._members[member]
        if entry.done or copy not in entry.live:
            return False
        if len(entry.live) > 1:
            entry.live.discard(copy)
            return False
        return True
