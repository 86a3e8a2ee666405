"""Every port of ROSE answers its operator while connections that bring nothing are open to it.

Each program is a process of its own with few descriptors, and gets more connections than it has;
`nightly` opens 10,000 to a program that has as many descriptors as this machine allows.
"""

import asyncio
import contextlib
import functools
import os
import resource
import socket
import ssl
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from rose.addresses import free_port
from rose.process import http_port
from rose.process.http_port import SPARE_DESCRIPTORS
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_channel
from rose.rpc.rose_pb2_grpc import SchedulerStub
from rose.security import CertificateFiles, Role
from tests.harness.certificates import Certificates
from tests.harness.processes import Forked
from tests.harness.waiting import PATIENCE_S, until_async
from tests.unit.node.node_bench import NodeBench

DESCRIPTORS: Final = 512
CONNECTIONS: Final = 700
MANY_CONNECTIONS: Final = 10_000
ANSWER_S: Final = 5.0
TRY_S: Final = 1.5
MOST_LOG_BYTES: Final = 16 << 10
TURN: Final = (
    b"POST /g0/rose/v1/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
    b"Connection: close\r\n\r\n{}"
)


@dataclass
class Program:
    """A program's process, the ports that it serves, and the certificate of its operator."""

    process: Forked
    log: Path
    ports: dict[str, int]
    operator: CertificateFiles | None
    descriptors: int

    @property
    def tls(self) -> ssl.SSLContext | None:
        if self.operator is None:
            return None
        context = ssl.create_default_context(cafile=self.operator.paths[0])
        context.check_hostname = False
        context.load_cert_chain(self.operator.paths[1], self.operator.paths[2])
        return context


Programs = Callable[[str, bool, int], Program]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    folder = tmp_path_factory.mktemp("programs")
    issued = Certificates(folder)

    @functools.cache
    def started(name: str, tls: bool, descriptors: int) -> Program:
        """A program with a limit of descriptors, started when a test first asks for it."""
        own_folder = folder / f"{name}-{tls}-{descriptors}"
        own_folder.mkdir()
        role, own, caller = ROLES[name]
        argv = [str(own_folder)]
        if tls:
            paths = zip(("ca", "certificate", "key"), issued.of(role, own).paths, strict=True)
            argv += [f"--{option}={path}" for option, path in paths]
        ports = {port.name: free_port() for port in PORTS if port.program == name}
        argv += [f"{port}={number}" for port, number in ports.items()]
        log = own_folder / "stderr"
        process = Forked(__file__, str(descriptors), name, *argv, stderr=log)
        stack.callback(process.end)
        operator = issued.of(caller, f"operator-{name}") if tls else None
        return Program(process, log, ports, operator, descriptors)

    with contextlib.ExitStack() as stack:
        yield started
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def ask_http(program: Program, port: int, request: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=program.tls)
    try:
        writer.write(request)
        line = await reader.readline()
        if b" 200 " not in line:
            raise ConnectionError(line)
    finally:
        writer.transport.abort()


def get(path: str) -> Callable[[Program, int], Awaitable[None]]:
    """Return the operator's request for a path."""
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    return lambda program, port: ask_http(program, port, request)


async def ask_turn(program: Program, port: int) -> None:
    await ask_http(program, port, TURN)


async def ask_rpc(program: Program, port: int) -> None:
    async with make_channel(f"127.0.0.1:{port}", program.operator) as channel:
        await SchedulerStub(channel).Snapshot(pb.SnapshotRequest(), timeout=TRY_S)


async def answered(program: Program, port: "Port", limit_s: float) -> None:
    """Wait until the operator's request is answered; it is made again if refused."""
    began_s, failure = time.monotonic(), "nothing"
    while (left_s := began_s + limit_s - time.monotonic()) > 0:
        assert program.process.poll() is None, program.log.read_text()
        try:
            async with asyncio.timeout(min(TRY_S, left_s)):
                await port.ask(program, program.ports[port.name])
            return
        except Exception as error:
            failure = repr(error)[:200]
            await asyncio.sleep(0.05)
    raise AssertionError(f"{port.name}: no answer within {limit_s} s: {failure}")


