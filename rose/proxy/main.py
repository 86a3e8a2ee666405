"""The proxy's process: `python -m rose.proxy.main`, started by its node's daemon.

Its command line configures it; it has no state, calls nothing but engines and writes only to
standard error. When it ends, its turns end, and their gateways send them elsewhere.
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import uvloop

from rose.addresses import bound, check_exposure, host_port
from rose.errors import ConfigError, RoseError
from rose.logs.process_log import start_logging
from rose.process.background_tasks import stop_signalled
from rose.process.http_port import FewRecords, Listener, raise_descriptor_limit
from rose.proxy.callers import CallerConnection, Door
from rose.security.certificates import CertificateFiles, add_certificate_options, taken_certificates
from rose.security.roles import Role

# Niceness of the proxy, which runs behind the daemon and its guard on a machine with few cores.
NICENESS: Final = 5
EXIT_BAD_INPUT: Final = 2
_logger = logging.getLogger("rose.proxy")
_logger.addFilter(FewRecords())


async def serve(
    host: str,
    port: int,
    ports: Mapping[str, int],
    certificates: CertificateFiles | None,
    *,
    insecure: bool = False,
) -> tuple[Listener, Door]:
    """Start to listen, and return the listener and the callers' shared state; close both in the
    end. Raises ConfigError if it cannot listen.

    ports: port of each engine by its replica's name. insecure: True allows other machines without
    certificates.
    """
    if certificates is None:
        check_exposure(host, insecure, "send turns to every replica of this node")
    own = certificates.insist(Role.NODE) if certificates else None
    by_name = {name.encode(): at for name, at in ports.items()}
    door = Door(by_name, own, time.time, partial(_logger.warning, "refused %s: %s"))
    tls = certificates.server_context() if certificates else None
    listener = Listener(lambda: CallerConnection(door), door.connections, tls)
    try:
        await bound(lambda: listener.bind(host, port))
    except OSError as error:
        raise ConfigError(
            f"proxy: {host_port(host, port)} cannot be served: {error.strerror}"
        ) from error
    return listener, door


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM and return the exit code: 0, or 2 after one line about bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m rose.proxy.main", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--replica", action="append", default=[], metavar="PORT=NAME", help="an engine here"
    )
    parser.add_argument("--insecure", action="store_true")
    add_certificate_options(parser)
    options = vars(parser.parse_args(argv))
    # Standard output is the daemon's, which waits there for one line.
    start_logging("proxy", ["--log-format", "text"])
    os.nice(NICENESS)
    raise_descriptor_limit()
    try:
        ports = dict(_replica(said) for said in options["replica"])
        uvloop.run(
            _run(
                options["host"],
                options["port"],
                ports,
                taken_certificates(options),
                insecure=options["insecure"],
            )
        )
    except RoseError as error:
        sys.stderr.write(f"rose node proxy: {error}\n")
        return EXIT_BAD_INPUT
    return 0


async def _run(
    host: str,
    port: int,
    ports: Mapping[str, int],
    certificates: CertificateFiles | None,
    *,
    insecure: bool,
) -> None:
    stop = stop_signalled()
    server, door = await serve(host, port, ports, certificates, insecure=insecure)
    _logger.info("listening on %s:%d for %s", host, port, ", ".join(ports) or "no replica")
    # The daemon waits for this line.
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    await stop.wait()
    server.close()
    door.close()


def _replica(said: str) -> tuple[str, int]:
    """Return (name, port) of a `PORT=NAME` option. Raises ConfigError. The port comes first, since
    a name may hold anything.
    """
    port, mark, name = said.partition("=")
    if not (mark and name and port.isdigit()):
        raise ConfigError(f"--replica {said!r}: write PORT=NAME")
    return name, int(port)


if __name__ == "__main__":
    sys.exit(main())
