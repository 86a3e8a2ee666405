"""Staleness admission: which groups of samples may start, so that none is too old to train on.

    start --> running --finish--> ready --take--> (trained on)
                 |                  |
                 +---- aged out ----+--> (void, all members together: the prompt starts anew)

The capacity rule is AReaL's (arXiv 2505.24298). Each training step takes `groups_per_step` groups
and turns version v into v + 1. With n groups not yet trained on ahead of it, a group begun now is
trained on at version v + n // groups_per_step at the earliest, so it may start only while
n < (max_versions + 1) * groups_per_step. A step that was taken counts as ahead until its version is
published, or until the next `take` shows that the version stays.

`GroupAge` follows the oldest version behind a group's tokens. A turn that was sent and has not
answered is presumed to be sampled by the newest version of that time; its first version stamp
replaces the presumption. Every stamp and every new version checks the whole group, and a group
beyond the bound ages out, so whatever `take` finds is within it.

A group may be `kept`: its prompt aged out before. It is taken first, and a step waits for it when
it could not be in time for a later one. Capacity is a whole number of steps, so there is always
room for all kept groups as long as each step publishes one version.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """Limit on age: tokens are at most `max_versions` behind; 0 is synchronous training."""

    max_versions: int

    def __post_init__(self) -> None:
        if self.max_versions < 0:
            raise ValueError(f"max_versions is {self.max_versions}; give 0 or more")

    def oldest(self, current: int) -> int:
        """Return the oldest version whose tokens may be trained on from version `current`."""
        return max(0, current - self.max_versions)

    def admits_token(self, token_version: int, current: int) -> bool:
        """Return True if a token of `token_version` may be trained on from version `current`."""
        return token_version >= self.oldest(current)


@dataclass(slots=True)
class _Turn:
    sample: int
    oldest: int
    stamped: bool = False


class GroupAge:
    """Oldest policy version among the tokens of one group's running and ended turns."""

    def __init__(self) -> None:
        self._turns: dict[int, _Turn] = {}
        self._came: dict[int, int] = {}
        self._begun = 0

    @property
    def oldest(self) -> int | None:
        """Oldest version of the group's tokens, None while no turn was sent."""
        running = [turn.oldest for turn in self._turns.values()]
        return min([*running, *self._came.values()], default=None)

    def begin_turn(self, sample: int, presumed: int) -> int:
        """Record a sent turn, presumed to be of version `presumed`; return the turn's number."""
        self._begun += 1
        self._turns[self._begun] = _Turn(sample, presumed)
        return self._begun

    def stamp(self, turn: int, version: int) -> None:
        """Record that a running turn got tokens of `version`, which replaces the presumed one."""
        row = self._turns[turn]
        row.oldest = min(row.oldest, version) if row.stamped else version
        row.stamped = True

    def end_turn(self, turn: int) -> None:
        """End a running turn and count its oldest token version for its sample; ignore a turn that
        got no tokens or is unknown.
        """
        row = self._turns.pop(turn, None)
        if row is not None and row.stamped:
            self._came[row.sample] = min(row.oldest, self._came.get(row.sample, row.oldest))

    def forget(self, sample: int) -> None:
        """Delete the versions and turns of a sample, which is tried again."""
        self._came.pop(sample, None)
        for number in [number for number, row in self._turns.items() if row.sample == sample]:
            del self._turns[number]


@dataclass(frozen=True, slots=True)
class TurnTicket:
    """Permission for turn `number` of a group; its tokens must be of `min_version` or newer."""

    number: int
    min_version: int


@dataclass(frozen=True, slots=True)
class TakenGroup:
    """Group to train on now, by number, with its oldest token's version, None without tokens."""

    number: int
    oldest_version: int | None


@dataclass(slots=True)
class _AdmittedGroup:
    began: int
    kept: bool
    spare: bool
    ready: bool = False
    age: GroupAge = field(default_factory=GroupAge)


