"""A key of another kind, in any place that takes a key's file, ends a start in one line."""

import datetime
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from rose.cli.main import main
from rose.client.credentials import GatewayCredentials, Shown
from rose.errors import ConfigError
from rose.integrations.settings import TrainerSettings
from rose.node.config import NodeConfig
from rose.security import CertificateFiles, Role
from rose.security.development_ca import DevelopmentCa
from rose.security.keys import public_key, signing_key
from rose.security.tokens import SecretFile, TokenFile, TokenVerifier, issue
from rose.store.etcd import EtcdAccess
from rose.weight_distribution import Credentials
from rose.weight_distribution.relay import followed_jobs
from weight_transfer import SignatureError, SigningKey

PAIR = SigningKey.generate()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Make a file of each kind of key; the attributes are their paths."""
    folder = tmp_path_factory.mktemp("keys")
    ca = DevelopmentCa.make(folder / "ca", "prod")
    node, other = ca.issue(Role.NODE, "n0"), ca.issue(Role.NODE, "n1")
    PAIR.save(folder / "private")
    rsa_key = rsa.generate_private_key(65_537, 1_024)
    form = Encoding.PEM, PrivateFormat.PKCS8
    content = {
        "public": PAIR.verify_key.hex.encode() + b"\n",
        "locked": rsa_key.private_bytes(*form, BestAvailableEncryption(b"secret")),
        "short": rsa_key.private_bytes(*form, NoEncryption()),
        "empty": b"",
        "placeholder": b"0" * 64,
        "half": (folder / "private").read_bytes()[:100],
        "token": issue(PAIR, "grpo").encode(),
        "garbage": os.urandom(64) + b"\xff",
    }
    for name, data in content.items():
        (folder / name).write_bytes(data)
    written = {name: folder / name for name in ("private", *content)}
    return SimpleNamespace(
        ca=ca.file,
        ca_key=folder / "ca" / "ca.key",
        certificate=node.certificate,
        key=node.key,
        other_key=other.key,
        **written,
    )


def one_line(refused: pytest.ExceptionInfo[ConfigError], *secrets: Path) -> str:
    said = str(refused.value)
    assert "\n" not in said
    whole = f"{said} {refused.value!r} {refused.value.__cause__!r}".encode()
    for secret in secrets:
        assert not any(len(line) > 16 and line in whole for line in secret.read_bytes().split())
    return said


NO_SIGNING_KEYS = {
    "public": "a public key of 64 hex digits",
    "key": "PEM of PRIVATE KEY",
    "certificate": "PEM of CERTIFICATE",
    "empty": "nothing",
    "placeholder": "a public key of 64 hex digits",
    "half": "100 hex digits",
    "token": "a job token",
    "garbage": "bytes that are no text",
}


@pytest.mark.parametrize(("name", "kind"), NO_SIGNING_KEYS.items())
def test_a_signing_key_is_the_private_key_of_a_pair(
    keys: Any, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = getattr(keys, name)
    settings = TrainerSettings("grpo", "h:1", "http://h:2", path.parent, path.parent, path)
    for read in (signing_key, lambda _: settings.signing_key()):
        with pytest.raises(ConfigError, match=f"holds {kind}, and the private key") as refused:
            read(path)
        assert "rose token key --out" in one_line(refused, keys.private, keys.key)
    assert main(["token", "issue", "--job", "grpo", "--key", str(path)]) == 2
    assert f"holds {kind}, and" in capsys.readouterr().err


def test_a_pair_of_two_keys_halves_is_no_pair(tmp_path: Path, keys: Any) -> None:
    mixed = tmp_path / "mixed"
    mixed.write_text(keys.private.read_text()[:64] + SigningKey.generate().verify_key.hex)
    with pytest.raises(SignatureError, match="its seed and its public key"):
        SigningKey.load(mixed)
    with pytest.raises(ConfigError, match="holds 128 hex digits"):
        signing_key(mixed)
    assert signing_key(keys.private).verify_key == PAIR.verify_key


NO_PUBLIC_KEYS = {
    "private": "a private signing key is no public key",
    "key": "PEM of PRIVATE KEY is no public key",
    "certificate": "PEM of CERTIFICATE is no public key",
    "empty": "nothing is no public key",
    "placeholder": "is a placeholder",
    "half": "100 hex digits is no public key",
    "token": "a job token is no public key",
}


@pytest.mark.parametrize(("name", "line"), NO_PUBLIC_KEYS.items())
def test_a_public_key_is_no_private_one_and_no_placeholder(keys: Any, name: str, line: str) -> None:
    text = getattr(keys, name).read_text().strip()
    node = {"node": "n", "scheduler": "h:1", "run_dir": "r", "log_dir": "l", "replicas": []}
    file = keys.ca.parent / f"{name}.json"
    file.write_text(json.dumps(node | {"verify_key": text}))
    reads: tuple[Callable[[], object], ...] = (
        lambda: public_key(text),
        lambda: followed_jobs(["grpo"], ["http://h:1"], [text]),
        lambda: NodeConfig.load(file),
    )
    for read in reads:
        with pytest.raises(ConfigError, match=line) as refused:
            read()
        one_line(refused, keys.private, keys.key)


@pytest.mark.parametrize("name", [*NO_PUBLIC_KEYS, "garbage"])
def test_gateways_check_tokens_by_public_keys_alone(keys: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=r"no public key|public keys are wanted|no text|placeh"):
        TokenVerifier(getattr(keys, name))
    TokenVerifier(keys.public)


@pytest.mark.parametrize("name", ["private", "key", "ca"])
def test_no_key_is_sent_as_a_token(keys: Any, name: str) -> None:
    path = getattr(keys, name)
    for read in (TokenFile, Credentials.read, partial(SecretFile, option="--x")):
        with pytest.raises(ConfigError, match="a token is wanted") as refused:
            read(path)
        one_line(refused, keys.private, keys.key)


# Values of ca, certificate and key, and the line.
NO_CERTIFICATES = [
    (("certificate", "certificate", "key"), "which is no CA's"),
    (("ca_key", "certificate", "key"), "ca.key .* holds PEM of EC PRIVATE KEY|PEM of PRIVATE KEY"),
    (("ca", "ca", "key"), "the key is not the certificate's"),
    (("ca", "key", "certificate"), "node-n0.key .* a certificate in PEM is wanted"),
    (("ca", "certificate", "certificate"), "holds PEM of CERTIFICATE, and the certificate's priv"),
    (("ca", "certificate", "other_key"), "the key is not the certificate's"),
    (("ca", "certificate", "ca_key"), "the key is not the certificate's"),
    (("ca", "certificate", "locked"), "under a password|ENCRYPTED PRIVATE KEY"),
    (("ca", "certificate", "private"), "holds a private signing key"),
    (("ca", "certificate", "public"), "holds a public key of 64 hex digits"),
    (("ca", "certificate", "empty"), "holds nothing"),
    (("ca", "empty", "key"), "holds nothing"),
    (("empty", "certificate", "key"), "holds nothing"),
    (("garbage", "certificate", "key"), "holds bytes that are no text"),
    (("token", "certificate", "key"), "holds a job token"),
]


@pytest.mark.parametrize(("names", "line"), NO_CERTIFICATES)
def test_certificates_and_keys_are_not_changed_for_each_other(
    keys: Any, names: tuple[str, str, str], line: str
) -> None:
    ca, certificate, key = (getattr(keys, name) for name in names)
    etcd = EtcdAccess(("h:1",), ca_file=ca, certificate_file=certificate, key_file=key)
    reads: tuple[Callable[[], object], ...] = (
        lambda: CertificateFiles(ca, certificate, key),
        etcd.credentials,
        lambda: Shown(GatewayCredentials(ca=ca, certificate=certificate, key=key), frozenset()),
        Credentials("", ca, certificate, key).server,
    )
    for read in reads:
        with pytest.raises(ConfigError, match=line) as refused:
            read()
        one_line(refused, keys.key, keys.ca_key)
    if names[1:] == ("certificate", "key"):
        for alone in (
            lambda: Shown(GatewayCredentials(ca=ca), frozenset()),
            replace(etcd, certificate_file=None, key_file=None).credentials,
        ):
            with pytest.raises(ConfigError, match=line):
                alone()


def test_a_short_key_is_refused_before_a_server_begins(keys: Any, tmp_path: Path) -> None:
    short = load_pem_private_key(keys.short.read_bytes(), None)
    assert isinstance(short, rsa.RSAPrivateKey)
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(x509.Name([]), x509.Name([]), short.public_key(), 1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(hours=1))
        .sign(short, hashes.SHA256())
    )
    (tmp_path / "short.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    with pytest.raises(ConfigError, match="an RSA key of 1024 bits is too short"):
        CertificateFiles(keys.ca, tmp_path / "short.pem", keys.short)
