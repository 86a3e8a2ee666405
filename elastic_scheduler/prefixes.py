"""Which replica holds a trajectory's prefix in its cache."""

from collections import OrderedDict
from dataclasses import dataclass

from elastic_scheduler.names import kept_name

TRAJECTORIES_KEPT = 131_072


@dataclass(frozen=True, slots=True)
class Prefix:
    """`tokens` of a trajectory are cached by `replica`, made under policy `version`."""

    replica: str
    tokens: int
    version: int


class PrefixBook:
    """The last holder of each trajectory; those not seen for longest are forgotten first."""

    def __init__(self, capacity: int = TRAJECTORIES_KEPT) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; keep at least one trajectory")
        self._capacity = capacity
        self._held: OrderedDict[str, Prefix] = OrderedDict()

    def note(self, session: str, prefix: Prefix) -> None:
        """The trajectory's latest turn ended on a replica."""
        name = kept_name(session)
        self._held[name] = prefix
        self._held.move_to_end(name)
        if len(self._held) > self._capacity:
            self._held.popitem(last=False)

    def find(self, session: str) -> Prefix | None:
        """What is known of a trajectory; its holder may have changed versions since."""
        return self._held.get(kept_name(session))

    def forget(self, session: str) -> None:
        """The trajectory is over."""
        self._held.pop(kept_name(session), None)

    def __len__(self) -> int:
        return len(self._held)
