"""Command line of the gateway: `python -m rose.gateway.main --port N (--scheduler | --replica)`."""

import asyncio
import asyncio.selector_events as selector_events
import contextlib
import gc
import signal
import sys

from rose.errors import RoseError
from rose.gateway.process import Gateway
from rose.gateway.settings import GatewaySettings, parse_settings

# A stream's chunk has some 100 bytes; asyncio allocates 256 KiB for every read of a socket, which
# was a third of this process's CPU time.
READ_BYTES = 16 * 1024
# Thousands of live streams are half a million objects: walking them all takes tens of milliseconds,
# in which no token moves. So the collector looks at the young ones, and rarely at the rest.
GC_THRESHOLDS = (20_000, 50, 1_000)


def main(argv: list[str]) -> int:
    """Serve until SIGTERM or SIGINT: 0; 2 with one line on standard error for wrong input."""
    transport = getattr(selector_events, "_SelectorSocketTransport", None)
    if transport is not None:
        transport.max_size = READ_BYTES
    try:
        asyncio.run(_serve(parse_settings(argv)))
    except RoseError as error:
        sys.stderr.write(f"rose gateway: {error}\n")
        return 2
    return 0


async def _serve(settings: GatewaySettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    async with Gateway(settings) as gateway:
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        sys.stdout.write(f"rose gateway: listening on http://{settings.host}:{gateway.port}\n")
        sys.stdout.flush()
        waits = {asyncio.ensure_future(stop.wait()), asyncio.ensure_future(gateway.failed())}
        done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in pending:
            wait.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await wait
        for wait in done:
            wait.result()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
