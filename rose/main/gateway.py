"""Command line of the gateway: `python -m rose.main.gateway --port N (--scheduler | --replica)`."""

import asyncio
import contextlib
import sys

import uvloop

from rose.addresses import host_port
from rose.errors import RoseError
from rose.gateway.app import Gateway
from rose.gateway.event_loop import collect_in_small_steps
from rose.gateway.settings import GatewaySettings, gateway_parser, parse_settings
from rose.logs.process_log import announce, complain, start_logging
from rose.process.background_tasks import stop_signalled
from rose.process.http_port import raise_descriptor_limit

parser = gateway_parser


def main(argv: list[str]) -> int:
    """Run a gateway until SIGTERM or SIGINT; return 0, or 2 after one line of a RoseError."""
    try:
        start_logging("gateway", argv)
        raise_descriptor_limit()
        uvloop.run(_serve(parse_settings(argv)))
    except RoseError as error:
        complain("rose gateway", error)
        return 2
    return 0


async def _serve(settings: GatewaySettings) -> None:
    stop = stop_signalled()
    async with Gateway(settings) as gateway:
        scheme = "https" if settings.certificates else "http"
        at = host_port(settings.host, gateway.port)
        announce("rose gateway", f"listening on {scheme}://{at}")
        gateway.background.start("garbage", collect_in_small_steps)
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
