"""The scheduler's process: options, port, store, signals."""

import asyncio
import contextlib
import fcntl
import logging
import math
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from elastic_scheduler import HarvestMode, make_policy, policy_names
from rose.addresses import check_exposure
from rose.cli.main import Parser, add_log_limits, taken_log_limits
from rose.errors import ConfigError, RoseError
from rose.logs.eventlog import Logs
from rose.logs.rotating_jsonl import BOUNDED, LogLimits, log_to_stderr
from rose.process.background_tasks import Background
from rose.rpc.channel import make_server
from rose.rpc.rose_pb2_grpc import add_SchedulerServicer_to_server
from rose.scheduler.core import SchedulerCore
from rose.scheduler.leasing import LeaseTimes
from rose.scheduler.persistence import load
from rose.scheduler.service import SchedulerService
from rose.scheduler.store import SqliteStore
from rose.security.audit_log import AuditLog, audit_file
from rose.security.certificates import (
    CertificateFiles,
    add_certificate_options,
    taken_certificates,
)
from rose.security.roles import Role
from rose.security.rpc_access import AccessInterceptor

DEFAULT_PORT = 7400
STOP_GRACE_S = 0.5


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Settings of one scheduler process."""

    host: str
    port: int
    store: Path
    log_dir: Path
    harvest: HarvestMode
    cooldown_s: float
    policy: str = "rose"
    log_limits: LogLimits = BOUNDED
    insecure: bool = False
    certificates: CertificateFiles | None = None

    def __post_init__(self) -> None:
        if self.certificates is None:
            what = "lease every replica, announce weights and see every prompt"
            check_exposure(self.host, self.insecure, what)
        else:
            self.certificates.insist(Role.SCHEDULER)
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port {self.port} does not exist; give --port 1 to 65535")
        if not (math.isfinite(self.cooldown_s) and self.cooldown_s >= 0):
            raise ConfigError(f"a pause of {self.cooldown_s} s is none; give --cooldown-s >= 0")


def settings_of(argv: Sequence[str]) -> SchedulerSettings:
    """Parse options. Raises `ConfigError` for those that cannot be."""
    parser = Parser(prog="rose scheduler", description="Lease offered capacity to the job.")
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to bind (default: loopback only)")
    add("--port", type=int, default=DEFAULT_PORT, metavar="N", help=f"default {DEFAULT_PORT}")
    add("--store", type=Path, required=True, metavar="FILE", help="SQLite file, made if missing")
    add("--log-dir", type=Path, required=True, metavar="DIR", help="where events go")
    add_log_limits(parser)
    add(
        "--harvest",
        type=str.upper,
        default="OFF",
        choices=[mode.name for mode in HarvestMode],
        help="mode of a store in which no operator has set one (default OFF)",
    )
    add(
        "--cooldown-s",
        type=float,
        default=LeaseTimes().cooldown_s,
        metavar="S",
        help="pause between a revocation and the next lease of the replica",
    )
    add(
        "--policy",
        default="rose",
        choices=policy_names(),
        help="which offers are leased (default rose: by net benefit)",
    )
    add(
        "--insecure",
        action="store_true",
        help="serve an address of the network, though nobody is asked who he is",
    )
    add_certificate_options(parser)
    args = parser.parse_args(argv)
    return SchedulerSettings(
        args.host,
        args.port,
        args.store,
        args.log_dir,
        HarvestMode[args.harvest],
        args.cooldown_s,
        args.policy,
        taken_log_limits(vars(args)),
        args.insecure,
        taken_certificates(vars(args)),
    )


async def serve(settings: SchedulerSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set. Raises `RoseError` when it cannot begin."""
    with _only_owner(settings.store), contextlib.ExitStack() as stack:
        store = SqliteStore(settings.store)
        stack.callback(store.close)
        logs = Logs(settings.log_dir, settings.log_limits)
        stack.callback(logs.close)
        events = logs.events("scheduler")
        audit = AuditLog(audit_file(settings.log_dir, "scheduler"), "scheduler")
        stack.callback(audit.close)
        times = LeaseTimes(cooldown_s=settings.cooldown_s)
        core = SchedulerCore(load(store), settings.harvest, times, make_policy(settings.policy))
        background = Background(events.write)
        certificates = settings.certificates
        expiry = certificates.troubles if certificates else list[str]
        service = SchedulerService(
            core,
            store,
            events,
            lambda: [*background.troubles(), *logs.troubles(), *expiry(), *audit.troubles()],
            audit=audit.write,
        )
        server = make_server(_access(settings, service))
        add_SchedulerServicer_to_server(service, server)
        port = _bind(server, settings)
        await server.start()
        events.write("scheduler_started", port=port)
        audit.write("scheduler_started", {"port": port, "policy": settings.policy})
        try:
            await _until_stopped(background, service, stop)
        finally:
            service.close()
            await server.stop(STOP_GRACE_S)
            events.write("scheduler_stopped")
            audit.write("scheduler_stopped", {})


async def _until_stopped(
    background: Background, service: SchedulerService, stop: asyncio.Event
) -> None:
    background.start("tick", service.tick)
    failed = asyncio.create_task(background.failed())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([failed, stopping], return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
    finally:
        failed.cancel()
        stopping.cancel()
        await background.close()


def _access(settings: SchedulerSettings, service: SchedulerService) -> AccessInterceptor | None:
    if settings.certificates is None:
        return None
    return AccessInterceptor(settings.certificates.identity.cluster, service.refused)


def _bind(server: grpc.aio.Server, settings: SchedulerSettings) -> int:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"{host}:{settings.port}"
    try:
        # Asked of the kernel first: gRPC prints lines of its own when it cannot bind.
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        socket.create_server((settings.host, settings.port), family=family).close()
        port: int = (
            server.add_secure_port(address, settings.certificates.server_credentials())
            if settings.certificates
            else server.add_insecure_port(address)
        )
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"{address} cannot be bound ({error}); free the port or give another --port"
        ) from error
    return port


@contextlib.contextmanager
def _only_owner(store: Path) -> Iterator[None]:
    """Two schedulers on one store would hand out the same epochs: the second is refused."""
    path = store.with_name(store.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise ConfigError(
            f"store {store} cannot be made ({error}); give a path that can be written"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"store {store} belongs to a running scheduler; stop it or give another --store"
            ) from error
        yield


async def _run(settings: SchedulerSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(settings, stop)


def main(argv: Sequence[str]) -> int:
    """Run a scheduler; 0 after SIGTERM or SIGINT, 2 with one line for what cannot be."""
    log_to_stderr(logging.WARNING)
    try:
        asyncio.run(_run(settings_of(argv)))
    except RoseError as error:
        sys.stderr.write(f"rose scheduler: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
