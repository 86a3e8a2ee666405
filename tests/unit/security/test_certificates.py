"""Certificates say who a process is, and are read again when their files change."""

import asyncio
import datetime
import os
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from rose.cli.main import main
from rose.errors import ConfigError, RefusedError
from rose.security import CertificateFiles, Identity, Role
from rose.security.certificates import (
    MOST_WAIT_S,
    QUIET_S,
    _CredentialsChange,
    files_of,
    identity_of,
    leaf_of,
)
from rose.security.development_ca import DevelopmentCa, Issued


def files(ca: DevelopmentCa, issued: Issued) -> CertificateFiles:
    return CertificateFiles(ca.file, issued.certificate, issued.key)


@pytest.fixture
def ca(tmp_path: Path) -> DevelopmentCa:
    return DevelopmentCa.make(tmp_path / "ca", "prod")


def test_a_certificate_bears_cluster_role_and_name(ca: DevelopmentCa) -> None:
    issued = ca.issue(Role.NODE, "gpu-7.rack-2")
    found = identity_of(leaf_of(issued.certificate))
    assert found == Identity("prod", Role.NODE, "gpu-7.rack-2")
    assert found.uri == "spiffe://rose/prod/node/gpu-7.rack-2"
    assert found.server_name == "node.prod.rose.internal"


@pytest.mark.parametrize(
    "uri",
    [
        "spiffe://rose/prod/node",
        "spiffe://rose/prod/node/",
        "spiffe://rose/prod/node/a/b",
        "spiffe://rose/prod/node/..",
        "spiffe://rose/prod/root/a",
        "spiffe://rose/PROD/node/a",
        "spiffe://rose/prod/node/a b",
        "spiffe://other/prod/node/a",
        "https://rose/prod/node/a",
        "spiffe://rose/prod/node/" + "a" * 254,
        "spiffe://rose/prod/node/a?x",
        "spiffe://rose/prod/node/a\n",
    ],
)
def test_what_is_no_identity_is_none(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"identity|names no|no name"):
        Identity.parse(uri)


def test_two_identities_in_one_certificate_are_none() -> None:
    with pytest.raises(ConfigError, match="2 identities"):
        Identity.of_uris(["spiffe://rose/a/node/x", "spiffe://rose/a/operator/x"])


def test_keys_are_their_owners_alone(ca: DevelopmentCa) -> None:
    issued = ca.issue(Role.GATEWAY, "gw")
    folder = ca.file.parent
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert {path.name for path in folder.iterdir()} == {
        "ca.pem",
        "ca.key",
        issued.certificate.name,
        issued.key.name,
    }
    assert modes == {0o600}


def test_a_second_ca_does_not_void_the_first(ca: DevelopmentCa) -> None:
    with pytest.raises(RefusedError, match="has a CA"):
        DevelopmentCa.make(ca.file.parent, "prod")


def test_files_are_read_again_when_they_change(ca: DevelopmentCa) -> None:
    own = files(ca, ca.issue(Role.NODE, "n0"))
    before = own.material()
    assert own.material() is before
    ca.issue(Role.NODE, "n0")
    assert own.material() is not before
    assert own.material().certificate != before.certificate
    assert own.troubles() == []


def test_half_a_rotation_disturbs_nobody(ca: DevelopmentCa) -> None:
    issued = ca.issue(Role.NODE, "n0")
    own = files(ca, issued)
    before = own.material()
    other = ca.issue(Role.NODE, "n1")
    issued.key.write_bytes(other.key.read_bytes())
    assert own.material() is before
    assert "not the certificate's" in own.troubles()[0]
    issued.certificate.unlink()
    assert own.material() is before
    assert "is missing" in own.troubles()[0]
    issued.certificate.write_bytes(other.certificate.read_bytes())
    assert own.identity.name == "n1"
    assert own.troubles() == []


def test_what_expires_soon_is_said(ca: DevelopmentCa) -> None:
    own = files(ca, ca.issue(Role.NODE, "n0", life_s=60))
    assert "expires in 1 min" in own.troubles()[0]


def test_unusable_files_are_refused_with_one_line(ca: DevelopmentCa, tmp_path: Path) -> None:
    good, other = ca.issue(Role.NODE, "n0"), ca.issue(Role.NODE, "n1")
    garbage = tmp_path / "garbage"
    garbage.write_bytes(os.urandom(64))
    late = ca.issue(Role.NODE, "late", life_s=-10)
    for paths, line in (
        ((ca.file, good.certificate, other.key), "not the certificate's"),
        ((ca.file, garbage, good.key), "a certificate in PEM is wanted"),
        ((ca.file, good.certificate, garbage), "cannot be used for TLS"),
        ((garbage, good.certificate, good.key), "cannot be used for TLS"),
        ((ca.file, tmp_path / "none", good.key), "is missing"),
        ((ca.file, late.certificate, late.key), "expired on"),
    ):
        with pytest.raises(ConfigError, match=line) as caught:
            CertificateFiles(*paths)
        assert "\n" not in str(caught.value)
        assert "PRIVATE" not in str(caught.value)
    with pytest.raises(ConfigError, match="all three"):
        files_of(ca.file, None, None)
    with pytest.raises(ConfigError, match="role scheduler"):
        files(ca, good).insist(Role.SCHEDULER)


