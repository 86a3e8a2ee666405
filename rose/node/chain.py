"""The versions a node knows of, and which one a replica needs next."""

from dataclasses import dataclass

# A replica further behind than that finds its way in the publisher's catalog.
STEPS_KEPT = 4_096


@dataclass(frozen=True, slots=True)
class KnownVersion:
    """A version that was announced: whose it is, what it builds on and where it is."""

    job: str
    version: int
    parent: int
    url: str


class VersionChain:
    """Announced versions by their parent; version 0 is the model every engine starts from."""

    def __init__(self) -> None:
        self._by_parent: dict[int, KnownVersion] = {}
        self.newest: KnownVersion | None = None

    def add(self, known: KnownVersion) -> None:
        """Learn of a version; learning it twice changes nothing."""
        self._by_parent[known.parent] = known
        if len(self._by_parent) > STEPS_KEPT:
            del self._by_parent[min(self._by_parent)]
        if self.newest is None or known.version >= self.newest.version:
            self.newest = known

    def after(self, version: int) -> KnownVersion | None:
        """The step that follows `version`, None when a replica at it is up to date."""
        return self._by_parent.get(version)
