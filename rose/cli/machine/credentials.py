"""`rose certs init|issue|show` and `rose token key|issue`: the credentials of a cluster.

Certificates are of a development CA: a cluster with cert-manager or SPIRE does not need it, since
any CA works whose certificates have the URI and the DNS name of docs/security.md.

A token of one job, for gateways, is a secret: it is printed to standard output, or written to a
file of mode 0600, and never passed as an argument, which every user of the machine could read.
"""

import argparse
import datetime
from functools import partial
from pathlib import Path

from rose.command_line.output import say
from rose.command_line.parser import Parser, duration_s
from rose.errors import ConfigError
from rose.security.callers import TRAINER
from rose.security.certificates import identity_of, leaf_of
from rose.security.development_ca import CA_LIFE_S, LIFE_S, LOOPBACK, DevelopmentCa, write_private
from rose.security.keys import signing_key
from rose.security.roles import Identity, Role
from rose.security.tokens import AUDIENCE, issue
from rose.security.tokens import LIFE_S as TOKEN_LIFE_S
from weight_transfer import SigningKey

DEFAULT_DIR, DEFAULT_KEY = Path("certs"), Path("token.key")


def parser(prog: str) -> Parser:
    """Return the command-line parser of `rose certs` or of `rose token`, by the program's name."""
    return _token_parser(prog) if prog == "rose token" else _certs_parser(prog)


def _certs_parser(prog: str) -> Parser:
    made = Parser(prog, description="Make and show certificates of a cluster.")
    commands = made.add_commands()
    init = commands.add_parser("init", help="make a CA for development in a folder")
    init.add_argument("--cluster", default="dev", metavar="NAME", help="default dev")
    init.add_argument("--ttl", type=duration_s, default=CA_LIFE_S, metavar="TIME", help="365d")
    init.set_defaults(run=_init)
    issue = commands.add_parser("issue", help="write ROLE-NAME.pem and ROLE-NAME.key")
    issue.add_argument("role", choices=[role.value for role in Role])
    issue.add_argument("name", metavar="NAME", help="a node's, a gateway's; a trainer's is its job")
    what = "name or address under which HTTP clients reach it (default: this machine)"
    issue.add_argument("--host", action="append", default=[], metavar="HOST", help=what)
    issue.add_argument("--ttl", type=duration_s, default=LIFE_S, metavar="TIME", help="30d")
    issue.add_argument("--cluster", default="", metavar="NAME", help="where its CA names none")
    issue.set_defaults(run=_issue)
    sign = commands.add_parser("sign-nodes", help="sign requests of nodes in Kubernetes, by a CA")
    sign.add_argument("--signer", required=True, metavar="NAME", help="signerName of the requests")
    sign.add_argument("--account", required=True, metavar="NAMESPACE:NAME", help="who may ask")
    sign.add_argument("--cluster", default="", metavar="NAME", help="where its CA names none")
    sign.add_argument("--ttl", type=duration_s, default=LIFE_S, metavar="TIME", help="30d")
    sign.set_defaults(run=_sign_nodes)
    show = commands.add_parser("show", help="say whose certificates these are, and until when")
    show.add_argument("files", nargs="+", type=Path, metavar="FILE")
    show.set_defaults(run=_show)
    for command in (init, issue, sign):
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
    ca = DevelopmentCa.open(args.dir, args.cluster)
    issued = ca.issue(Role(args.role), args.name, args.host or LOOPBACK, args.ttl)
    say(
        f"{issued.identity.uri} for {_span(args.ttl)}; start it with --ca {ca.file}"
        f" --certificate {issued.certificate} --key {issued.key}"
    )
    return 0


def _sign_nodes(args: argparse.Namespace) -> int:
    # Their imports take long, and few commands need them.
    from rose.controller.kube_api import KubeApi
    from rose.controller.node_signer import NodeSigner

    open_ca = partial(DevelopmentCa.open, args.dir, args.cluster)
    open_ca()
    api = KubeApi.opened(None)
    NodeSigner(api, open_ca, args.signer, args.account, args.ttl).run(say)
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


# ---- tokens ----


def _token_parser(prog: str) -> Parser:
    whole = Parser(prog, description="Make keys and tokens for callers of gateways.")
    commands = whole.add_commands()
    key = commands.add_parser("key", help="make a signing key, and FILE.pub for --token-keys")
    key.add_argument("--out", type=Path, default=DEFAULT_KEY, metavar="FILE", help="token.key")
    key.set_defaults(run=_key)
    made = commands.add_parser("issue", help="sign a token of one job")
    made.add_argument("--job", required=True, metavar="JOB")
    made.add_argument(
        "--ttl", type=duration_s, default=TOKEN_LIFE_S, metavar="TIME", help="1h; 24h most"
    )
    made.add_argument(
        "--subject", default=TRAINER, metavar="NAME", help="whose turns are its own (trainer)"
    )
    made.add_argument("--audience", default=AUDIENCE, metavar="NAME", help=AUDIENCE)
    made.add_argument("--key", type=Path, default=DEFAULT_KEY, metavar="FILE", help="token.key")
    made.add_argument("--out", type=Path, metavar="FILE", help="replaced whole; else printed")
    made.set_defaults(run=_issue_token)
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


def _issue_token(args: argparse.Namespace) -> int:
    token = issue(signing_key(args.key), args.job, args.subject, args.audience, args.ttl)
    if args.out is None:
        say(token)
    else:
        write_private(args.out, f"{token}\n".encode())
    return 0
