"""A streamed turn with the tokens received so far, across all gateways that worked on it.

    rest ─ add* ─┬─ whole ───────────────────► turn
                 └─ broken ─ again ─ add* ─┬─► turn        the same ask, at the same gateway
                                           └─ rest ─ …     elsewhere: prompt + tokens, less budget

`again` is answered from the start; tokens that were received already are compared. A gateway that
was restarted makes another turn of it, which is noticed at the first token that differs.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from msgspec import structs

from rose.client import wire
from rose.client.errors import AnswerBroken
from rose.client.types import ClientTurn, TokenChunk, Turn
from rose.contract.fields import UNVERSIONED
from rose.contract.gateway import StreamEvent, TopLogprobs
from rose.contract.replica import top_row_bytes

UNKNOWN = "unknown"

# A token's policy version, and the oldest version of its KV if that may be older.
Stamp = tuple[int, int | None]
UNKNOWN_STAMP: Stamp = (UNVERSIONED, None)


class AnotherTurnError(Exception):
    """Error: the gateway lost the turn and generates a different one under the same id."""


class Received:
    """Tokens of one streamed turn received so far, in order, each with logprob and policy version.

    The object survives a change of gateway: `rest` and `again` give the next request, `add` takes
    the events of its answer, and `turn` returns the whole turn.
    """

    def __init__(self, ask: ClientTurn) -> None:
        self._ask = self._asked = ask
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._stamps: list[Stamp] = []
        self._top = bytearray()
        self._npy: bytes | None = None
        self._prompt = ask.body.token_ids
        self._old_segments: list[tuple[str, str, int, int]] = []
        self._segments: list[tuple[str, str, int, int]] = []
        self._old_attempts = self._attempts = 0
        self._base = self._seen = 0
        self._most = ask.sampling.logprobs
        self.finish_reason: str | None = None
        self.trace_id = ""

    @property
    def tokens(self) -> int:
        """Number of tokens received so far, from all gateways."""
        return len(self._tokens)

    @property
    def answered(self) -> bool:
        """True if tokens came since the last `rest`: their gateway may still have the turn."""
        return len(self._tokens) > self._base

    @property
    def whole(self) -> bool:
        """True if all tokens are received: the finish reason is known.

        If the last event is missing, the property sets the finish reason itself: "stop" after a
        stop token, "length" at `max_tokens`.
        """
        asked = self._ask.sampling
        if self.finish_reason is None and self._tokens:
            if self._tokens[-1] in (asked.stop_token_ids or ()):
                self.finish_reason = "stop"
            elif len(self._tokens) >= asked.max_tokens:
                self.finish_reason = "length"
        return self.finish_reason is not None

    def rest(self) -> ClientTurn:
        """Return the request with which any gateway can continue the turn.

        Its prompt ends with the received tokens; before the first token it is the original request.
        Raises AnswerBroken if received tokens depend on penalties or structured output, or their
        experts are with the lost gateway, so that no other can continue.
        """
        asked = self._ask.sampling
        if self._tokens and (asked.counts_output or self._ask.body.routed_experts):
            raise AnswerBroken(
                f"its gateway was lost after {len(self._tokens)} tokens of a turn with"
                " frequency_penalty, presence_penalty, routed_experts, structured output or"
                " deterministic sampling, which cannot go on from them: ask for it anew, or without"
                " a stream"
            )
        self._keep_spans()
        self._base = self._seen = len(self._tokens)
        if self._base:
            rest = structs.replace(
                self._ask.body,
                request_id=f"{self._ask.request_id}+{self._base}",
                token_ids=(*self._prompt, *self._tokens),
                sampling_params=asked.rest(asked.max_tokens - self._base),
            )
            self._asked = replace(self._ask, body=rest)
        return self._asked

    def again(self) -> ClientTurn:
        """Return the last request unchanged, for the same gateway: it may still have the turn."""
        self._seen = self._base
        return self._asked

    def add(self, event: StreamEvent) -> list[TokenChunk]:
        """Return an event's new tokens as chunks, one for each policy version and age of KV.

        Tokens that were received before are compared and not returned again. Raises AnswerBroken
        for an invalid event, AnotherTurnError for tokens that differ from those received before.
        """
        start = len(self._tokens)
        if event.prompt_token_ids is not None and not self._base:
            self._prompt = event.prompt_token_ids
        for choice in event.choices:
            tokens = choice.token_ids
            logprobs = choice.logprobs.content if choice.logprobs is not None else []
            if len(tokens) != len(logprobs):
                raise AnswerBroken(f"{len(tokens)} tokens came with {len(logprobs)} logprobs")
            self._take(tokens, [token.logprob for token in logprobs], choice.top_logprobs)
            self.finish_reason = choice.finish_reason or self.finish_reason
            self._npy = choice.routed_experts or self._npy
        self._stamp(event, start)
        return [self._chunk(stamp, a, b) for stamp, a, b in self._spans(start)]

    def turn(self) -> Turn:
        """Return the whole turn; call it only once `whole` is True."""
        assert self.finish_reason is not None
        self._keep_spans()
        spans = self._spans(0)
        return Turn(
            self._ask.request_id,
            tuple(self._tokens),
            tuple(self._logprobs),
            wire.joined((version, a, b) for (version, _), a, b in spans),
            tuple(self._old_segments),
            self.finish_reason,
            self._old_attempts,
            wire.joined((oldest, a, b) for (_, oldest), a, b in spans if oldest is not None),
            self.trace_id,
            self._top_of(0, len(self._tokens)),
            self._npy,
            self._prompt if self._ask.images else None,
        )

    def _top_of(self, start: int, end: int) -> TopLogprobs | None:
        if not self._most:
            return None
        row = top_row_bytes(self._most)
        return TopLogprobs(self._most, bytes(self._top[start * row : end * row]))

    def _take(
        self, tokens: Sequence[int], logprobs: Sequence[float], top: TopLogprobs | None
    ) -> None:
        known = max(0, len(self._tokens) - self._seen)
        if [*tokens[:known]] != self._tokens[self._seen :][: len(tokens)]:
            raise AnotherTurnError("the gateway answers with another turn")
        self._seen += len(tokens)
        if self._seen > self._ask.sampling.max_tokens:
            raise AnswerBroken("more tokens came than were asked for")
        if self._most and tokens:
            if top is None or top.most != self._most:
                raise AnswerBroken(f"tokens came without {self._most} logprobs each")
            wire.checked_top(top, len(tokens))
            self._top += top.data[known * top_row_bytes(self._most) :]
        self._tokens += tokens[known:]
        self._logprobs += logprobs[known:]
        self._stamps += [UNKNOWN_STAMP] * len(tokens[known:])

    def _stamp(self, event: StreamEvent, start: int) -> None:
        end = len(self._tokens)
        for span in event.versions:
            for at in range(max(start, self._base + span.start), min(self._base + span.end, end)):
                self._stamps[at] = (span.version, span.oldest_version)
        if event.segments is not None:
            self._segments = [
                (s.replica, s.kind, self._base + s.start, min(self._base + s.end, end))
                for s in event.segments
            ]
        self._attempts = event.attempts or self._attempts

    def _keep_spans(self) -> None:
        """Add the present answer's replica segments and attempts to those of earlier answers.

        Tokens of a broken answer that names no replica get a segment of replica "unknown".
        """
        self._old_segments += self._segments
        covered = self._old_segments[-1][3] if self._old_segments else 0
        if covered < len(self._tokens):
            self._old_segments.append((UNKNOWN, UNKNOWN, covered, len(self._tokens)))
            self._attempts = self._attempts or 1
        self._old_attempts += self._attempts
        self._segments, self._attempts = [], 0

    def _spans(self, start: int) -> list[tuple[Stamp, int, int]]:
        """Return (stamp, start, end) for each run of tokens of one stamp, from `start` on."""
        spans = []
        for stamp, group in groupby(self._stamps[start:]):
            end = start + len(list(group))
            spans.append((stamp, start, end))
            start = end
        return spans

    def _chunk(self, stamp: Stamp, start: int, end: int) -> TokenChunk:
        tokens, logprobs = self._tokens[start:end], self._logprobs[start:end]
        top = self._top_of(start, end)
        return TokenChunk(tuple(tokens), tuple(logprobs), stamp[0], start, stamp[1], top)
