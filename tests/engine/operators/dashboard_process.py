"""A dashboard over stand-in nodes, in a process of its own: `python -m … NODES PORT [advisory]`.

Prints `ready`, then plays a second of the fleet each second, and obeys lines of its standard input:
`hold`, `resume`, `standby`, `lead`, `leave`. Ends with its input.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator

from elastic_scheduler import HarvestMode
from rose.dashboard import DashboardServer, DashboardSettings
from tests.harness.dashboard_fleet import DashboardFleet

# Before the first look, so that charts have lines.
BEFORE_S = 60
# Advice is of whole minutes.
BEFORE_ADVICE_S = 190


async def main(nodes: int, port: int, *, advisory: bool) -> None:
    fleet = DashboardFleet(nodes, advisory=advisory)
    watch = fleet.watch()
    before_s = BEFORE_ADVICE_S if advisory else BEFORE_S
    for _ in range(before_s if nodes <= 100 else 6):
        fleet.play()
        await watch.look()
    server = DashboardServer(watch, DashboardSettings(port))
    await server.start()
    looking = asyncio.create_task(watch.run())
    playing = asyncio.create_task(_play(fleet))
    print("ready", flush=True)  # noqa: T201
    try:
        async for line in _lines():
            _obey(fleet, line)
    finally:
        for task in (looking, playing):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await server.close()
        watch.close()


async def _play(fleet: DashboardFleet) -> None:
    while True:
        begun_s = time.monotonic()
        await fleet.play_gently()
        await asyncio.sleep(max(0.05, 1.0 - (time.monotonic() - begun_s)))


async def _lines() -> AsyncIterator[str]:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.decode().strip()


def _obey(fleet: DashboardFleet, line: str) -> None:
    match line.split():
        case ["hold"]:
            fleet.set_harvest(HarvestMode.HOLD)
        case ["resume"]:
            fleet.set_harvest(HarvestMode.ACTIVE)
        case ["standby"]:
            fleet.stands_by = True
        case ["lead"]:
            fleet.stands_by = False
        case ["leave"]:
            fleet.leave(0)
        case _:
            raise ValueError(line)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), advisory="advisory" in sys.argv))
