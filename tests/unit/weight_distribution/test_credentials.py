"""Both sides of a weight connection prove who they are, or nothing passes."""

import datetime as dt
import ipaddress
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rose.errors import ConfigError
from rose.security import Role
from rose.security.roles import WEIGHT_READERS
from rose.weight_distribution import Credentials, Relay, VersionServer
from rose.weight_distribution.relay import FollowedJob
from tests.harness.certificates import Certificates
from weight_transfer import ChunkStore, SigningKey, TensorBits, VersionPublisher
from weight_transfer.errors import FetchError
from weight_transfer.fetch import Caps, ChunkFetcher, DownloadLimits, fetch_version
from weight_transfer.fetch import fetcher as fetcher_module

KEY = SigningKey.generate()


class Authority:
    """Signs certificates for 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, folder.name)])
        builder = self._builder(self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self.ca = self._write("ca.pem", builder.sign(self._key, hashes.SHA256()))

    def issue(self, name: str, ca: Path | None = None) -> Credentials:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = self._builder(subject, key).add_extension(
            x509.SubjectAlternativeName([address]), critical=False
        )
        certificate = self._write(f"{name}.pem", builder.sign(self._key, hashes.SHA256()))
        path = self._folder / f"{name}.key"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return Credentials("", ca or self.ca, certificate, path)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(hours=1))
            .add_extension(own, critical=False)
            .add_extension(issuer, critical=False)
        )

    def _write(self, name: str, certificate: x509.Certificate) -> Path:
        path = self._folder / name
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return path


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher_module, "RETRY_PAUSE_S", 0.01)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


def published(root: Path) -> ChunkStore:
    bits = np.arange(4_096, dtype=np.uint16)
    old, new = ({"w": TensorBits("w", "bfloat16", (64, 64), bits + np.uint16(n))} for n in (0, 1))
    store = ChunkStore(root)
    VersionPublisher(store, "job", "trainer", KEY, chunk_bytes=1_024).publish(1, 0, old, new)
    return store


async def fetch(root: Path, url: str, credentials: Credentials) -> int:
    async with credentials.session() as session:
        fetcher = ChunkFetcher(session, DownloadLimits(ChunkStore(root), Caps()))
        fetched = await fetch_version(fetcher, url, "job", 1, KEY.verify_key, lambda _: None, set())
    return fetched.wire_bytes


async def test_weights_pass_from_publisher_to_relay_to_node_between_known_sides_only(
    tmp_path: Path, authority: Authority, unused_tcp_port_factory: Callable[[], int]
) -> None:
    store = published(tmp_path / "origin")
    server = VersionServer(
        store, unused_tcp_port_factory(), credentials=authority.issue("publisher")
    )
    await server.start()
    relay = Relay(
        tmp_path / "relay",
        [FollowedJob("job", server.url, KEY.verify_key)],
        "127.0.0.1",
        unused_tcp_port_factory(),
        credentials=authority.issue("relay"),
    )
    async with relay:
        node = authority.issue("node")
        assert relay.url.startswith("https://")
        async with node.session() as session:
            fetcher = ChunkFetcher(
                session, DownloadLimits(ChunkStore(tmp_path / "node"), Caps()), "", [relay.url]
            )
            fetched = await fetch_version(
                fetcher, server.url, "job", 1, KEY.verify_key, lambda _: None, set()
            )
        assert fetched.wire_bytes
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
    await server.close()


async def test_a_server_of_an_unknown_authority_is_not_believed(
    tmp_path: Path, authority: Authority, unused_tcp_port: int
) -> None:
    stranger = Authority(tmp_path / "theirs")
    # The server would take our certificate; we do not take its.
    credentials = stranger.issue("publisher", authority.ca)
    server = VersionServer(published(tmp_path / "o"), unused_tcp_port, credentials=credentials)
    await server.start()
    with pytest.raises(FetchError, match="CERTIFICATE_VERIFY_FAILED"):
        await fetch(tmp_path / "node", server.url, authority.issue("node"))
    await server.close()


async def test_bad_files_are_one_clear_line_at_the_start(
    tmp_path: Path, authority: Authority, unused_tcp_port: int
) -> None:
    good = authority.issue("node")
    other = authority.issue("other")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    cases = [
        (Credentials("", tmp_path / "none.pem", good.certificate, good.key), "none.pem is missing"),
        (Credentials("", good.ca, good.certificate, other.key), "cannot be used for TLS"),
        (Credentials("", garbage, good.certificate, good.key), "cannot be used for TLS"),
    ]
    for credentials, what in cases:
        server = VersionServer(ChunkStore(tmp_path / "s"), unused_tcp_port, credentials=credentials)
        with pytest.raises(ConfigError, match=what) as said:
            await server.start()
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
    tmp_path: Path, host: str
) -> None:
    store = ChunkStore(tmp_path / "store")
    token_alone = Credentials(token="secret")
    with pytest.raises(ConfigError, match="reached from other machines"):
        VersionServer(store, 1, credentials=token_alone, host=host)
    with pytest.raises(ConfigError, match="reached from other machines"):
        Relay(tmp_path / "relay", [FollowedJob("job", "http://127.0.0.1:9", None)], host, 1)
    certified = Authority(tmp_path / "ca").issue("relay")
    VersionServer(store, 1, credentials=certified, host=host)
    VersionServer(store, 1, host=host, insecure=True)
    VersionServer(store, 1, host="127.0.0.1")


@pytest.mark.parametrize("role", list(Role))
async def test_a_role_that_has_no_use_for_weights_reads_none(
    tmp_path: Path, unused_tcp_port: int, role: Role
) -> None:
    certificates = Certificates(tmp_path / "ca")
    own = Credentials().proving(certificates.of(Role.TRAINER, "job"))
    server = VersionServer(published(tmp_path / "store"), unused_tcp_port, credentials=own)
    await server.start()
    caller = Credentials().proving(certificates.of(role, "it"))
    try:
        async with (
            caller.session() as session,
            session.get(f"{server.url}/manifests/1") as answer,
        ):
            said = await answer.text(errors="replace")
    finally:
        await server.close()
    assert answer.status == (200 if role in WEIGHT_READERS else 403)
    assert (f"{role} it has no use for weights" in said) is (role not in WEIGHT_READERS)
