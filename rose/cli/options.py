"""Options that several commands share, and the text at an address of `--metrics`."""

import argparse
import os
from http.client import HTTPException
from typing import Final

from rose.addresses import DefaultPort
from rose.direct_http import open_directly
from rose.errors import UnavailableError
from rose.operate.client import PolicyClient
from rose.security.certificates import PATHS, add_certificate_options, taken_certificates

DEFAULT_SCHEDULER: Final = f"127.0.0.1:{DefaultPort.SCHEDULER}"
METRICS_S: Final = 5.0
MOST_METRICS_BYTES: Final = 16 << 20


def add_scheduler_options(parser: argparse.ArgumentParser) -> None:
    """Add `--scheduler` and the certificate options, by default as the environment says."""
    parser.add_argument(
        "--scheduler",
        default=os.environ.get("ROSE_SCHEDULER", DEFAULT_SCHEDULER),
        metavar="HOST:PORT",
        help=f"several with commas find the one that leads (ROSE_SCHEDULER or {DEFAULT_SCHEDULER})",
    )
    add_certificate_options(parser)
    # A pod for an operator's commands sets them; argparse reads them as paths. A trainer's ROSE_KEY
    # signs weights, and its ROSE_CA may be all that it has.
    if "ROSE_CERTIFICATE" in os.environ:
        names = ("ROSE_CA", "ROSE_CERTIFICATE", "ROSE_CERTIFICATE_KEY")
        parser.set_defaults(**dict(zip(PATHS, map(os.environ.get, names), strict=True)))


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Add `--dry-run` to a parser."""
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would change, and change nothing"
    )


def client_of(args: argparse.Namespace) -> PolicyClient:
    """Return a client of the scheduler that parsed options name."""
    return PolicyClient(args.scheduler, certificates=taken_certificates(vars(args)))


def metrics_text(url: str) -> str:
    """Return the Prometheus text at a URL that `--metrics` names. Raises UnavailableError."""
    try:
        with open_directly(url, METRICS_S) as reply:
            return reply.read(MOST_METRICS_BYTES).decode("utf-8", "replace")
    except (OSError, HTTPException, ValueError) as error:
        raise UnavailableError(f"{url} does not answer ({error}); check --metrics") from error
