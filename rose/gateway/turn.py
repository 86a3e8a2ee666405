"""One turn, from the first attempt to its answer."""

import asyncio
from dataclasses import replace

import aiohttp
import msgspec

from elastic_scheduler import Attempt, Continue, Deliver, End, GiveUp, JournalError, TurnJournal
from rose.gateway import wire
from rose.gateway.dispatcher import Dispatcher, EventSink, LiveAttempt
from rose.gateway.errors import BadRequest, NoReplica
from rose.gateway.settings import GatewaySettings
from rose.gateway.stats import GatewayStats

JSON_HEADERS = {"Content-Type": "application/json"}
# A replica's line holds one step's tokens; anything near this is not one.
MAX_LINE_BYTES = 1 << 20
DRAIN_S = 1.0
# What a replica says about the request itself: another replica would say the same.
REQUEST_FAULTS = frozenset({400, 404, 413, 422})
ENDS = {"stop": End.FINISHED, "length": End.FINISHED, "revoked": End.REVOKED, "abort": End.REVOKED}


class TurnRunner:
    """Runs turns over one HTTP session; every attempt is one streamed request."""

    def __init__(
        self,
        settings: GatewaySettings,
        dispatcher: Dispatcher,
        session: aiohttp.ClientSession,
        stats: GatewayStats,
        on_event: EventSink,
    ) -> None:
        self._settings = settings
        self._dispatcher = dispatcher
        self._session = session
        self._stats = stats
        self._on_event = on_event

    async def run(self, request: wire.GenerateRequest, session: str) -> bytes:
        """The encoded answer. Raises TurnError when the turn cannot be finished."""
        sampling = request.sampling_params
        journal = TurnJournal(
            request.token_ids,
            sampling.max_tokens,
            max_attempts=self._settings.max_attempts,
            stop_token_ids=sampling.stop_token_ids or (),
        )
        avoid, need = "", request.need(session)
        while True:
            live = await self._dispatcher.acquire(need, avoid)
            attempt = journal.begin(live.entry.id, live.entry.kind.value)
            live.may_move = attempt.number < self._settings.max_attempts
            end, reason = await self._attempt(request, live, journal, attempt)
            outcome = journal.end(attempt.number, end, reason)
            if isinstance(outcome, Deliver):
                self._stats.turns += 1
                return wire.encode_answer(request.request_id, outcome)
            if isinstance(outcome, GiveUp):
                raise NoReplica(f"{journal.attempts} replicas failed the turn, the last: {reason}")
            assert isinstance(outcome, Continue)
            avoid = live.entry.id
            need = replace(
                need,
                prompt_tokens=journal.length,
                budget_tokens=journal.remaining,
                made_tokens=journal.generated,
            )
            self._note_continuation(request.request_id, live, end, reason, journal)

    async def _attempt(
        self,
        request: wire.GenerateRequest,
        live: LiveAttempt,
        journal: TurnJournal,
        attempt: Attempt,
    ) -> tuple[End, str]:
        """Stream one attempt into the journal; how it ended and, in words, why."""
        end: End | None = None
        reason = ""
        live.task = asyncio.current_task()
        try:
            if live.interrupted is not None:
                end, reason = live.interrupted, "lease lost"
            else:
                end, reason = await self._stream(request, live, journal, attempt)
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError, JournalError) as error:
            end, reason = End.BROKEN, f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            # Ours (interrupt), or the client is gone as well: only ours alone goes on.
            if live.interrupted is None or live.task is None or live.task.uncancel() > 0:
                raise
            end, reason = live.interrupted, live.interrupted.value
        finally:
            live.task = None
            self._dispatcher.finish(live, end)
        return end, reason

    async def _stream(
        self,
        request: wire.GenerateRequest,
        live: LiveAttempt,
        journal: TurnJournal,
        attempt: Attempt,
    ) -> tuple[End, str]:
        body = wire.encode_replica_request(
            request, attempt.number, attempt.token_ids, attempt.max_tokens
        )
        url = f"{live.entry.url}/rose/v1/generate"
        async with self._session.post(url, data=body, headers=JSON_HEADERS) as response:
            if response.status == 200:
                return await self._read(response.content, live, journal, attempt.number)
            text = (await response.content.read(2_048)).decode("utf-8", "replace")
            if response.status in REQUEST_FAULTS:
                raise BadRequest(f"{live.entry.id} refuses the turn: {text}")
            end = End.REFUSED if response.status == 503 else End.BROKEN
            return end, f"HTTP {response.status}"

    async def _read(
        self,
        content: aiohttp.StreamReader,
        live: LiveAttempt,
        journal: TurnJournal,
        number: int,
    ) -> tuple[End, str]:
        rest = b""
        while data := await content.readany():
            lines = (rest + data if rest else data).split(b"\n")
            rest = lines.pop()
            for text in lines:
                line = wire.decode_line(text)
                if line.token_ids:
                    if not live.need.accepts(line.version):
                        return End.BROKEN, f"tokens of version {line.version}"
                    journal.append(number, line.token_ids, line.logprobs, line.version)
                    self._dispatcher.journaled(live, len(line.token_ids))
                if line.finish_reason is not None:
                    await _drain(content, live)
                    end = ENDS.get(line.finish_reason, End.BROKEN)
                    if end is End.FINISHED:
                        return end, line.finish_reason
                    return end, line.message or line.finish_reason
            if len(rest) > MAX_LINE_BYTES:
                return End.BROKEN, f"a line above {MAX_LINE_BYTES} bytes"
        return End.BROKEN, "the stream ended without a finish reason"

    def _note_continuation(
        self, request_id: str, live: LiveAttempt, end: End, reason: str, journal: TurnJournal
    ) -> None:
        self._stats.continuations += 1
        self._on_event(
            "continuation",
            request_id=request_id,
            replica=live.entry.id,
            end=end.value,
            reason=reason,
            journaled=journal.generated,
            attempt=journal.attempts,
        )


async def _drain(content: aiohttp.StreamReader, live: LiveAttempt) -> None:
    """Read the terminator after the last line, so that the connection can be used again.

    The turn is complete: from here on nothing may interrupt it.
    """
    live.task = None
    if content.at_eof():
        return
    try:
        async with asyncio.timeout(DRAIN_S):
            await content.readany()
    except (aiohttp.ClientError, OSError):
        # TimeoutError is an OSError. A connection that breaks here is not reused; nothing is lost.
        return
