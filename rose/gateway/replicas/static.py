"""Replica table from the command line: always leased; kind, version and admission are polled.

A probe tells a ROSE replica, a stock vLLM and a stock SGLang apart. A stock engine has neither
version nor admission: it takes turns while its `/health` answers, and its version is unknown.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import msgspec

from rose.contract.fields import UNVERSIONED
from rose.contract.replica import STATE, ReplicaState
from rose.errors import Decoder, decoded
from rose.gateway.replicas.table import ReplicaApi, ReplicaEntry, TableSink
from rose.gateway.settings import StaticReplica

POLL_S = 0.5
PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
POLL_TIMEOUT = aiohttp.ClientTimeout(total=2.0)


class _ModelInfo(msgspec.Struct, gc=False):
    model_path: str


class _Version(msgspec.Struct, gc=False):
    version: str


class _Card(msgspec.Struct, gc=False):
    max_model_len: int | None = None


class _Cards(msgspec.Struct, gc=False):
    data: list[_Card] = []


REPLICA_STATE = msgspec.json.Decoder(ReplicaState)
_INFO = msgspec.json.Decoder(_ModelInfo)
_VERSION = msgspec.json.Decoder(_Version)
_CARDS = msgspec.json.Decoder(_Cards)


@dataclass(frozen=True, slots=True)
class Probed:
    """Result of a probe: the replica's API, and its context length in tokens, None if it is not
    reported.
    """

    api: ReplicaApi
    max_model_len: int | None


async def probe(session: aiohttp.ClientSession, url: str) -> Probed | None:
    """Return the API and context length of the engine at `url`; None if no engine that can generate
    answers yet.
    """
    api = await _api(session, url)
    return None if api is None else Probed(api, await _max_model_len(session, url))


async def _api(session: aiohttp.ClientSession, url: str) -> ReplicaApi | None:
    if _reads(REPLICA_STATE, await _get(session, url + STATE)):
        return ReplicaApi.ROSE
    for path in ("model_info", "get_model_info"):
        if _reads(_INFO, await _get(session, f"{url}/{path}")):
            return ReplicaApi.SGLANG
    if _reads(_VERSION, await _get(session, f"{url}/version")):
        return ReplicaApi.VLLM
    return None


async def _max_model_len(session: aiohttp.ClientSession, url: str) -> int | None:
    status, body = await _get(session, f"{url}/v1/models")
    try:
        cards = decoded(_CARDS, body).data if status == 200 else []
    except msgspec.MsgspecError:
        return None
    return cards[0].max_model_len if cards else None


async def _get(
    session: aiohttp.ClientSession, url: str, timeout: aiohttp.ClientTimeout = PROBE_TIMEOUT
) -> tuple[int, bytes]:
    """Send a GET request and return HTTP status and body; (0, b"") without an answer in time."""
    try:
        async with session.get(url, timeout=timeout) as response:
            return response.status, await response.read()
    except (aiohttp.ClientError, OSError):
        return 0, b""


def _reads(decoder: Decoder[object], answer: tuple[int, bytes]) -> bool:
    status, body = answer
    if status != 200:
        return False
    try:
        decoded(decoder, body)
    except msgspec.MsgspecError:
        return False
    return True


# Function that is called with a replica and its probe, or, once, with None while it does not
# answer.
FoundSink = Callable[[StaticReplica, Probed | None], None]


class StaticTable:
    """Source of the replica table for replicas named on the command line: it polls each of them;
    one that does not answer is unhealthy.
    """

    def __init__(
        self,
        replicas: tuple[StaticReplica, ...],
        session: aiohttp.ClientSession,
        on_found: FoundSink,
    ) -> None:
        self._replicas = replicas
        self._session = session
        self._on_found = on_found
        self._found: dict[str, ReplicaApi] = {}
        self._missed: set[str] = set()

    async def run(self, sink: TableSink) -> None:
        """Poll all replicas every half second, and pass the table to `sink` on every change, until
        cancelled.
        """
        last: tuple[ReplicaEntry, ...] = ()
        while True:
            entries = tuple(await asyncio.gather(*map(self._poll, self._replicas)))
            if entries != last:
                sink(entries, ())
                last = entries
            await asyncio.sleep(POLL_S)

    async def _poll(self, replica: StaticReplica) -> ReplicaEntry:
        api = self._found.get(replica.id)
        if api is None:
            found = await probe(self._session, replica.url)
            if found is None:
                if replica.id not in self._missed:
                    self._missed.add(replica.id)
                    self._on_found(replica, None)
                # Its kind is unknown, so no turn can be sent to it.
                return _static_entry(replica, ReplicaApi.ROSE, False, 0, 0)
            api = self._found[replica.id] = found.api
            self._on_found(replica, found)
        path = STATE if api is ReplicaApi.ROSE else "/health"
        status, body = await _get(self._session, replica.url + path, POLL_TIMEOUT)
        if api is not ReplicaApi.ROSE:
            return _static_entry(replica, api, status == 200, UNVERSIONED, 0)
        try:
            state = decoded(REPLICA_STATE, body) if status == 200 else None
        except msgspec.MsgspecError:
            state = None
        if state is None:
            return _static_entry(replica, api, False, 0, 0)
        return _static_entry(replica, api, state.admitting, state.policy_version, state.kv_tokens)


def _static_entry(
    replica: StaticReplica, api: ReplicaApi, healthy: bool, version: int, kv_tokens: int
) -> ReplicaEntry:
    return ReplicaEntry(
        id=replica.id,
        kind=replica.kind,
        url=replica.url,
        leased=True,
        lease_epoch=0,
        healthy=healthy,
        policy_version=version,
        max_sequences=replica.max_sequences,
        kv_tokens=kv_tokens,
        api=api,
    )
