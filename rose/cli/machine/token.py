"""`rose token key|issue`: the operator's signing key, and tokens of one job for gateways.

A token is a secret: it is printed to standard output, or written to a file of mode 0600, and never
passed as an argument, which every user of the machine could read.
"""

import argparse
from pathlib import Path

from rose.command_line.output import say
from rose.command_line.parser import Parser, duration_s
from rose.errors import ConfigError
from rose.security.callers import TRAINER
from rose.security.development_ca import write_private
from rose.security.keys import signing_key
from rose.security.tokens import AUDIENCE, LIFE_S, issue
from weight_transfer import SigningKey

DEFAULT_KEY = Path("token.key")


def parser(prog: str) -> Parser:
    """Return the parser of `rose token` and its commands."""
    whole = Parser(prog, description="Make keys and tokens for callers of gateways.")
    commands = whole.add_commands()
    key = commands.add_parser("key", help="make a signing key, and FILE.pub for --token-keys")
    key.add_argument("--out", type=Path, default=DEFAULT_KEY, metavar="FILE", help="token.key")
    key.set_defaults(run=_key)
    made = commands.add_parser("issue", help="sign a token of one job")
    made.add_argument("--job", required=True, metavar="JOB")
    made.add_argument("--ttl", type=duration_s, default=LIFE_S, metavar="TIME", help="1h; 24h most")
    made.add_argument(
        "--subject", default=TRAINER, metavar="NAME", help="whose turns are its own (trainer)"
    )
    made.add_argument("--audience", default=AUDIENCE, metavar="NAME", help=AUDIENCE)
    made.add_argument("--key", type=Path, default=DEFAULT_KEY, metavar="FILE", help="token.key")
    made.add_argument("--out", type=Path, metavar="FILE", help="replaced whole; else printed")
    made.set_defaults(run=_issue)
    return whole


def _key(args: argparse.Namespace) -> int:
    key, public = SigningKey.generate(), args.out.with_name(args.out.name + ".pub")
    try:
        key.save(args.out)
    except FileExistsError as error:
        raise ConfigError(f"{args.out} exists; give another --out, or remove it") from error
    except OSError as error:
        raise ConfigError(f"{args.out} cannot be written ({error.strerror})") from error
    write_private(public, f"{key.verify_key.hex}\n".encode())
    say(f"{args.out}: keep it; gateways take --token-keys {public}")
    return 0


def _issue(args: argparse.Namespace) -> int:
    token = issue(signing_key(args.key), args.job, args.subject, args.audience, args.ttl)
    if args.out is None:
        say(token)
    else:
        write_private(args.out, f"{token}\n".encode())
    return 0
