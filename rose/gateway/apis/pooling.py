"""`POST /pooling`, `/score` and `/classify`, as vLLM has them: for models that are not generative.

The gateway reads its own fields of a body (the model's name, job, versions, priority, timeout) and
forwards the rest; replicas tokenize. The answer is the replica's, under the gateway's model name.
"""

import hashlib
from collections.abc import Callable, Mapping

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

PATHS = POOLING


class _Own(msgspec.Struct, gc=False):
    """Fields that replicas do not get."""

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
# Approximate characters of a token, and the bound on a call's cost: it keeps no KV.
TOKEN_CHARS, MOST_TOKENS = 4, 1_024


def read(
    path: str,
    body: bytes,
    headers: Mapping[str, str],
    model: ServedModel,
    owned: Callable[[str], str],
    scope: str,
) -> WholeCall:
    """Return the call. Raises TurnError for an invalid one.

    owned: returns the caller's job of a name. scope: the prefix of the caller's names.
    """
    asked = wire.read_json(_decode_own, body)
    fields = wire.read_json(_decode, body)
    for own in _Own.__struct_fields__:
        if own != "cache_salt":
            fields.pop(own, None)
    model.check_name(asked.model)
    job = owned(job_of(headers, asked.job))
    if job:
        # No cached block of one job is another's; vLLM refuses some names, and long ones.
        salted = hashlib.blake2b(f"{job}/{asked.cache_salt or ''}".encode(), digest_size=16)
        fields["cache_salt"] = msgspec.Raw(wire.encode(salted.hexdigest()))
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
    return WholeCall(path, wire.encode(fields), need, asked.priority or 0, timeout_s)


def answer(body: bytes, model: ServedModel) -> bytes:
    """Return a replica's answer under the model's name here. Raises NoReplica if invalid."""
    try:
        fields = decoded(_decode, body)
    except msgspec.DecodeError as error:
        raise NoReplica(f"a replica's answer is no JSON: {error}") from error
    if "model" in fields:
        fields["model"] = msgspec.Raw(wire.encode(model.name))
    return wire.encode(fields)
