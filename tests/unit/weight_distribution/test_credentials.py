"""Both sides of a weight connection prove who they are; the token goes to those who were meant."""

import asyncio
import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from yarl import URL

from rose.addresses import free_port
from rose.errors import ConfigError
from rose.security import Role, development_ca
from rose.security.development_ca import DevelopmentCa
from rose.security.roles import WEIGHT_READERS
from rose.weight_distribution import Credentials, Relay, VersionServer
from rose.weight_distribution.credentials import OriginRefused
from rose.weight_distribution.relay import FollowedJob
from tests.harness.certificates import Certificates
from tests.harness.web_server import served
from tests.harness.weight_peers import KEY, fetched, published, reading, serving
from weight_transfer import ChunkStore
from weight_transfer.errors import FetchError
from weight_transfer.fetch import PublisherClient

TOKEN = "s3cret"


class Authority:
    """A development CA, of which certificates for 127.0.0.1 name no role."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ca = DevelopmentCa.make(folder, folder.name)
        self.ca = self._ca.file

    def issue(self, name: str, ca: Path | None = None) -> Credentials:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        signed = (
            development_ca._builder(
                subject, self._ca._certificate.subject, key.public_key(), 3_600.0
            )
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .sign(self._ca._key, hashes.SHA256())
        )
        certificate, own_key = (self._folder / f"{name}.{kind}" for kind in ("pem", "key"))
        certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        own_key.write_bytes(development_ca._pem_of(key))
        return Credentials("", ca or self.ca, certificate, own_key)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def store(tmp_path: Path) -> ChunkStore:
    return published(tmp_path / "origin")[0]


async def fetch(folder: Path, url: str, credentials: Credentials, *members: str) -> int:
    async with reading(folder, members, credentials=credentials) as fetcher:
        return (await fetched(fetcher, url)).wire_bytes


async def test_weights_pass_from_publisher_to_relay_to_node_between_known_sides_only(
    tmp_path: Path, authority: Authority, store: ChunkStore
) -> None:
    async with (
        serving(store, credentials=authority.issue("publisher")) as server,
        Relay(
            tmp_path / "relay",
            [FollowedJob("job", server.url, KEY.verify_key)],
            "127.0.0.1",
            free_port(),
            credentials=authority.issue("relay"),
        ) as relay,
    ):
        assert relay.url.startswith("https://")
        assert await fetch(tmp_path / "node", server.url, authority.issue("node"), relay.url)
        assert any(relay.fetcher.receiving.store.chunks_dir.iterdir()), "it came through the relay"
        stranger = Authority(tmp_path / "theirs")
        for bad in (
            Credentials(),
            stranger.issue("stranger"),
            stranger.issue("stranger", authority.ca),
        ):
            with pytest.raises(FetchError) as refused:
                await fetch(tmp_path / "bad", server.url, bad)
            assert "\n" not in str(refused.value)


async def test_a_server_of_an_unknown_authority_is_not_believed(
    tmp_path: Path, authority: Authority, store: ChunkStore
) -> None:
    # The server would take our certificate; we do not take its.
    credentials = Authority(tmp_path / "theirs").issue("publisher", authority.ca)
    async with serving(store, credentials=credentials) as server:
        with pytest.raises(FetchError, match="CERTIFICATE_VERIFY_FAILED"):
            await fetch(tmp_path / "node", server.url, authority.issue("node"))


async def test_bad_files_are_one_clear_line_at_the_start(
    tmp_path: Path, authority: Authority, store: ChunkStore
) -> None:
    good, other = authority.issue("node"), authority.issue("other")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    for credentials, what in (
        (replace(good, ca=tmp_path / "none.pem"), "none.pem is missing"),
        (replace(good, key=other.key), "cannot be used for TLS"),
        (replace(good, ca=garbage), "cannot be used for TLS"),
    ):
        with pytest.raises(ConfigError, match=what) as said:
            await VersionServer(store, free_port(), credentials=credentials).start()
        assert "\n" not in str(said.value)
        with pytest.raises(ConfigError, match=what):
            credentials.session()
    with pytest.raises(ConfigError, match="all three or none"):
        Credentials("", good.ca)


def test_a_token_comes_from_a_file_that_holds_one(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(ConfigError, match="cannot be read"):
        Credentials.read(path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        Credentials.read(path)
    path.write_text("secret\n")
    assert Credentials.read(path).token == "secret"


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::", ""])
def test_other_machines_reach_weights_only_where_both_sides_prove_themselves(
    tmp_path: Path, store: ChunkStore, host: str
) -> None:
    token_alone = Credentials(token="secret")
    with pytest.raises(ConfigError, match="reached from other machines"):
        VersionServer(store, 1, credentials=token_alone, host=host)
    with pytest.raises(ConfigError, match="reached from other machines"):
        Relay(tmp_path / "relay", [FollowedJob("job", "http://127.0.0.1:9", None)], host, 1)
    certified = Authority(tmp_path / "ca").issue("relay")
    VersionServer(store, 1, credentials=certified, host=host)
    VersionServer(store, 1, credentials=Credentials(insecure=True), host=host)
    VersionServer(store, 1, host="127.0.0.1")


@pytest.mark.parametrize("role", list(Role))
async def test_a_role_that_has_no_use_for_weights_reads_none(
    tmp_path: Path, store: ChunkStore, role: Role
) -> None:
    certificates = Certificates(tmp_path / "ca")
    own = Credentials().proving(certificates.of(Role.TRAINER, "job"))
    caller = Credentials().proving(certificates.of(role, "it"))
    async with (
        serving(store, credentials=own) as server,
        caller.session() as session,
        session.get(f"{server.url}/manifests/1") as answer,
    ):
        said = await answer.text(errors="replace")
    assert answer.status == (200 if role in WEIGHT_READERS else 403)
    assert (f"{role} it has no use for weights" in said) is (role not in WEIGHT_READERS)


@dataclass
class Listener:
    """Somebody else's server: remembers what callers showed, sends them on to `sends_to`."""

    url: str
    shown: list[str | None] = field(default_factory=list)
    sends_to: str = ""


@asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    async def answer(request: web.Request) -> web.Response:
        listener.shown.append(request.headers.get("Authorization"))
        if listener.sends_to:
            raise web.HTTPFound(listener.sends_to)
        return web.Response(status=404)

    async with served(answer) as url:
        listener = Listener(url)
        yield listener


@pytest.fixture
async def listeners() -> AsyncIterator[tuple[Listener, Listener]]:
    async with listening() as one, listening() as other:
        yield one, other


async def ask_everything(folder: Path, credentials: Credentials, url: str, relay: str) -> None:
    """Ask all that a node asks of an announced publisher and of a relay that was named to it."""
    async with (
        credentials.session() as session,
        reading(folder, [relay], credentials=credentials) as fetcher,
    ):
        reader = PublisherClient(session, "node")
        async with reader.lease(url, "r0", 1):
            calls = (
                reader.catalog(url, "job"),
                fetched(fetcher, url, key=None),
                session.get(f"{relay}/chunks/{'ab' * 32}"),
            )
            await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize("named", [False, True])
async def test_origins_of_the_configuration_are_shown_the_token_and_announced_ones_are_not(
    tmp_path: Path, listeners: tuple[Listener, Listener], named: bool
) -> None:
    publisher, relay = listeners
    origin = publisher.url + "/some/path" if named else "http://127.0.0.1:9"
    credentials = Credentials(TOKEN).naming([origin, "http://other"])
    await ask_everything(tmp_path, credentials, publisher.url, relay.url)
    assert set(publisher.shown) == {f"Bearer {TOKEN}" if named else None}
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
    tmp_path: Path,
    authority: Authority,
    store: ChunkStore,
    listeners: tuple[Listener, Listener],
) -> None:
    node, own = (replace(authority.issue(name), token=TOKEN) for name in ("node", "publisher"))
    in_the_clear = listeners[0]
    await ask_everything(tmp_path / "a", node, in_the_clear.url, in_the_clear.url)
    assert in_the_clear.shown == [], "nobody is even asked"
    async with serving(store, credentials=own) as server:
        assert await fetch(tmp_path / "b", server.url, node)
    with pytest.raises(OriginRefused, match="only https is spoken"):
        node.bears(URL("http://127.0.0.1:1/x"))
    assert not authority.issue("bare").bears(URL("https://127.0.0.1:1/x")), "it has no token"


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
