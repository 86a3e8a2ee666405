"""Options that several commands share: the scheduler's address and the caller's certificate."""

import argparse
from typing import Final

from rose.operate.client import PolicyClient
from rose.security.certificates import add_certificate_options, taken_certificates

DEFAULT_SCHEDULER: Final = "127.0.0.1:7400"


def add_scheduler_options(parser: argparse.ArgumentParser) -> None:
    """Add `--scheduler` and the certificate options to a parser."""
    parser.add_argument(
        "--scheduler",
        default=DEFAULT_SCHEDULER,
        metavar="HOST:PORT",
        help=f"several with commas find the one that leads (default {DEFAULT_SCHEDULER})",
    )
    add_certificate_options(parser)


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Add `--dry-run` to a parser."""
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would change, and change nothing"
    )


def client_of(args: argparse.Namespace) -> PolicyClient:
    """Return a client of the scheduler that parsed options name."""
    return PolicyClient(args.scheduler, certificates=taken_certificates(vars(args)))
