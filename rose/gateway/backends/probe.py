"""Probe of a URL: tells a ROSE replica, a stock vLLM and a stock SGLang apart."""

from dataclasses import dataclass

import aiohttp
import msgspec

from rose.contract.replica import STATE, ReplicaState
from rose.errors import Decoder, decoded
from rose.gateway.replicas.table import ReplicaApi

PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


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
    """Result of a probe; `max_model_len` in tokens, None if it is not reported."""

    api: ReplicaApi
    max_model_len: int | None


async def probe(session: aiohttp.ClientSession, url: str) -> Probed | None:
    """Return the engine at `url`; None if none that can generate answers, which may change."""
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


async def _get(session: aiohttp.ClientSession, url: str) -> tuple[int, bytes]:
    """Return status and body; status 0 without an answer."""
    try:
        async with session.get(url, timeout=PROBE_TIMEOUT) as response:
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
