"""Reflector: a sans-IO list and watch of one kind of object, and the freshness of its data.

    Start ──> AskList ── Listed ──> AskWatch ── Received (lines) ──> the objects change
                 ▲                     │  ▲
                 │                     │  └── the watch ends, or breaks: again from the last
                 │                     │      resourceVersion, after a pause that doubles
                 └── 410, an ERROR event, an invalid line, a probe that shows other objects ──┘

A list replaces everything: an object that it lacks is gone, even if its deletion fell into a gap of
the watch. Bookmarks only advance the resourceVersion. resourceVersions are opaque: they are
compared for equality, never for order.

A watch is silent while nothing changes, and a broken one may be silent for ever. So the shell
probes each second: it lists names, uids and generations alone. A probe that shows the objects known
here proves that the API server answers and that the watch has missed nothing; `heard_s` is the time
of the last such probe. Two in a row that show others end the watch, and list all anew.

The driver loop is the shell's (`rose.controller.controller`):

    actions = reflector.step(Start(), now_s)
    while actions: carry out each; feed its result: actions += reflector.step(event, now_s)
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

FIRST_PAUSE_S: Final = 0.2
MAX_PAUSE_S: Final = 5.0
# A watch that lived this long was healthy: the pauses begin anew.
STEADY_S: Final = 1.0
# An object of etcd has 1.5 MiB at most, so a longer line is broken.
MAX_LINE_BYTES: Final = 4 << 20
# A probe may overtake the event of the same change.
DOUBTS: Final = 2
GONE: Final = 410

Object = Mapping[str, Any]
Version = tuple[str, str, int]
"""Name, uid and generation, which identify a spec. Writing a status changes none of them."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start the reflector."""


@dataclass(frozen=True, slots=True)
class Listed:
    """Answer to `AskList`: the list as the API server wrote it."""

    body: bytes


@dataclass(frozen=True, slots=True)
class Received:
    """Bytes of the watch, cut anywhere."""

    chunk: bytes


@dataclass(frozen=True, slots=True)
class Opened:
    """The API server accepted the watch."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A list or a watch ended; code: the HTTP status of a refusal, 0 without an answer.

    why: "" for a watch that ended in order.
    """

    why: str = ""
    code: int = 0


@dataclass(frozen=True, slots=True)
class Woke:
    """A pause is over."""


@dataclass(frozen=True, slots=True)
class Probed:
    """A list of metadata alone, requested beside the watch at `asked_s`."""

    body: bytes
    asked_s: float


Event = Start | Listed | Received | Opened | Ended | Woke | Probed


@dataclass(frozen=True, slots=True)
class AskList:
    """Request to list all objects as they are in etcd now."""


@dataclass(frozen=True, slots=True)
class AskWatch:
    """Request to watch from a resourceVersion on, with bookmarks."""

    resource_version: str


@dataclass(frozen=True, slots=True)
class StopWatch:
    """Request to give the watch up: its later events no longer count."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Request to wait, then feed `Woke`."""

    pause_s: float


@dataclass(frozen=True, slots=True)
class Changed:
    """An object that is new or changed (`gone` False), or deleted."""

    name: str
    gone: bool = False


Action = AskList | AskWatch | StopWatch | Pause | Changed


class _Phase(StrEnum):
    IDLE = "idle"
    LISTING = "listing"
    WATCHING = "watching"
    PAUSING = "pausing"


@dataclass(frozen=True, slots=True)
class ReflectorStatus:
    """State of the reflector.

    heard_s: when its objects were last proved complete, None before the first time. code and
    trouble: of the last fault, 0 and "" while there is none.
    """

    objects: Mapping[str, Object]
    synced: bool
    heard_s: float | None
    code: int
    trouble: str


class _NoEventError(ValueError):
    """A line of a watch that cannot be parsed."""


@dataclass(slots=True)
class _Lines:
    """Splitter of a stream into lines; an unfinished line is kept."""

    rest: bytes = b""

    def cut(self, chunk: bytes) -> Iterator[bytes]:
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        if len(self.rest) > MAX_LINE_BYTES:
            raise _NoEventError(f"a line of more than {MAX_LINE_BYTES} bytes")
        yield from (line for line in lines if line.strip())


