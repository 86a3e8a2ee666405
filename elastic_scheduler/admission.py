"""Which groups a job may start, so that none is too old when it is trained on.

    start --> running --finish--> ready --take--> (trained on)
                 |                  |
                 +---- aged out ----+--> (dropped, all members together)

Each training step takes `groups_per_step` groups and turns version v into v + 1. With n groups not
yet taken ahead of it, a group begun now is trained on at version v + n // groups_per_step at the
earliest, so it may start only while n < (max_versions + 1) * groups_per_step (the capacity rule of
AReaL, arXiv 2505.24298). Groups that took longer than that age out: every take and every start of a
turn looks at the oldest token of the whole group.
"""

from dataclasses import dataclass

from elastic_scheduler.staleness import StalenessBound


@dataclass(slots=True)
class _Group:
    oldest_version: int
    ready: bool = False


class StalenessAdmission:
    """One job's groups; `published` is the newest version of its policy."""

    def __init__(self, bound: StalenessBound, groups_per_step: int, published: int = 0) -> None:
        if groups_per_step < 1:
            raise ValueError(f"groups_per_step is {groups_per_step}; a step needs at least one")
        self._bound = bound
        self._groups_per_step = groups_per_step
        self.published = published
        self._groups: dict[str, _Group] = {}

    @property
    def capacity(self) -> int:
        """Groups that may be running or ready at once."""
        return (self._bound.max_versions + 1) * self._groups_per_step

    @property
    def waiting(self) -> int:
        """Groups running or ready."""
        return len(self._groups)

    def start(self, group: str) -> str:
        """Begin a group; returns why it may not, empty when it did."""
        if group in self._groups:
            return f"group {group} is running already"
        if len(self._groups) >= self.capacity:
            return (
                f"{len(self._groups)} groups are ahead: it would be more than"
                f" {self._bound.max_versions} versions old when trained on"
            )
        self._groups[group] = _Group(self.published)
        return ""

    def may_start_turn(self, group: str, version: int) -> str:
        """Why a turn of the group may not start on a replica of `version`; empty when it may."""
        entry = self._groups.get(group)
        if entry is None:
            return f"group {group} aged out or was never started"
        ahead = 0
        for name in self._groups:
            if name == group:
                break
            ahead += 1
        trained_at = self.published + ahead // self._groups_per_step
        if not self._bound.admits_token(min(version, entry.oldest_version), trained_at):
            return (
                f"tokens of version {version} would be trained on at {trained_at} at the earliest"
            )
        return ""

    def stamp(self, group: str, version: int) -> bool:
        """Tokens of `version` came for the group; False when it aged out and they are void."""
        entry = self._groups.get(group)
        if entry is None:
            return False
        entry.oldest_version = min(entry.oldest_version, version)
        if self._bound.admits_token(entry.oldest_version, self.published):
            return True
        del self._groups[group]
        return False

    def finish(self, group: str) -> bool:
        """All members are complete; False when the group aged out."""
        entry = self._groups.get(group)
        if entry is not None:
            entry.ready = True
        return entry is not None

    def drop(self, group: str) -> None:
        """The job gave the group up."""
        self._groups.pop(group, None)

    def publish(self, version: int) -> tuple[str, ...]:
        """A newer version is out; returns the groups that aged out: cancel all their turns."""
        if version < self.published:
            raise ValueError(f"version {version} is older than {self.published}; versions grow")
        self.published = version
        old = tuple(
            name
            for name, entry in self._groups.items()
            if not self._bound.admits_token(entry.oldest_version, version)
        )
        for name in old:
            del self._groups[name]
        return old

    def take(self) -> tuple[str, ...]:
        """A step's groups, those with the oldest tokens first; empty until enough are ready."""
        ready = sorted(
            (entry.oldest_version, place, name)
            for place, (name, entry) in enumerate(self._groups.items())
            if entry.ready
        )
        if len(ready) < self._groups_per_step:
            return ()
        taken = tuple(name for _, _, name in ready[: self._groups_per_step])
        for name in taken:
            del self._groups[name]
        return taken
