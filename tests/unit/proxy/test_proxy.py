"""The proxy beside a node: what passes, for whom, and what either side's end does to the other."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

from rose.addresses import free_port
from rose.contract.replica import MAX_IMAGE_BYTES
from rose.errors import ConfigError, UnavailableError
from rose.gateway.backends.http_pool import ClusterTls, Upstream, UpstreamError
from rose.node import NodeConfig
from rose.node.proxy_process import ProxyProcess, proxied_ports, proxy_spec
from rose.process.http_port import RECORDS_A_MINUTE
from rose.proxy import callers
from rose.proxy.main import main, serve
from rose.proxy.requests import MAX_HEAD_BYTES, PassRefusedError, passed
from rose.security import CertificateFiles, Role
from tests.fakes.http_peer import CHUNKED, CLOSING, END, WHOLE, Receiver, ScriptedServer
from tests.harness.certificates import Certificates
from tests.harness.waiting import PATIENCE_S, until_async

GENERATE = "/rose/v1/generate"
PORTS = {b"g0": 7001, b"a/b %": 7002}
LENGTH = (b"content-length", b"2")


# ---- what passes ----


def test_an_engine_gets_a_head_that_was_written_anew() -> None:
    said = [
        (b"content-type", b"application/json"),
        (b"traceparent", b"00-1-2-01"),
        (b"authorization", b"Bearer secret"),
        (b"connection", b"close"),
        (b"host", b"node:7410"),
        LENGTH,
    ]
    asked = passed(PORTS, b"POST", b"/g0/rose/v1/generate?x=1", said)
    assert asked.port == 7001
    assert asked.head == (
        b"POST /rose/v1/generate?x=1 HTTP/1.1\r\nhost: 127.0.0.1:7001\r\n"
        b"content-type: application/json\r\ntraceparent: 00-1-2-01\r\ncontent-length: 2\r\n\r\n"
    )
    assert passed(PORTS, b"POST", b"/a%2Fb%20%25/score", [LENGTH]).port == 7002


@pytest.mark.parametrize(
    ("method", "target"),
    [
        (b"POST", b"/g1/rose/v1/generate"),
        (b"POST", b"/rose/v1/generate"),
        (b"POST", b"http://x/g0/rose/v1/generate"),
        (b"GET", b"/g0/rose/v1/generate"),
        (b"POST", b"/g0/rose/v1/admit"),
        (b"POST", b"/g0/rose/v1/weights/apply"),
        (b"POST", b"/g0/sleep"),
        (b"POST", b"/g0/v1/completions"),
        (b"GET", b"/g0/metrics"),
        (b"POST", b"/g0//rose/v1/generate"),
        (b"POST", b"/g0/rose/v1/generate/../admit"),
        (b"POST", b"/g0/rose/v1/generat%65"),
        (b"POST", b""),
    ],
)
def test_nothing_but_turns_of_its_replicas_passes(method: bytes, target: bytes) -> None:
    with pytest.raises(PassRefusedError) as refused:
        passed(PORTS, method, target, [LENGTH])
    assert refused.value.status == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 411),
        ([LENGTH, LENGTH], 411),
        ([LENGTH, (b"transfer-encoding", b"chunked")], 411),
        ([(b"content-length", b"-1")], 400),
        ([(b"content-length", b"+2")], 400),
        ([(b"content-length", b"9" * 9_000)], 413),
        ([(b"content-length", b"4194305")], 413),
        ([LENGTH, (b"upgrade", b"websocket")], 400),
    ],
)
def test_where_a_body_ends_is_never_a_matter_of_opinion(
    headers: list[tuple[bytes, bytes]], status: int
) -> None:
    with pytest.raises(PassRefusedError) as refused:
        passed(PORTS, b"POST", b"/g0/score", headers)
    assert refused.value.status == status
    assert refused.value.answer.startswith(b"HTTP/1.1 %d " % status)


def test_a_file_of_an_image_may_be_larger_than_a_turn() -> None:
    large = (b"content-length", b"%d" % MAX_IMAGE_BYTES)
    assert passed(PORTS, b"POST", b"/g0/rose/v1/images", [large]).head.startswith(b"POST /rose/v1/")
    with pytest.raises(PassRefusedError, match=str(MAX_IMAGE_BYTES)):
        passed(PORTS, b"POST", b"/g0/rose/v1/images", [(b"content-length", b"16777217")])


# ---- on sockets ----


class ProxyBench:
    """One proxy before one engine."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def start(
        self, engine: ScriptedServer, files: CertificateFiles | None = None
    ) -> "ProxyBench":
        await self._stack.enter_async_context(engine)
        server, self.door = await serve("127.0.0.1", 0, {"g0": engine.port, "gone": 1}, files)
        self.port = server.sockets[0].getsockname()[1]
        self.url = f"{'https' if files else 'http'}://127.0.0.1:{self.port}/g0{GENERATE}"
        for each in (server.close, self.door.close):
            self._stack.callback(each)
        return self

    def upstream(self, tls: ClusterTls | None = None) -> Upstream:
        made = Upstream(tls)
        self._stack.callback(made.close)
        return made

    async def ask(self, upstream: Upstream, url: str = "", body: bytes = b"{}") -> Receiver:
        heard = Receiver()
        await upstream.post(url or self.url, body, heard)
        return await heard.over()

    async def raw(self, sent: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(sent)
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await reader.read()
            except ConnectionError:
                return b""
            finally:
                writer.close()


@pytest.fixture
async def bench() -> AsyncIterator[ProxyBench]:
    async with AsyncExitStack() as stack:
        yield ProxyBench(stack)


async def test_an_answer_comes_as_it_was_and_both_connections_are_used_again(
    bench: ProxyBench,
) -> None:
    streamed = [CHUNKED + b"2\r\nab\r\n", b"1\r\nc\r", b"\n" + END]
    engine = ScriptedServer(streamed, [WHOLE], [WHOLE])
    await bench.start(engine)
    upstream = bench.upstream()
    answers = [await bench.ask(upstream, body=body) for body in (b"{}", b"x" * 300_000, b"")]
    assert [each.text for each in answers] == [b"abc", b"hi", b"hi"], [e.ends for e in answers]
    assert engine.requests[1].endswith(b"x" * 300_000)
    assert (engine.connections, len(bench.door.connections)) == (1, 1)


async def test_who_hangs_up_ends_the_turn_on_the_other_side(bench: ProxyBench) -> None:
    engine = ScriptedServer([CHUNKED + b"2\r\nab\r\n"], [b""], [CHUNKED + b"2\r\nab"])
    engine.answers.append([b""])
    await bench.start(engine)
    upstream, heard = bench.upstream(), Receiver()
    connection = await upstream.post(bench.url, b"{}", heard)
    await until_async(lambda: heard.text, PATIENCE_S, "a piece")
    connection.leave(heard)
    await until_async(lambda: engine.hung_up, PATIENCE_S, "the engine's end")
    lost = await bench.ask(upstream)
    assert isinstance(lost.ends[-1], ConnectionError), (
        "an engine that ends says nothing in its place"
    )
    assert lost.code == 0
    assert not bench.door.connections


@pytest.mark.parametrize("bytes_sent", [2, 4 << 20])
async def test_an_engine_that_is_not_there_is_told_of_whatever_is_sent(
    bench: ProxyBench, bytes_sent: int
) -> None:
    await bench.start(ScriptedServer())
    url, upstream = bench.url.replace("g0", "gone"), bench.upstream()
    for _ in range(3):
        heard = await bench.ask(upstream, url, b"x" * bytes_sent)
        assert (heard.code, heard.ends) == (503, [None])
        assert b'"unavailable"' in heard.text


async def test_an_engine_that_closes_after_an_answer_is_asked_anew(bench: ProxyBench) -> None:
    engine = ScriptedServer([CLOSING], [WHOLE], [WHOLE])
    await bench.start(engine)
    upstream = bench.upstream()
    for _ in range(3):
        assert (await bench.ask(upstream)).text == b"hi"
    assert engine.connections == 2


async def test_a_connection_that_its_engine_may_be_closing_is_not_used(
    bench: ProxyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedServer([WHOLE], [WHOLE])
    await bench.start(engine)
    monkeypatch.setattr(callers.EngineConnection, "idle_s", 0.0)
    upstream = bench.upstream()
    for _ in range(2):
        assert (await bench.ask(upstream)).text == b"hi"
    assert engine.connections == 2


HEAD = b"POST /g0/score HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /g0/metrics HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /g0/score HTTP/1.1\r\nX: " + b"y" * MAX_HEAD_BYTES, b"431"),
        (HEAD.replace(b"Content", b"Upgrade: h2c\r\nConnection: upgrade\r\nContent"), b"400"),
        (b"CONNECT g0:1 HTTP/1.1\r\n\r\n", b"404"),
    ],
)
async def test_what_does_not_pass_reaches_no_engine(
    bench: ProxyBench, sent: bytes, status: bytes
) -> None:
    engine = ScriptedServer()
    await bench.start(engine)
    assert (await bench.raw(sent)).startswith(b"HTTP/1.1 " + status)
    assert engine.connections == 0