@dataclass(frozen=True)
class Port:
    """A port of a program, and its operator's request."""

    program: str
    name: str
    ask: Callable[[Program, int], Awaitable[None]]
    tls: tuple[bool, ...] = (False, True)


# Own role and name, and the role of the operator, of each program with certificates.
ROLES: Final = {
    "scheduler": (Role.SCHEDULER, "s0", Role.OPERATOR),
    "gateway": (Role.GATEWAY, "g", Role.OPERATOR),
    "front": (Role.TRAINER, "job", Role.OPERATOR),
    "publisher": (Role.TRAINER, "job", Role.NODE),
    "proxy": (Role.NODE, "n0", Role.GATEWAY),
}
PORTS: Final = (
    Port("scheduler", "grpc", ask_rpc),
    Port("scheduler", "metrics", get("/metrics")),
    Port("scheduler", "dashboard", get("/"), (False,)),
    Port("gateway", "gateway", get("/rose/v1/stats")),
    Port("front", "front", get("/is_paused"), (False,)),
    Port("publisher", "versions", get("/catalog")),
    Port("proxy", "proxy", ask_turn),
)
CASES: Final = [
    pytest.param(port, tls, id=f"{port.program}-{port.name}-{'tls' if tls else 'plain'}")
    for port in PORTS
    for tls in port.tls
]


@contextlib.asynccontextmanager
async def idle(port: int, count: int) -> AsyncIterator[None]:
    """Connections that bring nothing."""
    with contextlib.ExitStack() as stack:
        for number in range(count):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
            if not number % 100:
                await asyncio.sleep(0.01)
        yield


async def check(program: Program, port: Port, count: int) -> None:
    await answered(program, port, PATIENCE_S)
    log_bytes = program.log.stat().st_size
    async with idle(program.ports[port.name], count):
        others = [each for each in PORTS if each.program == port.program]
        for each in sorted(others, key=lambda each: each is not port):
            if bool(program.operator) in each.tls:
                await answered(program, each, ANSWER_S)
        assert program.process.poll() is None
        descriptors = len(os.listdir(f"/proc/{program.process.pid}/fd"))
        assert descriptors <= program.descriptors - SPARE_DESCRIPTORS // 2
    written = program.log.read_bytes()[log_bytes:]
    assert len(written) < MOST_LOG_BYTES, written[:1_000]


@pytest.mark.parametrize(("port", "tls"), CASES)
async def test_idle_connections_beyond_a_programs_descriptors_keep_no_operator_out(
    port: Port, tls: bool, programs: Programs
) -> None:
    await check(programs(port.program, tls, DESCRIPTORS), port, CONNECTIONS)


@pytest.mark.nightly
@pytest.mark.parametrize(("port", "tls"), CASES)
async def test_ten_thousand_idle_connections_keep_no_operator_out(
    port: Port, tls: bool, programs: Programs
) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    count = min(MANY_CONNECTIONS, hard - DESCRIPTORS)
    await check(programs(port.program, tls, hard), port, count)


async def test_a_node_without_descriptors_goes_on_guarding(tmp_path: Path) -> None:
    """The limit falls below what the node counted on, so that accepting fails for want of one."""
    bench = NodeBench(tmp_path, "guest")
    await bench.start()
    try:
        daemon = bench.spawn()
        await bench.until("leased", lambda replica: replica.healthy and replica.leased)
        open_now = len(os.listdir(f"/proc/{daemon.pid}/fd"))
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (open_now + 50, open_now + 50))
        log_bytes = (tmp_path / "daemon.log").stat().st_size
        grant = bench.page.grant

        def beats_after(heartbeat_ns: int) -> bool:
            now = grant.peek()
            return now is not None and now.heartbeat_ns > heartbeat_ns

        async with idle(bench.settings["metrics_port"], 4 * SPARE_DESCRIPTORS):
            for _ in range(5):
                before = grant.peek()
                assert before is not None
                beat = functools.partial(beats_after, before.heartbeat_ns)
                await until_async(beat, PATIENCE_S, "a heartbeat of the grant", every_s=0.05)
            assert daemon.poll() is None
        program = Program(daemon, tmp_path / "daemon.log", bench.settings, None, 0)
        await answered(program, Port("node", "metrics_port", get("/metrics")), ANSWER_S)
        written = program.log.read_bytes()[log_bytes:]
        assert len(written) < MOST_LOG_BYTES, written[:1_000]
    finally:
        await bench.close()


