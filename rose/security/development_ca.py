"""Development CA: certificates of a cluster without cert-manager or SPIRE, for tests and trials.

`rose certs init` makes a CA in a folder, `rose certs issue` certificates beside it. Key files
have mode 0600. There is no revocation: certificates live for days and are replaced in place.
"""

import datetime
import ipaddress
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rose.errors import ConfigError, RefusedError
from rose.security.certificates import leaf_of
from rose.security.roles import TRUST_DOMAIN, Identity, Role

CA_FILE, CA_KEY = "ca.pem", "ca.key"
CA_LIFE_S: Final = 365 * 86_400.0
LIFE_S: Final = 30 * 86_400.0
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
# Clocks of a cluster differ.
SKEW_S = 300.0
_MAX_COMMON_NAME = 64


@dataclass(frozen=True, slots=True)
class Issued:
    """Issued certificate: its owner and the paths of its two files."""

    identity: Identity
    certificate: Path
    key: Path


class DevelopmentCa:
    """CA whose certificate and key lie in one folder, beside the certificates that it issues."""

    def __init__(
        self,
        folder: Path,
        certificate: x509.Certificate,
        key: ec.EllipticCurvePrivateKey,
        cluster: str = "",
    ) -> None:
        self._folder = folder
        self._certificate = certificate
        self._key = key
        self._cluster = cluster

    @property
    def file(self) -> Path:
        """Path of the CA's certificate, which every process gets as `--ca`."""
        return self._folder / CA_FILE

    @property
    def cluster(self) -> str:
        """Name of the CA's cluster. Raises ConfigError if its certificate names none."""
        if self._cluster:
            return self._cluster
        try:
            extensions = self._certificate.extensions
            names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
        except (x509.ExtensionNotFound, ValueError) as error:
            raise ConfigError(
                f"{self.file} names no cluster, so `rose certs init` has not made it; give the"
                " folder of one that it made, or --cluster NAME"
            ) from error
        return uri.removeprefix(f"spiffe://{TRUST_DOMAIN}/")

    @classmethod
    def make(cls, folder: Path, cluster: str, life_s: float = CA_LIFE_S) -> Self:
        """Create a CA in a folder and return it.

        Raises RefusedError if the folder has one: its certificates would be void.
        """
        Identity(cluster, Role.OPERATOR, "ca")  # the cluster's name is checked there
        if (folder / CA_FILE).exists() or (folder / CA_KEY).exists():
            raise RefusedError(
                f"{folder} has a CA; remove it if all its certificates are to be void, or give"
                " another folder"
            )
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"ROSE {cluster}"[:64])])
        uri = x509.UniformResourceIdentifier(f"spiffe://{TRUST_DOMAIN}/{cluster}")
        certificate = (
            _builder(name, name, key.public_key(), life_s)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(ca=True), critical=True)
            .add_extension(x509.SubjectAlternativeName([uri]), critical=False)
            .sign(key, hashes.SHA256())
        )
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be made ({error.strerror})") from error
        write_private(folder / CA_KEY, _pem_of(key))
        write_private(folder / CA_FILE, certificate.public_bytes(Encoding.PEM))
        return cls(folder, certificate, key)

    @classmethod
    def open(cls, folder: Path, cluster: str = "") -> Self:
        """Return the CA of a folder. cluster: its name, where the certificate has none.

        Raises ConfigError if there is none, or its key cannot be read.
        """
        if not (folder / CA_FILE).is_file():
            raise ConfigError(f"{folder} has no CA; make one: rose certs init --dir {folder}")
        try:
            key = load_pem_private_key((folder / CA_KEY).read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{folder / CA_KEY} cannot be read as the CA's key") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{folder / CA_KEY} is no key of `rose certs init`")
        return cls(folder, leaf_of(folder / CA_FILE), key, cluster)

    def issue(
        self,
        role: Role,
        name: str,
        hosts: Sequence[str] = LOOPBACK,
        life_s: float = LIFE_S,
        *,
        starts_s: float = -SKEW_S,
    ) -> Issued:
        """Write a new certificate and key over ROLE-NAME.pem and ROLE-NAME.key, whose users reload
        them; return owner and paths.

        hosts: names and addresses under which HTTP clients reach its owner. starts_s: seconds from
        now at which it becomes valid, negative for the past.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        signed = self.signed(role, name, key.public_key(), hosts, life_s, starts_s=starts_s)
        owner = Identity(self.cluster, role, name)
        issued = Issued(
            owner, self._folder / f"{role}-{name}.pem", self._folder / f"{role}-{name}.key"
        )
        write_private(issued.key, _pem_of(key))
        write_private(issued.certificate, signed)
        return issued

    def signed(
        self,
        role: Role,
        name: str,
        key: ec.EllipticCurvePublicKey,
        hosts: Sequence[str] = (),
        life_s: float = LIFE_S,
        *,
        starts_s: float = -SKEW_S,
    ) -> bytes:
        """Return a certificate for a key as PEM, followed by the CA's own unless that is a root.

        The arguments are those of `issue`.
        """
        owner = Identity(self.cluster, role, name)
        subject = x509.Name(
            [x509.NameAttribute(NameOID.COMMON_NAME, f"{role} {name}"[:_MAX_COMMON_NAME])]
        )
        names: list[x509.GeneralName] = [
            x509.UniformResourceIdentifier(owner.uri),
            x509.DNSName(owner.server_name),
            *map(_host, hosts),
        ]
        usages = x509.ExtendedKeyUsage(
            [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        )
        certificate = (
            _builder(subject, self._certificate.subject, key, life_s, starts_s)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(ca=False), critical=True)
            .add_extension(usages, critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(self._key_id(), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        root = self._certificate.issuer == self._certificate.subject
        return certificate.public_bytes(Encoding.PEM) + (b"" if root else self.file.read_bytes())

    def _key_id(self) -> x509.AuthorityKeyIdentifier:
        """Return the CA's own identifier of its key, which others derive in other ways."""
        try:
            own = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
        except x509.ExtensionNotFound:
            return x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own.value)


def write_private(path: Path, data: bytes) -> None:
    """Write a file of mode 0600 by renaming a complete temporary file over it.

    Raises ConfigError.
    """
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror})") from error


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    life_s: float,
    starts_s: float = -SKEW_S,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(seconds=min(starts_s, life_s)))
        .not_valid_after(now + datetime.timedelta(seconds=life_s))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=ca,
        encipher_only=False,
        decipher_only=False,
    )


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError as error:
        raise ConfigError(f"{name[:80]!r} is no host; give a name or an address") from error


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