async def test_a_server_shows_its_newest_certificate_and_trusts_the_newest_ca(
    ca: DevelopmentCa, tmp_path: Path
) -> None:
    """Without a restart, over HTTP; gRPC's turn is in test_scheduler_identity."""
    issued = ca.issue(Role.GATEWAY, "gw")
    own = files(ca, issued)
    seen: list[dict[str, object]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(writer.get_extra_info("peercert"))
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=own.server_context())
    port = server.sockets[0].getsockname()[1]

    async def shown(caller: CertificateFiles) -> bytes:
        context = caller.client_context()
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        try:
            assert await reader.readexactly(5) == b"hello"
            return bytes(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
        finally:
            writer.close()

    trainer = files(ca, ca.issue(Role.TRAINER, "job"))
    try:
        first = await shown(trainer)
        ca.issue(Role.GATEWAY, "gw")
        assert await shown(trainer) != first
        # The cluster moves to another CA: the old one's callers are strangers from now on.
        other = DevelopmentCa.make(tmp_path / "other", "prod")
        fresh = other.issue(Role.GATEWAY, "gw")
        for target, source in (
            (issued.key, fresh.key),
            (issued.certificate, fresh.certificate),
            (ca.file, other.file),
        ):
            target.write_bytes(source.read_bytes())
        await shown(files(other, other.issue(Role.TRAINER, "job")))
        answered = len(seen)
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await shown(trainer)
        assert len(seen) == answered
    finally:
        server.close()
    assert ("URI", "spiffe://rose/prod/trainer/job") in seen[0]["subjectAltName"]  # type: ignore[operator]


def test_credentials_of_a_server_change_in_a_pause_or_after_a_while(ca: DevelopmentCa) -> None:
    own = files(ca, ca.issue(Role.SCHEDULER, "s"))
    turn = _CredentialsChange(own.material())
    assert not turn.is_due(own.material(), 1.0)
    ca.issue(Role.SCHEDULER, "s")
    newer = own.material()
    # Handshakes follow each other closely.
    assert not turn.is_due(newer, 1.0 + QUIET_S / 2)
    assert turn.is_due(newer, 1.0 + 2 * QUIET_S)
    assert not turn.is_due(newer, 9.0)
    ca.issue(Role.SCHEDULER, "s")
    newest, now_s = own.material(), 9.0
    while not turn.is_due(newest, now_s := now_s + QUIET_S / 2):
        assert now_s < 9.0 + MOST_WAIT_S + 1.0
    assert now_s >= 9.0 + MOST_WAIT_S
    assert turn.shown is newest


def test_no_session_is_resumed_past_its_certificate(ca: DevelopmentCa) -> None:
    """A ticket would let its owner in again for hours, whatever became of its CA."""
    own = files(ca, ca.issue(Role.GATEWAY, "gw"))
    assert own.server_context().num_tickets == 0


def test_the_command_line_makes_and_shows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "certs")
    assert main(["certs", "issue", "node", "n0", "--dir", folder]) == 2
    assert "rose certs init" in capsys.readouterr().err
    assert main(["certs", "init", "--dir", folder, "--cluster", "prod"]) == 0
    assert main(["certs", "issue", "node", "n0", "--dir", folder, "--ttl", "2h"]) == 0
    said = capsys.readouterr().out
    assert "spiffe://rose/prod/node/n0 for 2 h" in said
    assert main(["certs", "show", f"{folder}/node-n0.pem", f"{folder}/ca.pem"]) == 0
    said = capsys.readouterr().out
    assert "spiffe://rose/prod/node/n0; until" in said
    assert "CN=ROSE prod" in said
    for bad in (
        ["issue", "king", "n0"],
        ["issue", "node", "a/b"],
        ["issue", "node", "a", "--ttl", "1"],
    ):
        assert main(["certs", *bad, "--dir", folder]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_ca_of_somebody_else_issues_nothing_and_says_so(
    tmp_path: Path, ca: DevelopmentCa, capsys: pytest.CaptureFixture[str]
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "corporate")])
    now = datetime.datetime.now(datetime.UTC)
    foreign = (
        x509.CertificateBuilder(name, name, key.public_key(), 7)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    ca.file.write_bytes(foreign.public_bytes(Encoding.PEM))
    assert main(["certs", "issue", "node", "n0", "--dir", str(ca.file.parent)]) == 2
    said = capsys.readouterr().err
    assert "ca.pem names no cluster" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("job", ["a b", "team/grpo", "größe", "grpo:1", ".."])
def test_a_job_that_no_certificate_can_name_is_refused_with_what_to_do(
    job: str, ca: DevelopmentCa, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certs", "issue", "trainer", job, "--dir", str(ca.file.parent)]) == 2
    said = capsys.readouterr().err
    assert "register the job under such a name" in said
    assert said.count("\n") == 1
    assert not list(ca.file.parent.glob("trainer-*")), "nothing half done"
