"""The cluster's token goes to those who were meant, whatever address others announce."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import web
from test_credentials import Authority, fetch, published
from yarl import URL

from rose.errors import ConfigError
from rose.weight_distribution import Credentials, Relay, VersionServer
from rose.weight_distribution.credentials import OriginRefused
from rose.weight_distribution.relay import FollowedJob
from weight_transfer import ChunkStore
from weight_transfer.fetch import ChunkFetcher, DownloadLimits, PublisherClient, fetch_version
from weight_transfer.fetch.limits import Caps

TOKEN = "s3cret"


class Listener:
    """Somebody else's server: remembers what callers showed, sends them on where it was told."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.shown: list[str | None] = []
        self.sends_to = ""
        self._port = port
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()

    async def stop(self) -> None:
        assert self._runner
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        self.shown.append(request.headers.get("Authorization"))
        if self.sends_to:
            raise web.HTTPFound(self.sends_to)
        return web.Response(status=404)


@pytest.fixture
async def listeners(
    unused_tcp_port_factory: Callable[[], int],
) -> AsyncIterator[tuple[Listener, Listener]]:
    two = Listener(unused_tcp_port_factory()), Listener(unused_tcp_port_factory())
    for listener in two:
        await listener.start()
    yield two
    for listener in two:
        await listener.stop()


async def ask_everything(folder: Path, credentials: Credentials, url: str, relay: str) -> None:
    """All that a node asks of an announced publisher and of a relay that was named to it."""
    async with credentials.session() as session:
        fetcher = ChunkFetcher(session, DownloadLimits(ChunkStore(folder), Caps()), "", [relay])
        reader = PublisherClient(session, "node")
        async with reader.lease(url, "r0", 1):
            calls = (
                reader.catalog(url, "job"),
                fetch_version(fetcher, url, "job", 1, None, lambda _: None, set()),
                session.get(f"{relay}/chunks/{'ab' * 32}"),
            )
            await asyncio.gather(*calls, return_exceptions=True)
        fetcher.receiving.close()


async def test_an_announced_address_is_shown_no_token(
    tmp_path: Path, listeners: tuple[Listener, Listener]
) -> None:
    publisher, relay = listeners
    elsewhere = Credentials(TOKEN, origins=frozenset({"http://127.0.0.1:9"}))
    await ask_everything(tmp_path, elsewhere, publisher.url, relay.url)
    assert publisher.shown
    assert relay.shown
    assert set(publisher.shown + relay.shown) == {None}


async def test_origins_of_the_configuration_are_shown_it(
    tmp_path: Path, listeners: tuple[Listener, Listener]
) -> None:
    publisher, relay = listeners
    named = Credentials(TOKEN).naming([publisher.url + "/some/path", "http://other"])
    await ask_everything(tmp_path, named, publisher.url, relay.url)
    assert set(publisher.shown) == {f"Bearer {TOKEN}"}
    assert set(relay.shown) == {None}


async def test_a_redirect_does_not_carry_it(listeners: tuple[Listener, Listener]) -> None:
    """Nothing here follows redirects; should anything ever, the new address decides."""
    known, other = listeners
    known.sends_to = f"{other.url}/x"
    credentials = Credentials(TOKEN, origins=frozenset({known.url}))
    async with credentials.session() as session, session.get(known.url) as response:
        assert response.status == 404
    assert known.shown == [f"Bearer {TOKEN}"]
    assert other.shown == [None]


async def test_with_certificates_it_goes_to_members_and_never_in_the_clear(
    tmp_path: Path, listeners: tuple[Listener, Listener], unused_tcp_port_factory: Callable[[], int]
) -> None:
    authority = Authority(tmp_path / "ours")

    def with_token(one: Credentials) -> Credentials:
        return Credentials(TOKEN, one.ca, one.certificate, one.key)

    node = with_token(authority.issue("node"))
    in_the_clear = listeners[0]
    await ask_everything(tmp_path / "a", node, in_the_clear.url, in_the_clear.url)
    assert in_the_clear.shown == [], "nobody is even asked"
    server = VersionServer(
        published(tmp_path / "o"),
        unused_tcp_port_factory(),
        credentials=with_token(authority.issue("publisher")),
    )
    await server.start()
    try:
        assert await fetch(tmp_path / "b", server.url, node)
    finally:
        await server.close()


@pytest.mark.parametrize(
    ("url", "bears"),
    [
        ("http://10.0.0.7:18700/manifests/1", True),
        ("http://10.0.0.7:18700", True),
        ("http://pub/x", True),
        ("http://PUB:80/x", True),
        ("http://10.0.0.7:18701/manifests/1", False),
        ("https://10.0.0.7:18700/manifests/1", False),
        ("http://10.0.0.7.evil:18700/", False),
        ("http://10.0.0.7:18700@evil/", False),
    ],
)
def test_an_origin_is_scheme_host_and_port(url: str, bears: bool) -> None:
    credentials = Credentials(TOKEN).naming(["http://10.0.0.7:18700/x", "http://pub"])
    assert credentials.bears(URL(url)) is bears
    assert not Credentials("").naming(["http://pub"]).bears(URL("http://pub"))


def test_what_is_no_origin_is_one_line_at_the_start(tmp_path: Path) -> None:
    for bad in ("pub", "ftp://pub", "http://pub/path", "http://" + "a" * 64, "http://a..b"):
        with pytest.raises(ConfigError) as said:
            Credentials(TOKEN, origins=frozenset({bad}))
        assert "\n" not in str(said.value)
    with pytest.raises(ConfigError):
        Relay(
            tmp_path,
            [FollowedJob("job", "http://a..b", None)],
            "127.0.0.1",
            1,
            credentials=Credentials(TOKEN),
        )


def test_with_certificates_nothing_but_https_is_spoken(tmp_path: Path) -> None:
    node = Authority(tmp_path / "ours").issue("node")
    with pytest.raises(OriginRefused, match="only https is spoken"):
        node.bears(URL("http://127.0.0.1:1/x"))
    assert not node.bears(URL("https://127.0.0.1:1/x")), "there is no token to show"
