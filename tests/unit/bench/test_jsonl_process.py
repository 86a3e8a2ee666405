"""A child that speaks JSON lines, or does not."""

import asyncio
import sys

import pytest

from bench.common.jsonl_process import JsonlProcess
from rose.errors import RoseError
from rose.process.child import ProcessSpec
from tests.harness.waiting import PATIENCE_S


@pytest.mark.parametrize("said", ["no event", "[" * 100_000, "x" * (5 << 20)])
async def test_a_child_that_says_no_event_is_an_error_and_no_silence(said: str) -> None:
    code = f"print({said[:1]!r} * {len(said)})" if len(set(said)) == 1 else f"print({said!r})"
    spec = ProcessSpec("child", (sys.executable, "-S", "-c", code), piped=True)
    child = await JsonlProcess.start(spec)
    try:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(RoseError, match="child: said what is no event"):
                await child.next()
    finally:
        await child.stop()


async def test_a_child_that_gave_up_is_noticed_by_whoever_only_gives_it_commands() -> None:
    code = """print('{"event": "error", "message": "cannot"}')"""
    spec = ProcessSpec("child", (sys.executable, "-S", "-c", code), piped=True)
    child = await JsonlProcess.start(spec)
    try:
        await child.process.wait()
        async with asyncio.timeout(PATIENCE_S):
            while child.events.qsize() < 2:  # noqa: ASYNC110 - what it said and its end
                await asyncio.sleep(0)
        with pytest.raises(RoseError, match="child: cannot"):
            child.check()
        with pytest.raises(RoseError, match="child ended"):
            child.check()
    finally:
        await child.stop()
