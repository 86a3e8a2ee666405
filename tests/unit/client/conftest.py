"""Fixtures of tests without an event loop of their own."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tests.fakes.gateway import StandInGateway


@pytest.fixture
def gateway() -> Iterator[StandInGateway]:
    """A stand-in gateway on a loop of its own."""
    standin, loop = StandInGateway(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(standin.__aenter__(), loop).result(10)
    yield standin
    asyncio.run_coroutine_threadsafe(standin.__aexit__(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
