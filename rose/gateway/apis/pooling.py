"""`POST /pooling`, `/score` and `/classify`, as vLLM has them: for models that are not generative.

The gateway reads what is its own of a body (the model's name, job, versions, priority, timeout) and
hands on the rest; replicas tokenize. The answer is the replica's, under the gateway's model name.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from elastic_scheduler import TurnNeed
from rose.contract.replica import POOLING
from rose.errors import decoded
from rose.gateway.apis import wire
from rose.gateway.errors import BadRequest, NoReplica
from rose.gateway.request_limits import timeout_of
from rose.gateway.text_codec import ServedModel
from rose.gateway.turns.request import job_of, session_of
from rose.gateway.turns.whole_call import WholeCall

T = TypeVar("T")

PATHS = POOLING
_Fields = dict[str, msgspec.Raw]
_decode = msgspec.json.Decoder(_Fields)
# Characters of a token, about, and what the cost of a call counts at most: it has no KV to stay.
TOKEN_CHARS, MOST_TOKENS = 4, 1_024


def read(
    path: str,
    body: bytes,
    headers: Mapping[str, str],
    model: ServedModel,
    owned: Callable[[str], str],
    scope: str,
) -> WholeCall:
    """The call. Raises TurnError for what cannot be asked.

    owned: gives the caller's job of a name. scope: of the caller, whose names are its own.
    """
    fields = wire.read_json(_decode, body)
    model.check_name(_taken(fields, "model", str | None, None))
    job = owned(job_of(headers, _taken(fields, "job", str | None, None)))
    session = session_of(headers, _taken(fields, "session_id", str | None, None))
    name = _taken(fields, "request_id", str | None, None)
    oldest = _taken(fields, "min_version", int | None, None)
    exact = _taken(fields, "exact_version", int | None, None)
    timeout_s = timeout_of(headers, _taken(fields, "timeout_s", float | None, None))
    priority = _taken(fields, "priority", int | None, None)
    if oldest is not None and exact is not None:
        raise BadRequest("min_version and exact_version exclude each other: send one")
    if timeout_s is not None and not 0 < timeout_s < float("inf"):
        raise BadRequest("a timeout is a number of seconds above 0")
    tokens = max(1, min(MOST_TOKENS, len(body) // TOKEN_CHARS))
    session = scope + session if session else ""
    need = TurnNeed(session, tokens, 1, oldest, exact, scope + name if name else "", job)
    return WholeCall(path, wire.encode(fields), need, priority or 0, timeout_s)


def answer(body: bytes, model: ServedModel) -> bytes:
    """A replica's answer under the model's name here. Raises NoReplica for what is none."""
    try:
        fields = decoded(_decode, body)
    except msgspec.DecodeError as error:
        raise NoReplica(f"a replica's answer is no JSON: {error}") from error
    if "model" in fields:
        fields["model"] = msgspec.Raw(wire.encode(model.name))
    return wire.encode(fields)


def _taken(fields: _Fields, name: str, kind: object, default: T) -> T:
    """A field that replicas are not told of. Raises BadRequest for one of another kind."""
    raw = fields.pop(name, None)
    if raw is None:
        return default
    try:
        found: T = msgspec.json.decode(raw, type=kind)  # type: ignore[call-overload]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(f"{name}: {error}", name) from error
    return found
