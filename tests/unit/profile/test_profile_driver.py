"""Errors of the driver if an engine fails under measurement."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from executor import ControlPage, GrantMode, GuestState
from rose.errors import EngineStartError
from rose.profile import Batch
from rose.profile.driver import OpenGrant, ProfileDriver
from tests.harness.web_server import served

BATCH = Batch(sequences=1, prompt_tokens=8, token_budget=16)


class AnsweringEngine:
    """Answers turns with `line`; its process ends when told to."""

    def __init__(self, log: Path) -> None:
        self.line = '{"finish_reason":"length"}'
        self.ended = asyncio.Event()
        self.headers: dict[str, str] = {}
        self.process: Any = SimpleNamespace(returncode=None, wait=self.wait)
        self.spec: Any = SimpleNamespace(url="", log=log)

    async def wait(self) -> int:
        await self.ended.wait()
        self.process.returncode = 1
        return 1

    def last_words(self) -> str:
        return "MemoryError: too much"

    async def generate(self, request: web.Request) -> web.Response:
        return web.Response(text=self.line + "\n")


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[AnsweringEngine]:
    engine = AnsweringEngine(tmp_path / "engine.log")
    async with served(engine.generate) as engine.spec.url:
        yield engine


@pytest.fixture
async def driver(engine: AnsweringEngine, tmp_path: Path) -> AsyncIterator[ProfileDriver]:
    with ControlPage.create(tmp_path / "page") as page:
        page.guest.write(GuestState(waiting=1))
        grant = OpenGrant(page, token_budget=16, max_sequences=4)
        async with aiohttp.ClientSession() as http:
            yield ProfileDriver(engine, grant, http, tmp_path, vocabulary=96)  # type: ignore[arg-type]


async def test_an_engine_that_ends_is_told_by_its_last_words(
    engine: AnsweringEngine, driver: ProfileDriver
) -> None:
    engine.line = '{"finish_reason":"error","message":"EngineDeadError: gone"}'
    asyncio.get_running_loop().call_later(0.1, engine.ended.set)
    with pytest.raises(EngineStartError, match="ended while it was profiled: MemoryError"):
        await driver.runs(BATCH)


async def test_an_engine_that_lives_but_fails_is_told_by_its_answer(
    engine: AnsweringEngine, driver: ProfileDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.profile.driver.ENDS_S", 0.05)
    engine.line = '{"finish_reason":"abort"}'
    with pytest.raises(EngineStartError, match="abort") as error:
        await driver.runs(BATCH)
    assert "\n" not in str(error.value)


def test_a_grant_is_frozen_at_once_and_opened_at_once(tmp_path: Path) -> None:
    with ControlPage.create(tmp_path / "page") as page:
        grant = OpenGrant(page, token_budget=16, max_sequences=4)
        for act, mode, budget in (
            (grant.freeze, GrantMode.FREEZE, 16),
            (lambda: grant.allow(8), GrantMode.RUN, 8),
        ):
            act()
            written = page.grant.read()
            assert written is not None
            assert (written.mode, written.token_budget) == (mode, budget)
            host = page.host.read()
            assert host is not None
            assert host.idle
