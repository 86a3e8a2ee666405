"""Kept tokens of sessions: prompts as they were rendered, outputs as they were sampled.

session ─┬─ trajectory 0 ── turn ── turn ── turn     a turn: new tokens of its prompt, output
         │                    └──┐                   tokens, logprobs, version spans
         └─ trajectory 1 ─────── turn                begun in the middle of another, or anew

    turn = sessions.begin(caller, job, session, start)     None without a session
    job.follows = turn.follows()                           the worker finds the last kept turn
    prompt = turn.prompt(done)                             kept tokens, then the rendered ones
    place = turn.keep(name, stream, message)               once the turn is over
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from elastic_scheduler import VersionSpan
from rose.contract.gateway import (
    ImageName,
    SessionTrajectory,
    TrajectoryPlace,
    TrajectoryTurn,
    Version,
)
from rose.gateway.errors import BadRequest
from rose.gateway.turns.token_stream import SPAN_BYTES, TokenStream
from rose.security.callers import Caller
from rose.tokenizer_pool.conversation import digest_after
from rose.tokenizer_pool.worker import Done, Follows, unpacked

# Measured size of a turn's objects, without its tokens and texts.
TURN_BYTES = 2_048
NOT_KEPT = "the messages go on from no kept turn of the session"
FORKED = "the messages go on from a turn from which another turn goes on"
TEMPLATE = "the chat template cannot render the new messages without those before"


@dataclass(frozen=True, slots=True, eq=False)
class KeptTurn:
    """Turn of a session: its new prompt tokens, its output, and the message that it was answered
    as.

    start: digest of all that the prompt depends on besides its messages. first: digest up to the
    first message. history: digest up to the answer. images: hashes of those in the whole prompt.
    """

    name: str
    prompt: "array[int]"
    tokens: "array[int]"
    logprobs: "array[float]"
    versions: list[VersionSpan]
    finish_reason: str | None
    start: bytes
    first: bytes
    history: bytes
    message: bytes
    images: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Estimate of the memory that the turn takes, in bytes."""
        arrays = self.prompt, self.tokens, self.logprobs
        held = sum(len(each) * each.itemsize for each in arrays)
        return TURN_BYTES + held + SPAN_BYTES * len(self.versions) + len(self.message)


@dataclass(slots=True, eq=False)
class KeptTrajectory:
    """Turns that go on from each other; the first `shared` are those of an earlier trajectory."""

    index: int
    turns: list[KeptTurn]
    shared: int = 0

    def tokens(self) -> SessionTrajectory:
        """Return the trajectory as one sequence of tokens."""
        ids, mask, logprobs = array("q"), bytearray(), array("d")
        versions: list[Version] = []
        turns: list[TrajectoryTurn] = []
        shared = 0
        for number, turn in enumerate(self.turns):
            ids += turn.prompt
            start = len(ids)
            ids += turn.tokens
            mask += bytes(len(turn.prompt)) + b"\1" * len(turn.tokens)
            logprobs += array("d", bytes(8 * len(turn.prompt))) + turn.logprobs
            turns.append(TrajectoryTurn(turn.name, start, len(ids), turn.finish_reason))
            versions += [
                Version(each.version, start + each.start, start + each.end, each.oldest_version)
                for each in turn.versions
            ]
            if number < self.shared:
                shared = len(ids)
        parts = tuple(ids), tuple(mask), tuple(logprobs)
        return SessionTrajectory(*parts, tuple(versions), tuple(turns), shared)


class Place(NamedTuple):
    """Place after the first `number` turns of a trajectory."""

    trajectory: KeptTrajectory
    number: int

    @property
    def turn(self) -> KeptTurn:
        """Last turn before the place."""
        return self.trajectory.turns[self.number - 1]


@dataclass(slots=True, eq=False)
class KeptSession:
    """Trajectories of one session; `ends` and `names` find turns by their history and by the ids
    of their answers.
    """

    used_s: float
    trajectories: list[KeptTrajectory] = field(default_factory=list)
    ends: dict[bytes, Place] = field(default_factory=dict)
    names: dict[str, Place] = field(default_factory=dict)
    size_bytes: int = 0

    def add(self, turn: KeptTurn, after: Place | None) -> Place:
        """Add a turn after this place, or at the begin of a new trajectory; return its place."""
        ours = after is not None and after.trajectory in self.trajectories
        if after is not None and ours and len(after.trajectory.turns) == after.number:
            trajectory = after.trajectory
        else:
            before = after.trajectory.turns[: after.number] if after is not None else []
            shared = len(before) if ours else 0
            trajectory = KeptTrajectory(len(self.trajectories), before, shared)
            self.trajectories.append(trajectory)
            # Turns of a session that was forgotten meanwhile are kept again.
            again = [] if ours else before
            self.size_bytes += 8 * len(before) + sum(each.size_bytes for each in again)
        trajectory.turns.append(turn)
        self.size_bytes += turn.size_bytes
        place = Place(trajectory, len(trajectory.turns))
        self.ends[turn.history] = self.names[turn.name] = place
        return place


