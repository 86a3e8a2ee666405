"""`rose explain TRAJECTORY`: the replicas on which a gateway placed its last turns, and why."""

import argparse
import http.client
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rose.addresses import DefaultPort
from rose.command_line.output import View, add_output_options, show
from rose.command_line.parser import Parser
from rose.direct_http import open_directly
from rose.errors import BAD_BYTES, ConfigError, RefusedError, UnavailableError
from rose.security.certificates import CertificateFiles, add_certificate_options, taken_certificates
from rose.security.tokens import TokenFile

if TYPE_CHECKING:
    # The import takes long, and most commands ask no gateway.
    from rose.contract.gateway import Choosing

DEFAULT_GATEWAY = f"http://127.0.0.1:{DefaultPort.GATEWAY}"
EXPLAIN_TIMEOUT_S = 5.0
# A choice in a large fleet weighs a dozen replicas; the cheapest few explain it.
SHOWN = 5


def parser(prog: str) -> Parser:
    """Return the command-line parser of `rose explain`."""
    why = Parser(prog)
    why.add_argument("subject", metavar="TRAJECTORY", help="a session, or one turn's request id")
    why.add_argument(
        "--gateway", default=DEFAULT_GATEWAY, metavar="URL", help=f"default {DEFAULT_GATEWAY}"
    )
    why.add_argument("--token-file", type=Path, metavar="FILE", help="of `rose token issue --out`")
    add_certificate_options(why)
    why.add_argument("--job", default="", metavar="J", help="whose it is, where there are several")
    add_output_options(why)
    why.set_defaults(run=_explain)
    return why


def _explain(args: argparse.Namespace) -> int:
    token = TokenFile(args.token_file).token() if args.token_file else ""
    certificates = taken_certificates(vars(args))
    show(args, lambda: explain(args.gateway, args.subject, args.job, token, certificates))
    return 0


def explain(
    gateway: str,
    subject: str,
    job: str = "",
    token: str = "",
    certificates: CertificateFiles | None = None,
) -> View:
    """Return a line for each placement of the subject's turns that the gateway remembers, oldest
    first. Raises RoseError if there is none.

    subject: a session, or one turn's request id.
    """
    found = _ask(gateway, subject, job, token, certificates)
    return View(found, tuple(map(line_of, found)))


def line_of(decision: "Choosing") -> str:
    """Return a placement as a line: `12.0 s ago  q1  -> guest-0: cheapest; 9 tokens (…)`."""
    cheapest = sorted(decision.weighed, key=lambda pair: pair[1])[:SHOWN]
    costs = ", ".join(f"{name} {cost_s:.3g} s" for name, cost_s in cheapest)
    long = ", likely among the longest" if decision.is_long else ""
    return (
        f"{decision.age_s:8.1f} s ago  {decision.request_id or '-'}"
        f"  -> {decision.replica or 'wait'}: {decision.why};"
        f" {decision.expected_tokens} tokens expected{long} ({costs or 'nobody'})"
    )


def _ask(
    gateway: str, subject: str, job: str, token: str, certificates: CertificateFiles | None
) -> "list[Choosing]":
    from rose.contract.gateway import EXPLAIN, Explanation

    base = gateway.rstrip("/")
    if urllib.parse.urlsplit(base).scheme not in ("http", "https"):
        raise ConfigError(f"--gateway {gateway} is no URL; write http://HOST:PORT")
    query = f"?{urllib.parse.urlencode({'job': job})}" if job else ""
    url = f"{base}{EXPLAIN}{urllib.parse.quote(subject, safe='')}{query}"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    asked = urllib.request.Request(url, headers=headers)  # noqa: S310 - checked
    context = certificates.client_context() if certificates else None
    try:
        with open_directly(asked, EXPLAIN_TIMEOUT_S, context) as reply:
            return msgspec.json.decode(reply.read(), type=Explanation).decisions
    except urllib.error.HTTPError as error:
        if error.code == http.client.NOT_FOUND:
            raise RefusedError(
                f"the gateway remembers no choice for {subject!r}: name a request id or a session"
                " of one of its latest turns"
            ) from error
        if error.code in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            raise RefusedError(
                f"{base} answers HTTP {error.code}; give a --token-file of the turns' job, or a"
                " certificate"
            ) from error
        raise RefusedError(f"{base} answers HTTP {error.code}; is it a rose gateway?") from error
    except (OSError, *BAD_BYTES, http.client.HTTPException) as error:
        raise UnavailableError(
            f"no gateway answers at {base} ({error}); start one, or give --gateway"
        ) from error
