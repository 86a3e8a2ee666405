"""Command line of the front: `rose front --port N --weights-root DIR …`."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from rose.addresses import host_port
from rose.gateway.http_requests import Authenticator
from rose.integrations.front.checkpoint_folder import WeightRoots
from rose.integrations.front.forwarding import Forwarding
from rose.integrations.front.server import FrontServer, tell
from rose.integrations.front.settings import FrontSettings, front_parser, parse_front
from rose.integrations.front.updates import CheckpointUpdates, FrontPublisher
from rose.integrations.policy_publisher import PolicyPublisher
from rose.logs.process_log import start_logging
from rose.process.background_tasks import stop_signalled
from rose.process.http_port import HttpPort, raise_descriptor_limit
from rose.security.tokens import TokenVerifier

parser = front_parser


def main(argv: list[str]) -> int:
    """Run `rose front` until SIGTERM or SIGINT, then return 0. Raises RoseError with one line."""
    start_logging("front", argv)
    raise_descriptor_limit()
    settings = parse_front(argv)
    roots = WeightRoots(settings.weights_roots)
    # The job is registered before the port answers: replicas are leased to it, and trainers wait
    # for health before they publish.
    with PolicyPublisher(settings.trainer) as publisher:
        asyncio.run(_serve(settings, publisher, roots))
    return 0


async def _serve(settings: FrontSettings, publisher: FrontPublisher, roots: WeightRoots) -> None:
    stop = stop_signalled()
    async with listening(settings, publisher, roots) as port:
        scheme = "https" if settings.trainer.certificates() else "http"
        at = f"{scheme}://{host_port(settings.host, port)}"
        tell(
            f"listening on {at} for job {settings.trainer.job} at"
            f" version {publisher.version}; checkpoints are read below {roots}"
        )
        await stop.wait()


@asynccontextmanager
async def listening(
    settings: FrontSettings, publisher: FrontPublisher, roots: WeightRoots
) -> AsyncIterator[int]:
    """Serve a front while the block runs, and yield its port.

    Raises ConfigError if it cannot listen.
    """
    trainer = settings.trainer
    certificates = trainer.certificates()
    tokens = None
    if settings.token_keys is not None:
        tokens = TokenVerifier(settings.token_keys, settings.token_audience)
    credentials = trainer.credentials()
    credentials.check(trainer.gateway)
    updates = CheckpointUpdates(
        publisher, roots, base=trainer.checkpoint, marker=settings.marker, whole_s=settings.whole_s
    )
    # No limit here: callers' connections are bounded, and each uses one connection to the gateway.
    timeout = aiohttp.ClientTimeout(total=None)
    async with credentials.session([trainer.gateway], 0, timeout) as session:
        forwarding = Forwarding(session, trainer.gateway, trainer.job, settings.silent_s)
        server = FrontServer(
            settings, updates, forwarding, Authenticator(certificates, tokens, time.time, tell)
        )
        tls = certificates.server_context(everybody=True) if certificates else None
        port = HttpPort(
            server.application(),
            settings.host,
            settings.port,
            tls,
            connections=server.connections,
            around=server.answer,
        )
        try:
            await port.start()
            yield port.port
        finally:
            await updates.close()
            await port.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
