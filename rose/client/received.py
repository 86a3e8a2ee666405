"""A streamed turn as far as it came, across all gateways that worked on it.

    rest -> add* -> rest -> add* -> turn
     |                |
     the ask itself   prompt + received tokens, smaller budget, an id of its own

The second ask goes out when a gateway died in the middle. What was received is kept and never
asked for again, so no token comes twice, whichever gateway answers and whatever it remembers.
"""

from dataclasses import replace
from itertools import groupby

from rose.client.errors import AnswerBroken
from rose.client.turn import Ask, TokenChunk, Turn
from rose.client.wire import StreamEvent

UNKNOWN_VERSION = -1


class Received:
    """Tokens of one turn in order, each with logprob and version."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._old_segments: list[tuple[str, str, int, int]] = []
        self._segments: list[tuple[str, str, int, int]] = []
        self._old_attempts = self._attempts = 0
        self._base = 0
        self.finish_reason: str | None = None

    @property
    def tokens(self) -> int:
        """Received so far."""
        return len(self._tokens)

    def rest(self) -> Ask | None:
        """What is to be asked for now; None: nothing, the turn is whole."""
        self._base = len(self._tokens)
        self._old_segments += self._segments
        self._old_attempts += self._attempts
        self._segments, self._attempts = [], 0
        asked = self._ask.sampling
        if self._base == 0:
            return self._ask
        if self.finish_reason is None and self._tokens[-1] in asked.stop_token_ids:
            self.finish_reason = "stop"
        if self.finish_reason is None and self._base >= asked.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            return None
        return replace(
            self._ask,
            request_id=f"{self._ask.request_id}+{self._base}",
            token_ids=(*self._ask.token_ids, *self._tokens),
            sampling=replace(
                asked,
                max_tokens=asked.max_tokens - self._base,
                min_tokens=max(0, asked.min_tokens - self._base),
            ),
        )

    def add(self, event: StreamEvent) -> list[TokenChunk]:
        """Take one event; its new tokens, a chunk for each version. Raises AnswerBroken."""
        start = len(self._tokens)
        for choice in event.choices:
            tokens = choice.token_ids or []
            logprobs = choice.logprobs.content if choice.logprobs is not None else []
            if len(tokens) != len(logprobs):
                raise AnswerBroken(f"{len(tokens)} tokens came with {len(logprobs)} logprobs")
            if len(self._tokens) + len(tokens) > self._ask.sampling.max_tokens:
                raise AnswerBroken("more tokens came than were asked for")
            self._tokens += tokens
            self._logprobs += [token.logprob for token in logprobs]
            self._versions += [UNKNOWN_VERSION] * len(tokens)
            self.finish_reason = choice.finish_reason or self.finish_reason
        self._stamp(event)
        return [self._chunk(version, a, b) for version, a, b in self._spans(start)]

    def turn(self) -> Turn:
        """The whole turn, once a finish reason came."""
        assert self.finish_reason is not None
        return Turn(
            self._ask.request_id,
            tuple(self._tokens),
            tuple(self._logprobs),
            tuple(self._spans(0)),
            (*self._old_segments, *self._segments),
            self.finish_reason,
            self._old_attempts + self._attempts,
        )

    def _spans(self, start: int) -> list[tuple[int, int, int]]:
        """(version, from, to) of all tokens from `start` on."""
        spans = []
        for version, group in groupby(self._versions[start:]):
            end = start + len(list(group))
            spans.append((version, start, end))
            start = end
        return spans

    def _chunk(self, version: int, start: int, end: int) -> TokenChunk:
        tokens, logprobs = self._tokens[start:end], self._logprobs[start:end]
        return TokenChunk(tuple(tokens), tuple(logprobs), version, start)

    def _stamp(self, event: StreamEvent) -> None:
        base, end = self._base, len(self._tokens)
        for span in event.versions or ():
            for at in range(base + max(0, span.start), min(base + span.end, end)):
                self._versions[at] = span.version
        if event.segments is not None:
            self._segments = [
                (s.replica, s.kind, base + s.start, min(base + s.end, end)) for s in event.segments
            ]
        self._attempts = event.attempts or self._attempts
