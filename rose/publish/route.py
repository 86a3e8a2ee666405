"""Route: whom a node asks for an object, and what it may ask of each. Pure.

    before   members before this one in the object's order: they fetch it when asked
    holders  the next after it: they give what they have, or what comes to them from the origin
    origin   last
A member that was away asks the holders, so that what crossed the slow link meanwhile does not cross
it again. Whoever takes from a holder gives nothing of it to others, so no circle can form.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from rose.publish.rendezvous import order

# Those who took over while this member was away are next in the order.
MOST_HOLDERS = 2


@dataclass(frozen=True, slots=True)
class Route:
    """Addresses, each once."""

    before: tuple[str, ...]
    holders: tuple[str, ...]
    origin: str

    @property
    def sources(self) -> tuple[str, ...]:
        """All of them, in the order in which they are asked."""
        return (*self.before, *self.holders, self.origin)

    @classmethod
    def of(cls, name: str, me: str, members: Iterable[str], origin: str) -> "Route":
        """Of an object. `me`: empty for a node that relays nothing: it may ask everybody."""
        if not me:
            return cls(tuple(order(members, name)), (), origin)
        everyone = order({*members, me}, name)
        at = everyone.index(me)
        after = everyone[at + 1 : at + 1 + MOST_HOLDERS]
        return cls(tuple(everyone[:at]), tuple(after), origin)
