"""`rose certs init|issue|show`: a development CA, and the content of a certificate.

A cluster with cert-manager or SPIRE does not need it: any CA works whose certificates have the URI
and the DNS name of docs/security.md.
"""

import argparse
import datetime
from pathlib import Path

from rose.command_line.output import say
from rose.command_line.parser import Parser, duration_s
from rose.errors import ConfigError
from rose.security.certificates import identity_of, leaf_of
from rose.security.development_ca import CA_LIFE_S, LIFE_S, LOOPBACK, DevelopmentCa
from rose.security.roles import Identity, Role

DEFAULT_DIR = Path("certs")


def parser(prog: str) -> Parser:
    """Return the parser of `rose certs` and its commands."""
    made = Parser(prog, description="Make and show certificates of a cluster.")
    commands = made.add_commands()
    init = commands.add_parser("init", help="make a CA for development in a folder")
    init.add_argument("--cluster", default="dev", metavar="NAME", help="default dev")
    init.add_argument("--ttl", type=duration_s, default=CA_LIFE_S, metavar="TIME", help="365d")
    init.set_defaults(run=_init)
    issue = commands.add_parser("issue", help="write ROLE-NAME.pem and ROLE-NAME.key")
    issue.add_argument("role", choices=[role.value for role in Role])
    issue.add_argument("name", metavar="NAME", help="a node's, a gateway's; a trainer's is its job")
    issue.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="HOST",
        help="name or address under which HTTP clients reach it (default: this machine)",
    )
    issue.add_argument("--ttl", type=duration_s, default=LIFE_S, metavar="TIME", help="30d")
    issue.set_defaults(run=_issue)
    show = commands.add_parser("show", help="say whose certificates these are, and until when")
    show.add_argument("files", nargs="+", type=Path, metavar="FILE")
    show.set_defaults(run=_show)
    for command in (init, issue):
        command.add_argument(
            "--dir", type=Path, default=DEFAULT_DIR, metavar="DIR", help=f"default {DEFAULT_DIR}"
        )
    return made


def _init(args: argparse.Namespace) -> int:
    ca = DevelopmentCa.make(args.dir, args.cluster, args.ttl)
    say(f"{ca.file}: the CA of cluster {args.cluster}; keep {args.dir}/ca.key to yourself")
    return 0


def _issue(args: argparse.Namespace) -> int:
    if args.role == Role.TRAINER:
        Identity.check_job(args.name)
    ca = DevelopmentCa.open(args.dir)
    issued = ca.issue(Role(args.role), args.name, args.host or LOOPBACK, args.ttl)
    say(
        f"{issued.identity.uri} for {_span(args.ttl)}; start it with --ca {ca.file}"
        f" --certificate {issued.certificate} --key {issued.key}"
    )
    return 0


def _show(args: argparse.Namespace) -> int:
    now = datetime.datetime.now(datetime.UTC)
    expired = False
    for path in args.files:
        leaf = leaf_of(path)
        try:
            whose = identity_of(leaf).uri
        except ConfigError:
            whose = f"no identity, {leaf.subject.rfc4514_string()}"
        left_s = (leaf.not_valid_after_utc - now).total_seconds()
        expired |= left_s <= 0
        until = f"{leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        when = f"until {until}, {_span(left_s)} from now" if left_s > 0 else f"EXPIRED on {until}"
        say(f"{path}: {whose}; {when}; issued by {leaf.issuer.rfc4514_string()}")
    return 1 if expired else 0


def _span(seconds: float) -> str:
    for unit_s, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"
