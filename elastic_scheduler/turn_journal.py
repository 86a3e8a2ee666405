"""One turn's tokens, across all replicas that worked on it, and the answers of recent turns.

    begin -> append* -> end(FINISHED)       -> Deliver    once; the turn is over
               |        end(anything else)  -> Continue   begin again: prompt + journal, less budget
               |                            -> Deliver    the journal is complete already
               |                            -> GiveUp     attempts are used up; the turn is over
               +- of an attempt that is over: dropped

`fork` makes a second journal of the turn as it is now; the two continue independently.

Only the current attempt can add tokens, so late tokens of an old stream are neither lost nor
doubled: its tokens up to the end were journaled, those after it are generated again elsewhere.

The journal is the one record of a turn's output: its readers read it here. It may be kept for long
after the turn is over, so it holds arrays, and drops the prompt.

`IdempotencyCache` keeps recent turns by request id: a repeated request gets the first one's answer,
never a second one.
"""

from array import array
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Generic, NamedTuple, TypeVar

from elastic_scheduler.errors import JournalError

T = TypeVar("T")


class End(StrEnum):
    """Cause of an attempt's end."""

    FINISHED = "finished"
    REVOKED = "revoked"
    BROKEN = "broken"
    STALLED = "stalled"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Attempt:
    """Request to a replica to continue `token_ids` by up to `max_tokens`; numbers start at 1."""

    number: int
    token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Range [start, end) of a turn's output tokens that one attempt on `replica` generated."""

    replica: str
    kind: str
    start: int
    end: int


class VersionSpan(NamedTuple):
    """Range [start, end) of a turn's output tokens, sampled by policy `version`.

    oldest_version: version of the oldest KV that they were sampled on, None if it is `version`.
    """

    version: int
    start: int
    end: int
    oldest_version: int | None = None


def _stamp(
    spans: list[VersionSpan], version: int, start: int, end: int, oldest_version: int | None
) -> None:
    """Add a span at the end, or extend the last one if its versions are equal."""
    if spans:
        last_version, last_start, last_end, last_oldest = spans[-1]
        if last_end == start and last_version == version and last_oldest == oldest_version:
            spans[-1] = VersionSpan(version, last_start, end, oldest_version)
            return
    spans.append(VersionSpan(version, start, end, oldest_version))


@dataclass(frozen=True, slots=True)
class Continue:
    """Action after an attempt's end: begin another attempt on another replica."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Action after an attempt's end: fail the turn, whose attempts are used up.

    reason: the end of the last attempt.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Deliver:
    """Action after an attempt's end: return the turn, whose output is whole in the journal."""

    finish_reason: str


Outcome = Continue | Deliver | GiveUp