class KeptSessions:
    """Sessions of one gateway, of `max_bytes` together; those not used for `idle_s` seconds, and
    the least recently used ones above the limit, are forgotten.

    owner: returns the job of a caller that names one, and raises TurnError for another's.
    """

    def __init__(
        self,
        max_bytes: int,
        idle_s: float,
        clock: Callable[[], float],
        owner: Callable[[Caller, str], str],
    ) -> None:
        self._max_bytes, self._idle_s = max_bytes, idle_s
        self._clock, self._owner = clock, owner
        self._sessions: OrderedDict[str, KeptSession] = OrderedDict()
        self.size_bytes = 0

    def begin(self, caller: Caller, job: str, session: str, start: bytes) -> "PendingTurn":
        """Return a turn that begins now in this session. `start`: digest of all that the prompt
        depends on besides its messages. Raises TurnError.
        """
        key = self._key(caller, job, session)
        return PendingTurn(self, key, self._known(key), start)

    def trajectories(self, caller: Caller, job: str, session: str) -> list[KeptTrajectory]:
        """Return the trajectories of a session, none if it is not known. Raises TurnError."""
        return self._known(self._key(caller, job, session)).trajectories

    def forget(self, caller: Caller, job: str, session: str) -> None:
        """Forget a session. Raises TurnError."""
        self._drop(self._key(caller, job, session))

    def keep(self, key: str, turn: KeptTurn, after: Place | None) -> Place:
        """Add a turn that is over to its session; return its place. A turn that is there already
        is not added again.
        """
        session = self._known(key)
        place = session.names.get(turn.name)
        if place is None or place.turn.tokens != turn.tokens:
            self.size_bytes -= session.size_bytes
            place = session.add(turn, after)
            self.size_bytes += session.size_bytes
        self._sessions[key] = session
        self._sessions.move_to_end(key)
        self.trim()
        return place

    def trim(self) -> None:
        """Forget the sessions that are idle for too long, and the oldest ones above the limit."""
        least_s = self._clock() - self._idle_s
        while self._sessions:
            key, oldest = next(iter(self._sessions.items()))
            if oldest.used_s >= least_s and self.size_bytes <= self._max_bytes:
                return
            self._drop(key)

    def _key(self, caller: Caller, job: str, session: str) -> str:
        # Neither a job nor a scope has a newline.
        return f"{self._owner(caller, job)}\n{caller.scope}{session}"

    def _known(self, key: str) -> KeptSession:
        """Return the session of this key, used now; an empty one, not yet kept, if it is new."""
        self.trim()
        session = self._sessions.get(key)
        if session is None:
            return KeptSession(self._clock())
        session.used_s = self._clock()
        self._sessions.move_to_end(key)
        return session

    def _drop(self, key: str) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            self.size_bytes -= session.size_bytes


@dataclass(slots=True, eq=False)
class PendingTurn:
    """Turn of a session from its request to its answer.

    start: digest of all that the prompt depends on besides its messages. after: place of the kept
    turn that it goes on from, None if it begins a trajectory. images: hashes of the prompt's.
    """

    _sessions: KeptSessions
    _key: str
    _session: KeptSession
    start: bytes
    after: Place | None = None
    images: tuple[str, ...] = ()
    _digests: list[bytes] = field(default_factory=list)
    _new: list[int] = field(default_factory=list)
    _kept_tokens: int = 0
    _why: str = ""

    def after_answer(self, name: str) -> KeptTurn:
        """Go on from the turn with this answer id, and return it. Raises BadRequest if it is not
        kept.
        """
        place = self._session.names.get(name)
        if place is None:
            raise BadRequest(
                f"previous_response_id: the session keeps no answer {name[:80]!r}: send the whole "
                "input",
                "previous_response_id",
            )
        self.after = place
        return place.turn

    def kept_images(self) -> list[ImageName]:
        """Return the names of the images in the prompt of the turn that it goes on from."""
        return [ImageName(name) for name in self.after.turn.images] if self.after else []

    def follows(self) -> Follows:
        """Return what the tokenizer's worker needs to find the kept turn that messages follow."""
        if self.after is not None:
            return Follows(self.after.turn.history, after=self.after.turn.message)
        return Follows(self.start, [*self._session.ends])

    def prompt(self, done: Done) -> list[int]:
        """Return the turn's whole prompt: the kept tokens, then the newly rendered ones. Raises
        BadRequest if they cannot follow the answer that the request names.
        """
        named = self.after is not None
        if named and done.kept is None:
            raise BadRequest(f"previous_response_id: {TEMPLATE}: send the whole input")
        if done.kept:
            self.after = self._session.ends[done.kept]
        elif not named:
            self._why = TEMPLATE if done.kept is None else NOT_KEPT
        self._digests, self._new = done.digests, unpacked(done.token_ids[0])
        if self.after is None:
            return self._new
        kept: list[int] = []
        for turn in self.after.trajectory.turns[: self.after.number]:
            kept += turn.prompt
            kept += turn.tokens
        # The template closes the message with the token at which the output may have stopped.
        stopped = self.after.turn.finish_reason == "stop"
        if stopped and self._new[:1] == kept[-1:]:
            self._new = self._new[1:]
        self._kept_tokens = len(kept)
        return kept + self._new

    def keep(
        self, name: str, stream: TokenStream, message: dict[str, object]
    ) -> TrajectoryPlace | None:
        """Keep the turn, which is over, and return its place; None if it cannot be kept. `name`: id
        of the answer. `message`: the assistant's, as it was answered in the chat API.
        """
        if not self._digests:
            return None
        first, last = self._digests
        if stream.expanded is not None:
            self._new = stream.expanded[self._kept_tokens :]
        turn = KeptTurn(
            name,
            array("q", self._new),
            stream.tokens,
            stream.logprobs,
            stream.versions,
            stream.finish_reason,
            self.start,
            first if self.after is None else self.after.turn.first,
            digest_after(last, message),
            msgspec.json.encode(message),
            self.images,
        )
        place = self._sessions.keep(self._key, turn, self.after)
        why = self._why if place.trajectory.index else ""
        if self.after is not None and place.trajectory is not self.after.trajectory:
            why = FORKED
        return TrajectoryPlace(place.trajectory.index, place.number - 1, self._kept_tokens, why)
