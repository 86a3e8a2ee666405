"""`--replica URL`: whatever answers there works, and what it cannot promise is said."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from standin_engines import StandInSglang, StandInVllm, StockEngine

from rose.errors import ConfigError
from rose.gateway import Gateway
from rose.gateway.replicas import static
from rose.gateway.settings import parse_settings
from tests.fakes.replica import StandInReplica
from tests.unit.gateway.gateway_cases import base_url, until
from tests.unit.gateway.wire_cases import VLLM, ask, payloads, stream, tokens_of, vllm_body

COUNT = list(range(101, 111))


@asynccontextmanager
async def attached(
    *urls: str, more: tuple[str, ...] = ()
) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    """A gateway as the command line makes it, when all its replicas are ready, and a session."""
    argv = ["--port", "0", "--shutdown-s", "0.1", *more]
    for url in urls:
        argv += ["--replica", url]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static, "POLL_S", 0.02)
        async with (
            Gateway(parse_settings(argv)) as gateway,
            aiohttp.ClientSession(base_url(gateway)) as session,
        ):
            await until(lambda: gateway.status().usable == len(urls))
            yield gateway, session


@pytest.mark.parametrize(
    ("engine", "api"),
    [
        (StandInVllm(), "vllm"),
        (StandInSglang(), "sglang"),
        (StandInSglang(incremental=True), "sglang"),
    ],
)
async def test_a_stock_engine_serves_turns_and_the_gateway_says_what_is_missing(
    engine: StockEngine, api: str, capsys: Any
) -> None:
    async with engine, attached(engine.url) as (_, session):
        body = vllm_body(10, priority=3)
        status, answer, _ = await ask(session, VLLM, body)
        _, events = await stream(session, VLLM, body)
        health = await (await session.get("/health")).json()
        models = await (await session.get("/v1/models")).json()
        versioned, refused, _ = await ask(session, VLLM, vllm_body(3, min_version=0))
        too_long, _, _ = await ask(session, VLLM, vllm_body(3, token_ids=[1] * 400))
    choice = answer["choices"][0]
    assert (status, choice["token_ids"]) == (200, COUNT)
    assert [row["logprob"] for row in choice["logprobs"]["content"]] == [-t / 1000 for t in COUNT]
    assert (choice["weight_versions"], answer["versions"]) == (None, [])
    assert all(chunk["versions"] == [] for chunk in payloads(events))
    name = engine.url.removeprefix("http://")
    assert health["unversioned"] == {name: api}
    assert models["data"][0]["max_model_len"] == 400
    assert (versioned, too_long) == (409, 400)
    assert "leave min_version and exact_version out" in refused["error"]["message"]
    assert "no policy versions, and no gate holds it" in capsys.readouterr().out


async def test_an_engine_that_does_not_answer_is_said_to_be_missing_once(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static, "POLL_S", 0.02)
    engine = StandInVllm()
    async with engine:
        url = engine.url
    async with Gateway(parse_settings(["--port", "0", "--replica", url])) as gateway:
        await asyncio.sleep(0.2)
        assert gateway.status().usable == 0
    out = capsys.readouterr().out
    assert out.count(f"{url} does not answer yet: it is asked until it does\n") == 1


@pytest.mark.parametrize("engine", [StandInVllm(), StandInSglang(), StandInReplica()])
async def test_a_turn_that_an_engine_stops_early_is_over(engine: Any) -> None:
    engine.stop_after = 4
    async with engine, attached(engine.url) as (_, session):
        status, answer, _ = await ask(session, VLLM, vllm_body(10))
    choice = answer["choices"][0]
    assert (status, choice["token_ids"], choice["finish_reason"]) == (200, COUNT[:4], "stop")
    assert answer["attempts"] == 1


async def test_a_turn_goes_on_at_another_kind_of_engine_when_one_dies() -> None:
    async with StandInVllm() as one, StandInSglang() as two, StandInReplica(version=3) as three:
        one.break_after = two.break_after = 3
        async with attached(one.url, two.url, three.url) as (_, session):
            answers = await asyncio.gather(*(ask(session, VLLM, vllm_body(10)) for _ in range(6)))
            _, versioned, _ = await ask(session, VLLM, vllm_body(10, min_version=3))
    for status, answer, _ in answers:
        assert status == 200
        assert tokens_of(answer) == COUNT
        spans = {(s["version"], s["start"], s["end"]) for s in answer["versions"]}
        ours = {
            (3, s["start"], s["end"])
            for s in answer["segments"]
            if s["replica"] == three.url.removeprefix("http://")
        }
        assert spans == ours, "exactly the tokens of the ROSE replica are stamped"
    assert any(len(answer["segments"]) > 1 for _, answer, _ in answers)
    assert len(versioned["segments"]) == 1
    assert versioned["versions"] == [{"version": 3, "start": 0, "end": 10}]


async def test_an_unhealthy_engine_gets_no_turns() -> None:
    async with (
        StandInVllm() as one,
        StandInVllm() as two,
        attached(one.url, two.url) as (gw, session),
    ):
        one.healthy = False
        await until(lambda: gw.status().usable == 1)
        await asyncio.gather(*(ask(session, VLLM, vllm_body(2)) for _ in range(5)))
    assert (len(one.requests), len(two.requests)) == (0, 5)


def test_a_url_alone_names_itself_and_the_old_form_still_works() -> None:
    argv = ["--port", "0", "--replica", "http://h:1/", "--replica", "g=guest=http://h:2"]
    one, two = parse_settings(argv).replicas
    assert (one.id, one.kind.value, one.url) == ("h:1", "dedicated", "http://h:1")
    assert (two.id, two.kind.value, two.url) == ("g", "guest", "http://h:2")
    with pytest.raises(ConfigError, match="http://HOST:PORT or ID"):
        parse_settings(["--port", "0", "--replica", "ftp://h:1"])


async def test_an_engine_gets_no_turns_while_its_account_of_itself_cannot_be_read() -> None:
    body = b'{"x":' + b"[" * 20_000

    class NestedStateReplica(StandInReplica):
        mad = False

        async def _state(self, http: web.Request) -> web.StreamResponse:
            return web.Response(body=body) if self.mad else await super()._state(http)

    async with (
        NestedStateReplica() as one,
        StandInReplica() as two,
        attached(one.url, two.url) as (gw, _),
    ):
        one.mad = True
        await until(lambda: gw.status().usable == 1)
        one.mad = False
        await until(lambda: gw.status().usable == 2)
        # A replica that cannot be read from the first word on is asked again as well.
        one.mad = True
        async with attached(two.url, more=("--replica", one.url)) as (other, _):
            assert other.status().usable == 1
            one.mad = False
            await until(lambda: other.status().usable == 2)


@pytest.mark.parametrize("engine", [StandInVllm(), StandInSglang()])
@pytest.mark.parametrize("code", [400, 404, 422])
async def test_what_an_engine_refuses_in_its_stream_is_the_callers_fault(
    engine: StockEngine, code: int
) -> None:
    async with engine, attached(engine.url) as (_, session):
        asked = len(engine.requests)
        engine.error = {"message": "token 9 is out of vocabulary", "code": code}
        status, answer, _ = await ask(session, VLLM, vllm_body(10))
        assert (status, len(engine.requests)) == (400, asked + 1)
        assert "refuses the turn: token 9 is out of vocabulary" in answer["error"]["message"]
        engine.error = None
        assert (await ask(session, VLLM, vllm_body(10)))[0] == 200, "it is not set aside"
