"""The prober of a gateway: it ends waiting turns, whatever its probes end with."""

import asyncio
from typing import Any

import pytest
from virtual_time import run_virtually

from rose.client.retry import GatewayMonitor
from rose.client.types import ClientSettings

URL = "http://127.0.0.1:1"


class BrokenHttp:
    """A session whose every request is a fault of the program."""

    def get(self, url: str, **options: Any) -> Any:
        raise UnicodeError("label too long")


def test_probes_that_cannot_even_be_sent_end_the_waiting() -> None:
    async def case() -> None:
        http: Any = BrokenHttp()
        monitor = GatewayMonitor(ClientSettings((URL,)), http)
        with pytest.raises(TimeoutError):
            async with monitor.watching(URL):
                await forever()
        await monitor.close()

    run_virtually(case())


async def forever() -> None:
    await asyncio.sleep(3_600)
    raise AssertionError("nobody ended the waiting")