class TurnJournal:
    """Output of one turn so far, across all its attempts on different replicas.

    Attempts are numbered, and tokens of any but the current one are dropped. `tokens`, `logprobs`,
    `versions` and `columns` are for reading only; spans and segments cover all tokens without gaps.
    columns: further data that came with the tokens, by name, joined over all attempts.
    finish_reason: None until the turn is delivered.
    """

    __slots__ = (
        "_current",
        "_max_attempts",
        "_max_tokens",
        "_number",
        "_over",
        "_prompt",
        "_segment_of",
        "_segments",
        "_stop",
        "columns",
        "finish_reason",
        "logprobs",
        "prompt_tokens",
        "tokens",
        "versions",
    )

    def __init__(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        max_attempts: int,
        stop_token_ids: Collection[int] = (),
    ) -> None:
        if max_tokens < 1 or max_attempts < 1:
            raise ValueError("a turn needs max_tokens and max_attempts of at least 1")
        self._prompt = prompt
        self._max_tokens = max_tokens
        self._max_attempts = max_attempts
        self._stop = frozenset(stop_token_ids)
        # Replica, kind and first token; a segment ends where the next one begins.
        self._segments: list[tuple[str, str, int]] = []
        self._number = 0
        self._segment_of = 0
        self._current: tuple[str, str] | None = None
        self._over = False
        self.prompt_tokens = len(prompt)
        self.tokens = array("q")
        self.logprobs = array("d")
        self.versions: list[VersionSpan] = []
        self.columns: dict[str, bytearray] = {}
        self.finish_reason: str | None = None

    @property
    def attempts(self) -> int:
        """Number of attempts begun so far."""
        return self._number

    @property
    def remaining(self) -> int:
        """Number of tokens that may still be generated."""
        return self._max_tokens - len(self.tokens)

    @property
    def generated(self) -> int:
        """Number of output tokens so far."""
        return len(self.tokens)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Ranges of the output tokens by replica, in order."""
        ends = [*(start for _, _, start in self._segments[1:]), len(self.tokens)]
        return tuple(
            Segment(replica, kind, start, end)
            for (replica, kind, start), end in zip(self._segments, ends, strict=False)
        )

    @property
    def length(self) -> int:
        """Number of tokens of prompt and output, which the next attempt has to prefill."""
        return self.prompt_tokens + len(self.tokens)

    @property
    def whole(self) -> bool:
        """True if no token is missing, even if the replica's final event is."""
        return self._over or self._stopped or self.remaining == 0

    @property
    def can_begin(self) -> bool:
        """True if another attempt is allowed and would have tokens to generate."""
        return not self.whole and self._number < self._max_attempts

    def fork(self) -> "TurnJournal":
        """Return a second journal with the turn so far, to go on independently.

        Attempts so far count in both. Raises JournalError once the turn is over.
        """
        if self._over:
            raise JournalError("the turn is over: there is nothing to go on from")
        copy = TurnJournal(
            self._prompt,
            self._max_tokens,
            max_attempts=self._max_attempts,
            stop_token_ids=self._stop,
        )
        copy.tokens = self.tokens[:]
        copy.logprobs = self.logprobs[:]
        copy.versions = [*self.versions]
        copy.columns = {name: data[:] for name, data in self.columns.items()}
        copy._segments = [*self._segments]
        copy._number = self._number
        return copy

    def restarted(self) -> "TurnJournal":
        """Return a journal of the same turn without output; attempts so far count.

        It is for engines whose state, besides tokens, decides the next token.
        """
        again = TurnJournal(
            self._prompt,
            self._max_tokens,
            max_attempts=self._max_attempts,
            stop_token_ids=self._stop,
        )
        again._number = self._number
        return again

    def expand(self, prompt: Sequence[int]) -> None:
        """Replace the prompt by the one with the tokens of its images, before the first token.

        Raises JournalError after it.
        """
        if self.tokens or self._over:
            raise JournalError("the prompt came again after the first token")
        self._prompt, self.prompt_tokens = prompt, len(prompt)

    def begin(self, replica: str, kind: str) -> Attempt:
        """Start the next attempt on `replica` and return its request; an earlier one is over.

        Raises JournalError if the turn is over or has no attempts left.
        """
        if self._over or self._number >= self._max_attempts:
            raise JournalError("the turn is over: send it again under a new request id")
        self._number += 1
        self._current = (replica, kind)
        return Attempt(self._number, [*self._prompt, *self.tokens], self.remaining)

    def append(
        self,
        attempt: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        version: int,
        oldest_version: int | None = None,
        columns: Mapping[str, bytes] | None = None,
    ) -> bool:
        """Add a chunk of tokens of one policy version; return False if the attempt is over.

        oldest_version: as in `VersionSpan`. columns: data of these tokens, by name. Raises
        JournalError, and adds nothing, for tokens beyond the budget or without a logprob each.
        """
        if self._current is None or attempt != self._number:
            return False
        if len(token_ids) != len(logprobs):
            raise JournalError(f"{len(token_ids)} tokens came with {len(logprobs)} logprobs")
        start = len(self.tokens)
        end = start + len(token_ids)
        if end > self._max_tokens:
            raise JournalError(f"{end} tokens came where {self._max_tokens} were asked for")
        if end == start:
            return True
        self.tokens.extend(token_ids)
        self.logprobs.extend(logprobs)
        if columns is not None:
            for name, data in columns.items():
                self.columns.setdefault(name, bytearray()).extend(data)
        _stamp(self.versions, version, start, end, oldest_version)
        if self._segment_of != attempt:
            self._segments.append((*self._current, start))
            self._segment_of = attempt
        return True

    def end(self, attempt: int, end: End, finish_reason: str = "") -> Outcome | None:
        """End an attempt and return the next action, None if the attempt was over already.

        finish_reason: the replica's own ("stop", "length"), used for FINISHED only.
        """
        if self._current is None or attempt != self._number:
            return None
        self._current = None
        if end is End.FINISHED:
            return self._deliver(finish_reason)
        if self._stopped:
            return self._deliver("stop")
        if self.remaining == 0:
            return self._deliver("length")
        if self._number >= self._max_attempts:
            self._over = True
            return GiveUp(end.value)
        return Continue()

    @property
    def _stopped(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self._stop

    def _deliver(self, finish_reason: str) -> Deliver:
        self._over = True
        self._prompt, self._stop = (), frozenset()
        self.finish_reason = finish_reason
        return Deliver(finish_reason)


class Conflict(Enum):
    """Reason why a request id cannot be used."""

    OTHER_BODY = "the request id was used with another body"


@dataclass(slots=True)
class _Entry(Generic[T]):
    fingerprint: int
    value: T
    done: bool = False


class IdempotencyCache(Generic[T]):
    """Cache of values by request id: all running requests, and the newest `capacity` finished ones.

    Finished ones together have at most `capacity_bytes`, except that the newest one is always kept.
    The caller bounds the number of running ones.
    """

    def __init__(self, capacity: int, capacity_bytes: int | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; keep at least one answer")
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._bytes = 0
        self._entries: dict[str, _Entry[T]] = {}
        # Finished ones with their sizes, oldest first.
        self._done: OrderedDict[str, int] = OrderedDict()

    def find(self, request_id: str, fingerprint: int) -> T | Conflict | None:
        """Return the value of a request with this id and body, None for an unknown id.

        Returns `Conflict.OTHER_BODY` for a known id with another body. fingerprint: hash of the
        body.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        return entry.value if entry.fingerprint == fingerprint else Conflict.OTHER_BODY

    def open(self, request_id: str, fingerprint: int, value: T) -> None:
        """Add a request that begins. Raises ValueError for a known id."""
        if request_id in self._entries:
            raise ValueError(f"request {request_id} is known already; look with find() first")
        self._entries[request_id] = _Entry(fingerprint, value)

    def close(self, request_id: str, value: T, size_bytes: int = 0) -> None:
        """Mark a request as finished, so that newer finished ones may push it out.

        Nothing happens if the id is unknown or has another value.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.value is not value:
            return
        entry.done = True
        self._done[request_id] = size_bytes
        self._bytes += size_bytes
        while self._too_many():
            oldest, freed_bytes = self._done.popitem(last=False)
            self._bytes -= freed_bytes
            del self._entries[oldest]

    def forget(self, request_id: str, value: T) -> None:
        """Delete a failed or cancelled request, so that its id may be used again.

        Nothing happens if the id is unknown or has another value.
        """
        entry = self._entries.get(request_id)
        if entry is not None and entry.value is value:
            del self._entries[request_id]
            self._bytes -= self._done.pop(request_id, 0)

    @property
    def size_bytes(self) -> int:
        """Bytes of the finished requests' values, as given to `close`."""
        return self._bytes

    def _too_many(self) -> bool:
        if len(self._done) > self._capacity:
            return True
        limit = self._capacity_bytes
        return limit is not None and self._bytes > limit and len(self._done) > 1

    def __len__(self) -> int:
        return len(self._entries)