# ---- programs, in processes of their own ----


def scheduler(folder: str, *options: str, grpc: str, metrics: str, dashboard: str) -> None:
    from rose.main.scheduler import main

    argv = ["--store", f"{folder}/store", "--log-dir", folder, *options]
    argv += ["--port", grpc, "--metrics-port", metrics, "--dashboard-port", dashboard]
    sys.exit(main(argv))


def gateway(folder: str, *options: str, gateway: str) -> None:
    from rose.main.gateway import main

    replica = ["--replica", "http://127.0.0.1:1"]
    sys.exit(main(["--port", gateway, "--log-dir", folder, *replica, *options]))


def front(folder: str, *, front: str) -> None:
    from rose.integrations import TrainerSettings
    from rose.integrations.front.checkpoint_folder import WeightRoots
    from rose.integrations.front.settings import FrontSettings
    from rose.main.front import listening
    from tests.unit.front.front_cases import StandInPublisher, save_checkpoint

    async def serve() -> None:
        path = Path(folder)
        model = save_checkpoint(path / "model")
        gateway = "http://127.0.0.1:1"
        trainer = TrainerSettings("job", "127.0.0.1:1", gateway, model, path / "root", path / "key")
        settings = FrontSettings(int(front), trainer, (path,))
        async with listening(settings, StandInPublisher(), WeightRoots((path,))):
            await asyncio.Event().wait()

    asyncio.run(serve())


def publisher(folder: str, *options: str, versions: str) -> None:
    from rose.weight_distribution.credentials import Credentials
    from rose.weight_distribution.version_server import VersionServer
    from weight_transfer import ChunkStore, SigningKey
    from weight_transfer.serve import Signer

    async def serve() -> None:
        files = {
            name: Path(path) for name, _, path in (each[2:].partition("=") for each in options)
        }
        credentials = Credentials("", files.get("ca"), files.get("certificate"), files.get("key"))
        signer = Signer("job", SigningKey.generate())
        store = ChunkStore(Path(folder, "chunks"))
        server = VersionServer(store, int(versions), credentials=credentials, signer=signer)
        await server.start()
        await asyncio.Event().wait()

    asyncio.run(serve())


def proxy(folder: str, *options: str, proxy: str) -> None:
    from rose.proxy import main as program

    # Behind nothing, so that other tests beside this one do not count.
    program.NICENESS = 0  # type: ignore[misc]
    listening = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=engine, args=(listening,), daemon=True).start()
    replica = f"--replica={listening.getsockname()[1]}=g0"
    sys.exit(program.main(["--host", "127.0.0.1", "--port", proxy, replica, *options]))


def engine(listening: socket.socket) -> None:
    while True:
        with listening.accept()[0] as connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")


def main(descriptors: str, name: str, *argv: str) -> None:
    """Run a program with a limit of descriptors."""
    limit = int(descriptors)
    if limit == DESCRIPTORS:
        # Programs of short tests wait for less before they close a connection for another's sake.
        http_port.HEAD_GRACE_S = 0.2
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, 1_024), limit))
    plain = [each for each in argv if each.startswith(("-", "/"))]
    ports = dict(each.split("=") for each in argv if not each.startswith(("-", "/")))
    globals()[name](*plain, **ports)


if __name__ == "__main__":
    main(*sys.argv[1:])