class StalenessAdmission:
    """Admission of groups so that none is too old when trained on; `published` is the newest
    version.

    Groups go by number, which the caller chooses.
    """

    def __init__(self, bound: StalenessBound, groups_per_step: int, published: int = 0) -> None:
        if groups_per_step < 1:
            raise ValueError(f"groups_per_step is {groups_per_step}; a step needs at least one")
        self._bound = bound
        self._groups_per_step = groups_per_step
        self.published = published
        self._groups: dict[int, _AdmittedGroup] = {}
        # Groups that are neither kept nor spare, by when they began: the line behind the kept ones.
        self._line: list[int] = []
        self._began = self._kept = self._ready = self._training = 0
        # Groups of the present step that were taken before its last part.
        self.taken = 0

    @property
    def capacity(self) -> int:
        """Most groups that may be running or ready at once."""
        return (self._bound.max_versions + 1) * self._groups_per_step

    @property
    def room(self) -> int:
        """Number of groups that may start now."""
        return self.capacity - self._kept - len(self._line) - self._training

    @property
    def ready(self) -> int:
        """Number of groups that are complete and not yet taken."""
        return self._ready

    def start(self, group: int, *, kept: bool = False, spare: bool = False) -> None:
        """Start a group. spare: it takes no room until it finishes in place of another group.

        kept: a step waits for it. Raises ValueError if the group runs already or there is no room.
        """
        if group in self._groups:
            raise ValueError(f"group {group} is running already")
        assert not (kept and spare), "a spare group is given up as soon as it is not needed"
        if not spare and self.room < 1:
            raise ValueError(
                f"{self.capacity} groups are ahead of group {group}: it would be more than"
                f" {self._bound.max_versions} versions old when trained on"
            )
        self._began += 1
        self._groups[group] = entry = _AdmittedGroup(self._began, kept, spare)
        self._line_up(entry)

    def begin_turn(self, group: int, sample: int) -> TurnTicket:
        """Record that a running group sends a turn; return its ticket with the oldest version
        allowed.
        """
        entry = self._groups[group]
        min_version = self._min_version(entry)
        # A group that a step waits for must not turn out older than assumed.
        presumed = min_version if entry.kept else self.published
        return TurnTicket(entry.age.begin_turn(sample, presumed), min_version)

    def stamp(self, group: int, turn: int, version: int) -> bool:
        """Record the version of a turn's tokens; return False if the group became too old.

        A group that is too old is removed.
        """
        entry = self._groups[group]
        entry.age.stamp(turn, version)
        if self._in_time(entry):
            return True
        self._remove(group)
        return False

    def end_turn(self, group: int, turn: int) -> None:
        self._groups[group].age.end_turn(turn)

    def forget(self, group: int, sample: int) -> None:
        """Delete the token versions of a sample that is tried again."""
        self._groups[group].age.forget(sample)

    def finish(self, group: int) -> None:
        """Record that all samples of a group are complete, so that `take` may return it."""
        entry = self._groups[group]
        assert not entry.ready, f"group {group} is complete already"
        self._ready += 1
        entry.ready = True
        if entry.spare:
            entry.spare = False
            self._line_up(entry)
        assert self.room >= 0, "more groups are ready than may be trained on in time"

    def drop(self, group: int) -> None:
        """Remove a group that is given up."""
        self._remove(group)

    def publish(self, version: int) -> tuple[int, ...]:
        """Record a newer version; remove and return the groups that became too old.

        Raises ValueError for an older version.
        """
        if version < self.published:
            raise ValueError(f"version {version} is older than {self.published}; versions grow")
        if version > self.published:
            self.published, self._training, self.taken = version, 0, 0
        old = tuple(name for name, entry in self._groups.items() if not self._in_time(entry))
        for name in old:
            self._remove(name)
        return old

    def take(self, *, rest: bool = False, part: bool = False) -> tuple[TakenGroup, ...]:
        """Remove and return a step's groups: kept ones, then the oldest; () while it must wait.

        rest: no group runs or will start, so that a smaller step is returned too. part: those that
        are ready are returned, and the others of the step by later calls. `taken` is 0 once the
        step is complete.
        """
        if not self.taken:
            self._training = 0
        left = self._groups_per_step - self.taken
        if self._ready < left and not (rest or part):
            return ()
        ready = sorted(
            (not entry.kept, self._oldest(entry), place, name)
            for place, (name, entry) in enumerate(self._groups.items())
            if entry.ready
        )
        names = [name for _, _, _, name in ready[:left]]
        if not rest and self._must_wait(names):
            running = sum(entry.kept and not entry.ready for entry in self._groups.values())
            names = names[: max(0, left - running)] if part else []
        groups = tuple(TakenGroup(name, self._groups[name].age.oldest) for name in names)
        for name in names:
            assert self._in_time(self._groups[name]), f"group {name} is too old to be trained on"
            self._remove(name)
        self._training += len(groups)
        self.taken = 0 if rest or len(groups) == left else self.taken + len(groups)
        return groups

    def _remove(self, group: int) -> None:
        entry = self._groups.pop(group)
        self._ready -= entry.ready
        if entry.kept:
            self._kept -= 1
        elif not entry.spare:
            del self._line[bisect_left(self._line, entry.began)]

    def _line_up(self, entry: _AdmittedGroup) -> None:
        """Count a group's room from now on."""
        if entry.kept:
            self._kept += 1
        elif not entry.spare:
            insort(self._line, entry.began)

    def _min_version(self, entry: _AdmittedGroup) -> int:
        """Return the oldest version that is still recent enough when the group's turn comes."""
        if entry.kept:
            return self._oldest(entry)
        ahead = self._training + self._kept + bisect_left(self._line, entry.began)
        trained_at = self.published + ahead // self._groups_per_step
        return min(self.published, self._bound.oldest(trained_at))

    def _must_wait(self, taken: list[int]) -> bool:
        """Return True if a running kept group would be too old after a step without it."""
        left = sorted(
            (self._oldest(entry) + self._bound.max_versions, entry.ready)
            for name, entry in self._groups.items()
            if entry.kept and name not in taken
        )
        running = False
        for count, (last_version, is_ready) in enumerate(left, 1):
            running = running or not is_ready
            if running and count > (last_version - self.published) * self._groups_per_step:
                return True
        return False

    def _oldest(self, entry: _AdmittedGroup) -> int:
        """Return the oldest version of the group's tokens, the published one without tokens."""
        oldest = entry.age.oldest
        return self.published if oldest is None else oldest

    def _in_time(self, entry: _AdmittedGroup) -> bool:
        return self._bound.admits_token(self._oldest(entry), self.published)