class Reflector:
    """Objects of one kind on the API server. No clock, no IO: see the module."""

    def __init__(self) -> None:
        self._objects: dict[str, Object] = {}
        self._version = ""
        self._phase = _Phase.IDLE
        self._open = self._synced = self._relisted = False
        self._opened_s = 0.0
        self._lines = _Lines()
        self._failures = self._doubts = 0
        self._heard_s: float | None = None
        self._code, self._trouble = 0, ""

    def status(self) -> ReflectorStatus:
        return ReflectorStatus(
            self._objects, self._synced, self._heard_s, self._code, self._trouble
        )

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Return the actions that follow. Events of calls that are not under way change nothing."""
        match event:
            case Start() | Woke():
                return self._begin() if self._phase in (_Phase.IDLE, _Phase.PAUSING) else []
            case Listed() if self._phase is _Phase.LISTING:
                return self._listed(event.body, now_s)
            case Opened() if self._phase is _Phase.WATCHING:
                # Only a probe shows that nothing was missed.
                self._open, self._opened_s = True, now_s
                self._trouble, self._code = "", 0
                return []
            case Received() if self._phase is _Phase.WATCHING:
                return self._received(event.chunk, now_s)
            case Ended() if self._phase in (_Phase.LISTING, _Phase.WATCHING):
                return self._ended(event, now_s)
            case Probed():
                return self._probed(event, now_s)
            case _:
                return []

    def _begin(self) -> list[Action]:
        self._lines = _Lines()
        self._open, self._doubts = False, 0
        if self._version:
            self._phase = _Phase.WATCHING
            return [AskWatch(self._version)]
        self._phase = _Phase.LISTING
        return [AskList()]

    # ---- lists ----

    def _listed(self, body: bytes, now_s: float) -> list[Action]:
        try:
            said = _json(body)
            version = _revision(said) or said["metadata"]["resourceVersion"]
            news = {_name(each): each for each in said["items"]}
        except (_NoEventError, AttributeError, KeyError, TypeError) as error:
            return self._fail(f"the API server's list is none ({error!r})", 0)
        gone = [Changed(name, gone=True) for name in self._objects if name not in news]
        new = [
            Changed(name)
            for name, each in news.items()
            if _revision(self._objects.get(name)) != _revision(each)
        ]
        self._objects, self._version, self._synced = news, version, True
        self._heard(now_s)
        return [*gone, *new, *self._begin()]

    # ---- watches ----

    def _received(self, chunk: bytes, now_s: float) -> list[Action]:
        actions: list[Action] = []
        try:
            for line in self._lines.cut(chunk):
                changed = self._take(_json(line))
                actions += [changed] if changed else []
        except _ServerEndedError as error:
            return [*actions, *self._list_anew(str(error), now_s, expired=error.code == GONE)]
        except _NoEventError as error:
            return [*actions, *self._list_anew(str(error), now_s, expired=False)]
        self._heard(now_s)
        return actions

    def _take(self, said: dict[str, Any]) -> Changed | None:
        kind, each = said.get("type"), said.get("object")
        if not isinstance(each, dict):
            raise _NoEventError("an event without an object")
        if kind == "ERROR":
            code = each.get("code")
            raise _ServerEndedError(str(each.get("message", ""))[:200], code)
        version = _revision(each)
        if not version:
            raise _NoEventError("an event without a resourceVersion")
        if kind == "BOOKMARK":
            self._version = version
            return None
        if kind not in ("ADDED", "MODIFIED", "DELETED"):
            raise _NoEventError(f"an event of type {str(kind)[:40]!r}")
        name = _name(each)
        self._version = version
        before = self._objects.get(name)
        if kind == "DELETED":
            self._objects.pop(name, None)
            return Changed(name, gone=True) if before is not None else None
        self._objects[name] = each
        return Changed(name) if _revision(before) != version else None

    def _list_anew(self, why: str, now_s: float, *, expired: bool) -> list[Action]:
        """List anew, because the watch cannot continue."""
        self._rested(now_s)
        return [StopWatch(), *self._forget(why, GONE if expired else 0)]

    def _forget(self, why: str, code: int) -> list[Action]:
        """List anew: at once if only the history is gone, as after any longer outage."""
        self._version = ""
        if code == GONE and not self._relisted:
            self._relisted = True
            return self._begin()
        return self._fail(why, code)

    def _ended(self, event: Ended, now_s: float) -> list[Action]:
        watched = self._phase is _Phase.WATCHING
        steady = watched and self._rested(now_s)
        if watched and event.code == GONE:
            return self._forget(event.why, GONE)
        if steady and not event.why:
            return self._begin()
        return self._fail(event.why or "the watch ended at once", event.code)

    def _rested(self, now_s: float) -> bool:
        """Return True if the watch was healthy for a while; earlier faults no longer count then."""
        steady = self._open and now_s >= self._opened_s + STEADY_S
        if steady:
            self._failures, self._relisted = 0, False
        return steady

    def _fail(self, why: str, code: int) -> list[Action]:
        self._phase, self._open = _Phase.PAUSING, False
        self._trouble, self._code = why, code
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self._failures, 16), MAX_PAUSE_S)
        self._failures += 1
        return [Pause(pause_s)]

    # ---- how fresh it is ----

    def _heard(self, now_s: float) -> None:
        self._heard_s = now_s
        self._trouble, self._code = "", 0

    def _probed(self, event: Probed, now_s: float) -> list[Action]:
        """Compare a probe; it counts only during a watch, as a list's objects are unknown yet."""
        if not (self._open and self._synced) or event.asked_s < self._opened_s:
            return []
        try:
            there = {_version_of(each) for each in _json(event.body)["items"]}
        except (_NoEventError, AttributeError, KeyError, TypeError, ValueError):
            return []
        if there == {_version_of(each) for each in self._objects.values()}:
            self._doubts = 0
            # The time of the request: later objects may have changed since.
            self._heard_s = max(event.asked_s, self._heard_s or event.asked_s)
            return []
        self._doubts += 1
        if self._doubts < DOUBTS:
            return []
        why = "the watch missed a change"
        return self._list_anew(why, now_s, expired=False)


class _ServerEndedError(Exception):
    """The API server ended the watch with an ERROR event; `code` 410 means: too old."""

    def __init__(self, message: str, code: object) -> None:
        super().__init__(message)
        self.code = code


def _json(data: bytes) -> dict[str, Any]:
    try:
        said = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _NoEventError(f"no JSON ({error})") from None
    if not isinstance(said, dict):
        raise _NoEventError("no object")
    return said


def _name(each: Object) -> str:
    metadata = each.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not name:
        raise _NoEventError("an object without a name")
    return name


def _revision(each: Object | None) -> str:
    if each is None:
        return ""
    metadata = each.get("metadata")
    return str(metadata.get("resourceVersion", "")) if isinstance(metadata, dict) else ""


def _version_of(each: Object) -> Version:
    metadata = each["metadata"]
    return str(metadata["name"]), str(metadata.get("uid")), int(metadata.get("generation", 0))
