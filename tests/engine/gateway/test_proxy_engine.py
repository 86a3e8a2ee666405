"""A node's proxy before a real replica: the same turns, over mTLS, and nothing else of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from engine_specs import LEFT
from pool import Started
from tiny_model import VOCABULARY

from rose.gateway.backends.http_pool import ClusterTls, Upstream
from rose.proxy.callers import Door
from rose.proxy.main import serve
from rose.security import Role
from tests.harness.certificates import Certificates

pytestmark = [
    pytest.mark.engine,
    pytest.mark.engines(LEFT),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

PATIENCE_S = 60.0
PROMPT = [(11 * k + 5) % VOCABULARY for k in range(40)]
CONTROL = (
    "/rose/v1/admit",
    "/rose/v1/drain",
    "/rose/v1/weights/apply",
    "/sleep",
    "/v1/completions",
)


@dataclass
class ReceivedTurn:
    """A gateway's receiver of one turn."""

    text: bytes = b""
    code: int = 0
    error: Exception | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def status(self, code: int) -> None:
        self.code = code

    def body(self, data: bytes) -> None:
        self.text += data
        self.begun.set()

    def ended(self, error: Exception | None) -> None:
        self.error = error
        self.over.set()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]

    @property
    def tokens(self) -> list[int]:
        return [token for line in self.lines for token in line.get("token_ids", ())]


@dataclass
class Way:
    """Way to the replica, by the proxy or direct."""

    replica: Started
    door: Door
    proxied: str
    near: Upstream
    far: Upstream

    async def turn(self, name: str, tokens: int = 24, *, proxied: bool = True) -> ReceivedTurn:
        heard = await self.begin(name, tokens, proxied=proxied)
        async with asyncio.timeout(PATIENCE_S):
            await heard.over.wait()
        assert (heard.code, heard.error) == (200, None), heard.text
        return heard

    async def begin(self, name: str, tokens: int, *, proxied: bool = True) -> ReceivedTurn:
        heard = ReceivedTurn()
        url = self.proxied if proxied else self.replica.url
        upstream = self.far if proxied else self.near
        sampling = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
        body = {"request_id": name, "token_ids": PROMPT, "sampling": sampling}
        await upstream.post(f"{url}/rose/v1/generate", json.dumps(body).encode(), heard)
        return heard

    async def running(self) -> int:
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{self.replica.url}/rose/v1/state") as answer,
        ):
            state = await answer.json()
        return int(state["running"] + state["waiting"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def way(
    engines: list[Started], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Way]:
    (replica,) = engines
    cluster = Certificates(Path(tmp_path_factory.mktemp("ca")))
    node, gateway = (cluster.of(role, "n0") for role in (Role.NODE, Role.GATEWAY))
    server, door = await serve("127.0.0.1", 0, {"left 0": replica.spec.port}, node)
    port = server.sockets[0].getsockname()[1]
    url = f"https://127.0.0.1:{port}/left%200"
    way = Way(replica, door, url, Upstream(), Upstream(ClusterTls(gateway)))
    yield way
    for each in (way.near, way.far, server, door):
        each.close()


async def test_a_turn_has_the_same_tokens_and_versions(way: Way) -> None:
    near, far = await way.turn("near", proxied=False), await way.turn("far")
    assert near.tokens == far.tokens
    assert len(set(far.tokens)) > 4, "a degenerate model would make this empty"
    assert far.lines[-1] == near.lines[-1]
    assert {line["version"] for line in far.lines if "token_ids" in line} == {0}


async def test_many_turns_at_once_share_no_byte(way: Way) -> None:
    turns = await asyncio.gather(*(way.turn(f"many-{k}", 8 + k % 5) for k in range(24)))
    whole = max((turn.tokens for turn in turns), key=len)
    assert [len(turn.tokens) for turn in turns] == [8 + k % 5 for k in range(24)]
    assert all(turn.tokens == whole[: len(turn.tokens)] for turn in turns)


async def test_a_gateway_that_hangs_up_ends_its_turn_in_the_engine(way: Way) -> None:
    heard = ReceivedTurn()
    body = {"request_id": "left", "token_ids": PROMPT, "sampling": {"max_tokens": 400}}
    body["sampling"]["ignore_eos"] = True  # type: ignore[index]
    url = f"{way.proxied}/rose/v1/generate"
    connection = await way.far.post(url, json.dumps(body).encode(), heard)
    async with asyncio.timeout(PATIENCE_S):
        await heard.begun.wait()
    connection.leave(heard)
    async with asyncio.timeout(PATIENCE_S):
        while await way.running():  # noqa: ASYNC110 - another process is waited for
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("route", CONTROL)
async def test_the_engines_own_secret_opens_nothing_from_afar(way: Way, route: str) -> None:
    heard = ReceivedTurn()
    bearer = f"Authorization: {way.replica.headers['Authorization']}\r\n".encode()
    await way.far.post(way.proxied + route, b"{}", heard, bearer)
    async with asyncio.timeout(PATIENCE_S):
        await heard.over.wait()
    assert heard.code == 404
    assert b"only turns pass here" in heard.text