async def test_a_second_request_before_the_answer_ends_both(bench: ProxyBench) -> None:
    engine = ScriptedServer([WHOLE], [WHOLE])
    await bench.start(engine)
    assert b"hi" not in await bench.raw(HEAD + HEAD)
    assert len(engine.requests) <= 1


async def test_who_takes_too_long_is_closed(
    bench: ProxyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "HEAD_S", 0.01)
    monkeypatch.setattr(callers, "BODY_S", 0.01)
    await bench.start(ScriptedServer())
    for begun in (b"", b"POST /g0/sc", HEAD[:-1]):
        assert await bench.raw(begun) == b""


async def test_beyond_the_limit_newcomers_are_closed(bench: ProxyBench) -> None:
    engine = ScriptedServer([WHOLE])
    await bench.start(engine)
    bench.door.connections.capacity = 1
    assert (await bench.ask(bench.upstream())).code == 200
    assert await bench.raw(HEAD) == b""


async def test_a_slow_reader_holds_its_engine_up_and_nothing_piles_up(bench: ProxyBench) -> None:
    sent = 0

    async def flood(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(CHUNKED)
        block = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        for _ in range(400):
            writer.write(block)
            await writer.drain()
            sent += 1

    await bench.start(ScriptedServer(flood))
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.port, limit=1 << 10)
    writer.write(HEAD)
    await reader.readexactly(1)
    seen = -1
    async with asyncio.timeout(PATIENCE_S):
        while sent != seen:
            seen = sent
            await asyncio.sleep(0.05)
    assert sent < 300, "26 MB did not find a place in between"
    writer.close()


