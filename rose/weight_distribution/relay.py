"""`rose relay`: fetch the weights of jobs and pass them on to neighbours, without a scheduler.

Serves until SIGTERM or SIGINT. Exit code 2 with one line for bad input.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rose.addresses import check_exposure, host_port, is_bucket
from rose.command_line.parser import Parser, add_metrics_options, check_metrics_port
from rose.errors import ConfigError
from rose.logs.process_log import add_logging_options, announce, start_logging
from rose.otlp import export_metrics
from rose.process.background_tasks import stop_signalled
from rose.security.keys import public_key
from rose.weight_distribution.credentials import OPEN, Credentials
from rose.weight_distribution.version_server import VersionServer
from weight_transfer import ChunkStore, VerifyKey
from weight_transfer.fetch.fetcher import ChunkFetcher
from weight_transfer.fetch.limits import Caps, DownloadLimits


@dataclass(frozen=True, slots=True)
class FollowedJob:
    """A job whose versions a relay fetches and passes on.

    origin: URL of its publisher. verify_key: key of its trainer; None accepts unsigned versions.
    """

    job: str
    origin: str
    verify_key: VerifyKey | None


class Relay:
    """Relay node of a cluster: a chunk store with a fetcher and an HTTP server.

    It fetches an object when the first neighbour asks for it, and keeps it. `members`: URLs of all
    relays, this one among them.
    """

    def __init__(
        self,
        root: Path,
        jobs: Sequence[FollowedJob],
        host: str,
        port: int,
        members: Sequence[str] = (),
        *,
        credentials: Credentials = OPEN,
        caps: Caps | None = None,
    ) -> None:
        """Prepare a relay of `jobs`; a request that names no job means the last of them.

        Raise ConfigError if other machines can reach the relay without certificates.
        """
        credentials.check_exposure(host)
        # The relay's own configuration names these addresses; announcements do not.
        origins = {each.origin for each in jobs}
        buckets = set(filter(is_bucket, origins))
        credentials = credentials.naming((*(origins - buckets), *members))
        self._session = credentials.sources(buckets)
        store = ChunkStore(root)
        me = f"{credentials.scheme}://{host_port(host, port)}"
        self.fetcher = ChunkFetcher(
            self._session, DownloadLimits(store, caps or Caps()), me, members
        )
        self._server = VersionServer(store, port, self.fetcher, credentials, host)
        for each in jobs:
            self.fetcher.follow(each.job, each.origin, each.verify_key)

    @property
    def url(self) -> str:
        """URL at which the other members reach this relay."""
        return self._server.url

    def enrol(self, members: Iterable[str]) -> None:
        self.fetcher.enrol(members)

    async def start(self) -> None:
        await self._server.start()

    async def close(self) -> None:
        """Stop fetching and serving; received chunks stay on disk."""
        await self.fetcher.close()
        await self._server.close()
        self.fetcher.receiving.close()
        await self._session.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a relay until a signal stops it and return exit code 0.

    Raises ConfigError for bad options.
    """
    start_logging("relay", sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(argv)
    if not (args.verify_key or args.unsigned):
        raise ConfigError("--verify-key is missing: anybody's weights would be kept; or --unsigned")
    credentials = Credentials.read(args.token_file, args.ca, args.certificate, args.key)
    credentials = replace(credentials, insecure=args.insecure)
    asyncio.run(_serve(args, credentials))
    return 0


async def _serve(args: argparse.Namespace, credentials: Credentials) -> None:
    stop = stop_signalled()
    first, *others = followed_jobs(args.job, args.origin, args.verify_key)
    certificates = credentials.files()
    check_metrics_port(args.metrics_port)
    if certificates is None and args.metrics_port is not None:
        check_exposure(args.metrics_host, args.insecure, "read names of jobs and their versions")
    relay = Relay(
        args.store,
        [*others, first],
        args.host,
        args.port,
        args.members,
        credentials=credentials,
        caps=Caps(args.bytes_per_s),
    )
    # Imported here, since trainers import this package and have no Prometheus client.
    from rose.metrics_server import MetricsServer
    from rose.weight_distribution.relay_metrics import RelayMetrics

    page = None
    try:
        await relay.start()
        fetcher, store = relay.fetcher, relay.fetcher.receiving.store
        counts = RelayMetrics(
            fetcher.receiving.traffic,
            fetcher.versions,
            certificates,
            lambda: store.damaged_files,
        )
        export_metrics("rose-relay", counts.look, lambda _: counts.registry.collect())
        if args.metrics_port is not None:
            page = MetricsServer(counts, args.metrics_host, args.metrics_port, certificates)
            await page.start()
        announce("rose relay", f"listening on {relay.url}")
        await stop.wait()
    finally:
        if page is not None:
            await page.close()
        await relay.close()


def followed_jobs(
    jobs: Sequence[str], origins: Sequence[str], keys: Sequence[str]
) -> list[FollowedJob]:
    """Return the jobs with their origins and keys, which are given in the same order.

    One key serves all jobs, no key accepts unsigned versions. Raises ConfigError where the numbers
    do not fit.
    """
    if len(origins) != len(jobs) or len(set(jobs)) != len(jobs):
        raise ConfigError(f"{len(jobs)} --job and {len(origins)} --origin: give each job its own")
    if len(keys) not in (0, 1, len(jobs)):
        raise ConfigError(
            f"{len(jobs)} --job and {len(keys)} --verify-key: give one for all, or one for each"
        )
    each_key = keys if len(keys) == len(jobs) else [*keys] * len(jobs)
    verify_keys: list[VerifyKey | None] = [VerifyKey(public_key(key)) for key in each_key]
    verify_keys = verify_keys or [None] * len(jobs)
    return [
        FollowedJob(job, origin.rstrip("/"), key)
        for job, origin, key in zip(jobs, origins, verify_keys, strict=True)
    ]


def parser(prog: str = "rose relay") -> Parser:
    """Return the argument parser of `rose relay`."""
    parser = Parser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True, metavar="DIR")
    more: dict[str, Any] = {"action": "append", "required": True}
    parser.add_argument("--origin", metavar="URL", help="the job's publisher", **more)
    parser.add_argument("--job", metavar="NAME", help="again, with --origin, for another", **more)
    parser.add_argument("--host", default="127.0.0.1", help="an address that the members reach")
    parser.add_argument("--port", type=int, required=True, metavar="N")
    parser.add_argument(
        "--members", nargs="*", default=(), metavar="URL", help="all relays, this one among them"
    )
    what = "of the trainer: one for all jobs, or one for each in their order"
    parser.add_argument("--verify-key", action="append", default=[], metavar="HEX", help=what)
    parser.add_argument("--unsigned", action="store_true", help="keep what nobody signed")
    parser.add_argument(
        "--insecure", action="store_true", help="serve other machines without certificates"
    )
    parser.add_argument("--bytes-per-s", type=int, metavar="N", help="of the link, on the average")
    add_metrics_options(parser, "of")
    parser.add_argument("--token-file", type=Path, metavar="FILE")
    for name, what in (
        ("ca", "who signs the others' certificates; with --certificate and --key"),
        ("certificate", "this relay's"),
        ("key", "of the certificate"),
    ):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=what)
    add_logging_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
