"""Pooling: `POST /pooling`, `/score` and `/classify`, as vLLM has them, for other models.

The gateway reads its own fields of a body (the model's name, job, versions, priority, timeout) and
forwards the rest; replicas tokenize. The answer is the replica's, under the gateway's model name.

The result of a model that is not generative depends on its input alone. So a call whose replica is
revoked, dies or stays silent is repeated on another one from its beginning, as often as a turn
would be; nothing of a broken answer is kept.
"""

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from urllib.parse import quote

import msgspec

from elastic_scheduler import End, TurnNeed
from rose.contract.replica import JOB_QUERY
from rose.errors import decoded
from rose.gateway.apis.frontend import job_of, read_json, session_of, timeout_of
from rose.gateway.apis.wire import encode
from rose.gateway.backends.http_pool import OK, Upstream, UpstreamError
from rose.gateway.errors import BadRequest, DeadlinePassed, NoReplica
from rose.gateway.replicas.dispatcher import Dispatcher, Ending, LiveAttempt
from rose.gateway.replicas.table import ReplicaApi
from rose.gateway.text_codec import ServedModel

MAX_ANSWER_BYTES = 64 << 20
MAX_FAULT_CHARS = 500
# Time limit of a request without one, from its arrival.
LIMIT_S = 600.0
# A replica with much work answers late: it does not count as hanging for this long.
PATIENT_S = 10.0
NOT_FOUND = 404
# Statuses that every replica would return.
REQUEST_FAULTS = frozenset({400, 413, 415, 422})
# Approximate number of characters of a token, and the largest cost of a call: it keeps no KV.
TOKEN_CHARS, MOST_TOKENS = 4, 1_024


class _Own(msgspec.Struct, gc=False):
    """Body fields that the gateway reads; only `cache_salt` is passed on to replicas, hashed with
    the job if there is one.
    """

    model: str | None = None
    job: str | None = None
    session_id: str | None = None
    request_id: str | None = None
    min_version: int | None = None
    exact_version: int | None = None
    priority: int | None = None
    timeout_s: float | None = None
    cache_salt: str | None = None


_decode_own = msgspec.json.Decoder(_Own)
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(slots=True)
class WholeCall:
    """Call of a pooling route: path and body to send to a replica, and its need for the router."""

    path: str
    body: bytes
    need: TurnNeed
    priority: int = 0
    timeout_s: float | None = None