# ---- who may ----


@pytest.fixture
def cluster(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


async def test_gateways_of_the_cluster_come_in_and_nobody_else_does(
    bench: ProxyBench, cluster: Certificates, tmp_path: Path
) -> None:
    engine = ScriptedServer([WHOLE], [WHOLE])
    await bench.start(engine, cluster.of(Role.NODE, "n0"))

    def of(role: Role) -> Upstream:
        return bench.upstream(ClusterTls(cluster.of(role, "x")))

    gateway = of(Role.GATEWAY)
    assert [(await bench.ask(gateway)).text for _ in range(2)] == [b"hi", b"hi"]
    assert len(bench.door.connections) == 1, "one handshake"
    trainer = await bench.ask(of(Role.TRAINER))
    assert (trainer.code, b"gateways do" in trainer.text) == (403, True)
    stranger = Certificates(tmp_path / "other").of(Role.GATEWAY, "x")
    for tls in (ClusterTls(stranger), None):
        with pytest.raises(UpstreamError, match="not proved"):
            await bench.ask(bench.upstream(tls))
    bench.door.wall_s = lambda: 1e12
    assert (await bench.ask(gateway)).code == 403, "a connection lasts as long as its certificate"
    assert len(engine.requests) == 2


async def test_a_gateway_believes_nodes_alone(bench: ProxyBench, cluster: Certificates) -> None:
    await bench.start(ScriptedServer(), cluster.of(Role.NODE, "n0"))
    files = cluster.of(Role.RELAY, "r0")

    loop = asyncio.get_running_loop()
    posing = await loop.create_server(
        lambda: callers.CallerConnection(bench.door), "127.0.0.1", 0, ssl=files.server_context()
    )
    url = f"https://127.0.0.1:{posing.sockets[0].getsockname()[1]}/g0{GENERATE}"
    with pytest.raises(UpstreamError, match=r"node\.prod\.rose\.internal"):
        await bench.ask(bench.upstream(ClusterTls(cluster.of(Role.GATEWAY, "g"))), url)
    posing.close()


async def test_it_serves_others_with_certificates_or_when_told_so(cluster: Certificates) -> None:
    with pytest.raises(ConfigError, match="send turns to every replica"):
        await serve("0.0.0.0", 0, {}, None)
    with pytest.raises(ConfigError, match="role node"):
        await serve("127.0.0.1", 0, {}, cluster.of(Role.GATEWAY, "g"))


@pytest.mark.parametrize("said", ["7001", "x=g0", "7001="])
def test_a_replica_that_is_none_is_named(
    said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.nice", lambda by: by)
    assert main(["--host=127.0.0.1", "--port=1", f"--replica={said}"]) == 2
    assert "PORT=NAME" in capsys.readouterr().err


async def test_refusals_are_logged_a_few_times_a_minute(
    bench: ProxyBench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.start(ScriptedServer())
    for _ in range(100):
        bench.door.on_refused("10.0.0.1", "why")
    assert len(caplog.records) <= RECORDS_A_MINUTE


# ---- its process beside a daemon ----


def node(folder: Path, port: int, **more: object) -> NodeConfig:
    replica = {"id": "d=0", "kind": "dedicated", "model_dir": "m", "port": 9_000}
    said = {
        "node": "n0",
        "scheduler": "127.0.0.1:1",
        "run_dir": folder,
        "log_dir": folder,
        "unsigned": True,
        "replicas": [replica],
        "proxy": {"host": "127.0.0.1", "port": port},
    }
    return NodeConfig.model_validate(said | more)


async def test_it_says_when_it_listens_and_its_death_is_an_error_with_its_last_words(
    tmp_path: Path,
) -> None:
    said: list[bool] = []
    proxy = ProxyProcess(node(tmp_path, free_port()), lambda: said.append(True))
    running = asyncio.create_task(proxy.run())
    await until_async(lambda: said, PATIENCE_S, "the proxy listens")
    assert proxy.listens
    children = psutil.Process().children()
    [process] = [each for each in children if "rose.proxy.main" in each.cmdline()]
    assert process.nice() >= 5, "behind the guard"
    await until_async(proxy.log.read_text, PATIENCE_S, "its first line is written")
    process.kill()
    with pytest.raises(UnavailableError, match="listening on 127"):
        await running
    assert not proxy.listens
    assert len(said) == 2
    assert not process.is_running()


def test_names_ports_and_certificates_reach_its_command_line(tmp_path: Path) -> None:
    files = Certificates(tmp_path).of(Role.NODE, "n0")
    paths = dict(zip(("ca", "certificate", "key"), map(str, files.paths), strict=True))
    config = node(tmp_path, 7_410, certificates=paths)
    assert proxied_ports(config) == {"d=0": 9_000}
    argv = proxy_spec(config).argv
    assert "--replica=9000=d=0" in argv
    assert f"--key={paths['key']}" in argv
    assert "--insecure" not in argv