def read(
    path: str,
    body: bytes,
    headers: Mapping[str, str],
    model: ServedModel,
    owned: Callable[[str], str],
    scope: str,
) -> WholeCall:
    """Return the call that a request asks for, without the gateway's own fields in its body. Raises
    TurnError for an invalid one.

    owned: returns the job of a caller that names this job, or raises. scope: prefix of the caller's
    names.
    """
    asked = read_json(_decode_own, body)
    fields = read_json(_decode, body)
    for own in _Own.__struct_fields__:
        if own != "cache_salt":
            fields.pop(own, None)
    model.check_name(asked.model)
    job = owned(job_of(headers, asked.job))
    if job:
        # No cached block of one job is another's; vLLM refuses some names, and long ones.
        salted = hashlib.blake2b(f"{job}/{asked.cache_salt or ''}".encode(), digest_size=16)
        fields["cache_salt"] = msgspec.Raw(encode(salted.hexdigest()))
    session = session_of(headers, asked.session_id)
    name, oldest, exact = asked.request_id, asked.min_version, asked.exact_version
    timeout_s = timeout_of(headers, asked.timeout_s)
    if oldest is not None and exact is not None:
        raise BadRequest("min_version and exact_version exclude each other: send one")
    if timeout_s is not None and not 0 < timeout_s < float("inf"):
        raise BadRequest("a timeout is a number of seconds above 0")
    tokens = max(1, min(MOST_TOKENS, len(body) // TOKEN_CHARS))
    session = scope + session if session else ""
    need = TurnNeed(session, tokens, 1, oldest, exact, scope + name if name else "", job)
    return WholeCall(path, encode(fields), need, asked.priority or 0, timeout_s)


def answer(body: bytes, model: ServedModel) -> bytes:
    """Return the replica's JSON answer with the gateway's model name in it. Raises NoReplica if it
    is not JSON.
    """
    try:
        fields = decoded(_decode, body)
    except msgspec.DecodeError as error:
        raise NoReplica(f"a replica's answer is no JSON: {error}") from error
    if "model" in fields:
        fields["model"] = msgspec.Raw(encode(model.name))
    return encode(fields)


class _AnswerReceiver:
    """Receiver that collects one response; `done` gets its body when it is complete."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self.code = 0
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def status(self, code: int) -> None:
        self.code = code

    def body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_ANSWER_BYTES:
            self.ended(UpstreamError(f"an answer above {MAX_ANSWER_BYTES} bytes"))
        elif not self.done.done():
            self._parts.append(data)

    def ended(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(b"".join(self._parts))
        else:
            # Keep a copy and not the error itself: its frames and this receiver would reference
            # each other.
            self.done.set_exception(UpstreamError(f"{type(error).__name__}: {error}"))


class WholeCalls:
    """Sender of calls to replicas, one replica after the other until one has answered."""

    def __init__(self, dispatcher: Dispatcher, upstream: Upstream) -> None:
        self._dispatcher = dispatcher
        self._upstream = upstream
        self._max_attempts = dispatcher.settings.max_attempts

    async def run(self, call: WholeCall) -> bytes:
        """Return the body of the first complete 200 answer. Raises TurnError if there is none in
        time.
        """
        limit_s = LIMIT_S if call.timeout_s is None else call.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._asked(call)
        except TimeoutError as error:
            raise DeadlinePassed(
                f"{call.path} had no answer after {limit_s:g} s; allow it more time"
            ) from error

    async def _asked(self, call: WholeCall) -> bytes:
        need = call.need
        versions = self._dispatcher.default_versions
        oldest = versions.min_version_of(need.job, need.min_version, need.exact_version)
        need = replace(need, min_version=oldest)
        self._dispatcher.check_admission(need)
        avoid = said = ""
        for _ in range(self._max_attempts):
            live = await self._dispatcher.acquire(need, avoid, call.priority)
            end, said, answer = await self._attempt(call, live)
            if end is End.FINISHED:
                return answer
            avoid = live.entry.id
            self._dispatcher.on_event(
                "call_again", path=call.path, replica=avoid, end=end.value, reason=said[:200]
            )
        raise NoReplica(f"{self._max_attempts} replicas failed {call.path}, the last: {said[:200]}")

    async def _attempt(self, call: WholeCall, live: LiveAttempt) -> tuple[End, str, bytes]:
        """Send the call to one replica; return how that ended, the reason in words, and the
        answer's body.
        """
        end: End | None = None
        answer = b""
        live.last_token_s += PATIENT_S

        async def posted() -> Ending:
            nonlocal answer
            code, answer = await self._posted(call, live)
            if code == OK:
                # A call is not a turn: it must not change the forecast of lengths.
                return End.FINISHED, ""
            _refuse(call, live, code, answer)
            end = End.REFUSED if code == 503 else End.BROKEN
            return end, f"HTTP {code}: {answer[:MAX_FAULT_CHARS].decode('utf-8', 'replace')}"

        try:
            end, said = await live.run(posted)
        except OSError as error:
            end, said = End.BROKEN, str(error)
        finally:
            self._dispatcher.finish(live, end)
        return end, said, answer

    async def _posted(self, call: WholeCall, live: LiveAttempt) -> tuple[int, bytes]:
        entry = live.entry
        if entry.api is ReplicaApi.SGLANG:
            raise BadRequest(f"{call.path}: {entry.id} is an SGLang, which does not speak vLLM's")
        url = entry.url + call.path
        if entry.api is ReplicaApi.ROSE and live.job:
            url += f"?{JOB_QUERY}={quote(live.job, safe='')}"
        receiver = _AnswerReceiver()
        connection = await self._upstream.post(url, call.body, receiver)
        try:
            answer = await receiver.done
            return receiver.code, answer
        finally:
            receiver.done.cancel()
            connection.leave(receiver)


def _refuse(call: WholeCall, live: LiveAttempt, code: int, answer: bytes) -> None:
    """Raise BadRequest for a status that every replica would return, or a replica whose model has
    no such route.
    """
    if code == NOT_FOUND:
        raise BadRequest(
            f"{call.path}: {live.entry.id} serves no model for it; a replica of one is started "
            "with runner: pooling"
        )
    if code in REQUEST_FAULTS:
        text = answer.decode("utf-8", "replace")[:MAX_FAULT_CHARS]
        raise BadRequest(f"{live.entry.id} refuses {call.path}: {text}")
