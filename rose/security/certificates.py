"""Certificate files for gRPC, asyncio and aiohttp, read again when they change.

    files (cert-manager, SPIRE's helper, `rose certs`) ── changed? ──► material ──► new handshakes
                                                  └── does not fit: the old one stays, `trouble`

Live connections keep the certificate of their handshake until the peer's certificate ends, so a
rotation needs no restart on either side, and a half-written file has no effect.
"""

import argparse
import asyncio
import math
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from rose.errors import ConfigError
from rose.security.keys import kind_of
from rose.security.roles import Identity, Role, server_name
from rose.security.watched_files import WatchedFiles, read_bounded

if TYPE_CHECKING:
    # Imported where it is used: a trainer's client does not need it.
    import grpc

EXPIRED = "the certificate of {} has expired; connect again with a newer one"
MISSING = "TLS file {} is missing"
MAX_PEM_BYTES = 1 << 20
# OpenSSL refuses shorter keys, and says so only once a server starts.
LEAST_RSA_BITS = 2_048
WARN_BEFORE_S = 24 * 3_600.0


@dataclass(frozen=True, slots=True)
class Peer:
    """The other side of a connection, as its certificate names it.

    not_after_s: Unix time at which the certificate expires.
    """

    identity: Identity
    not_after_s: float


@dataclass(frozen=True, slots=True)
class Material:
    """PEM bytes of a CA, a certificate and its key as they were last read.

    leaf: the parsed certificate.
    """

    ca: bytes
    certificate: bytes
    key: bytes
    leaf: x509.Certificate

    @property
    def not_after_s(self) -> float:
        """Unix time at which the certificate expires."""
        return self.leaf.not_valid_after_utc.timestamp()

    def identity(self) -> Identity:
        """Return the identity of the certificate's owner.

        Raises ConfigError for a certificate without one.
        """
        return identity_of(self.leaf)


# gRPC replaces a server's credentials without a lock against other handshakes, which may still use
# the freed ones. So the first handshake after a pause replaces them, or any one after MOST_WAIT_S.
QUIET_S = 0.05
MOST_WAIT_S = 30.0


class _CredentialsChange:
    """Decision when a gRPC server's credentials change to newer files; each handshake asks it in
    turn.
    """

    def __init__(self, shown: Material) -> None:
        self.shown = shown
        self._asked_s = -math.inf
        self._waits_since_s: float | None = None

    def is_due(self, now: Material, now_s: float) -> bool:
        """Return True if this handshake shall replace the credentials by `now`: after a pause of
        QUIET_S, or a wait of MOST_WAIT_S.

        now_s: monotonic.
        """
        pause_s, self._asked_s = now_s - self._asked_s, now_s
        if now is self.shown:
            self._waits_since_s = None
            return False
        if self._waits_since_s is None:
            self._waits_since_s = now_s
        if pause_s < QUIET_S and now_s - self._waits_since_s < MOST_WAIT_S:
            return False
        self.shown, self._waits_since_s = now, None
        return True


# gRPC's threads ask for the newest certificate during a handshake and hold no Python reference:
# freeing the credentials with their server would crash the process. A process has a few.
_served: "list[grpc.ServerCredentials]" = []


class CertificateFiles:
    """PEM files of a CA, a certificate and its key, read again when they change.

    Any thread may use it.
    """

    def __init__(self, ca: Path, certificate: Path, key: Path) -> None:
        """Read the three PEM files. Raises ConfigError for files that cannot be used."""
        self._paths = ca, certificate, key
        self._files = WatchedFiles(self._paths, self._read, MISSING)
        self._contexts: dict[bool, tuple[Material, ssl.SSLContext]] = {}

    def material(self) -> Material:
        """Return the content of the files; the last usable content while they cannot be read."""
        return self._files.newest()

    @property
    def paths(self) -> tuple[Path, Path, Path]:
        """Paths of the CA, the certificate and the key."""
        return self._paths

    @property
    def identity(self) -> Identity:
        """Identity of the certificate's owner. Raises ConfigError for a certificate without one."""
        return self.material().identity()

    @property
    def validity_s(self) -> tuple[float, float]:
        """Unix times at which the certificate begins and ceases to be valid."""
        leaf = self.material().leaf
        return leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp()

    @property
    def until(self) -> str:
        """Time at which the certificate expires, as text for messages: 2026-01-31 12:00 UTC."""
        return f"{self.material().leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"

    def insist(self, *roles: Role) -> Identity:
        """Return the identity of the certificate's owner.

        Raises ConfigError if its role is not among `roles`.
        """
        own = self.identity
        if own.role not in roles:
            raise ConfigError(
                f"{self._paths[1]} is the certificate of {own}; give one of role"
                f" {' or '.join(roles)}: rose certs issue {roles[0]} NAME"
            )
        return own

    def troubles(self) -> list[str]:
        """Return a line for each fault that an operator should mend: unreadable files, an expired
        or expiring certificate.
        """
        material = self.material()
        lines = [f"certificates: {self._files.trouble}"] if self._files.trouble else []
        left_s = material.not_after_s - time.time()
        if left_s <= 0:
            lines.append(f"{self._paths[1]} has expired; issue another one")
        elif left_s < min(WARN_BEFORE_S, _life_s(material.leaf) / 4):
            lines.append(f"{self._paths[1]} expires in {left_s / 60:.0f} min; renew it")
        return lines

    # ---- gRPC ----

    def channel_credentials(self) -> "grpc.ChannelCredentials":
        """Return credentials for a client's new gRPC channel, which keeps them for its life."""
        import grpc

        now = self.material()
        return grpc.ssl_channel_credentials(now.ca, now.key, now.certificate)

    def channel_options(self, role: Role) -> tuple[tuple[str, str], ...]:
        """Return gRPC options by which a channel accepts only servers of that role in this cluster.

        Raises ConfigError for a certificate without an identity.
        """
        return (("grpc.ssl_target_name_override", server_name(role, self.identity.cluster)),)

    def server_credentials(self) -> "grpc.ServerCredentials":
        """Return a gRPC server's credentials: clients must show certificates, and handshakes use
        the newest files.
        """
        import grpc

        change = _CredentialsChange(self.material())

        def newest() -> "grpc.ServerCertificateConfiguration | None":
            now = self.material()
            return _configuration(now) if change.is_due(now, time.monotonic()) else None

        credentials = grpc.dynamic_ssl_server_credentials(
            _configuration(change.shown),
            cast("Callable[[], grpc.ServerCertificateConfiguration]", newest),
            require_client_authentication=True,
        )
        _served.append(credentials)
        return credentials

    # ---- HTTP ----

    def server_context(self, *, everybody: bool = False) -> ssl.SSLContext:
        """Return an HTTP server's TLS context; each handshake uses the newest files. Raises
        ConfigError.

        everybody: callers without a certificate are admitted too, and authenticate in another way.
        """
        first = self._context(everybody)

        def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            # Runs in each handshake, with or without a server name from the client.
            connection.context = self._context(everybody)

        front = self._new_context(ssl.Purpose.CLIENT_AUTH)
        front.verify_mode = first.verify_mode
        front.sni_callback = choose
        return front

    def client_context(self) -> ssl.SSLContext:
        """Return an HTTP client's TLS context, which checks the server's certificate and host name.
        Raises ConfigError.

        Call `refresh` before each connection.
        """
        context = self._new_context(ssl.Purpose.SERVER_AUTH)
        context.check_hostname = True
        return context

    def refresh(self, context: ssl.SSLContext, shown: Material) -> Material:
        """Load files newer than `shown` into a client's context; return the material that the
        context now uses.
        """
        now = self.material()
        if now is shown:
            return shown
        try:
            self._load(context)
        except ConfigError:
            return shown  # replaced once more, just now
        return now

    def _context(self, everybody: bool) -> ssl.SSLContext:
        now = self.material()
        kept = self._contexts.get(everybody)
        if kept is not None and kept[0] is now:
            return kept[1]
        try:
            context = self._new_context(ssl.Purpose.CLIENT_AUTH)
        except ConfigError:
            # The files were replaced again meanwhile: the next handshake reads them.
            if kept is None:
                raise
            return kept[1]
        context.verify_mode = ssl.CERT_OPTIONAL if everybody else ssl.CERT_REQUIRED
        self._contexts[everybody] = now, context
        return context

    def _new_context(self, purpose: ssl.Purpose) -> ssl.SSLContext:
        # Trust the cluster's own CA alone, not the system's authorities.
        serves = purpose is ssl.Purpose.CLIENT_AUTH
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if serves:
            # A resumed session is not verified again, by any CA, so issue no tickets for one.
            context.num_tickets = 0
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        ca, certificate, key = self._paths
        try:
            context.load_verify_locations(cafile=str(ca))
            context.load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{ca}, {certificate} and {key} cannot be used for TLS: {error}"
            ) from error

    # ---- files ----

    def _read(self) -> Material:
        ca, certificate, key = self._paths
        found = Material(authorities_in(ca), *pair_in(certificate, key))
        if found.not_after_s <= time.time():
            raise ConfigError(
                f"{certificate} expired on {found.leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC;"
                " issue another one"
            )
        return found


def identity_of(certificate: x509.Certificate) -> Identity:
    """Return the one identity URI in a certificate as an Identity.

    Raises ConfigError for none or several.
    """
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (x509.ExtensionNotFound, ValueError):
        uris = []
    return Identity.of_uris(uris)


@lru_cache(maxsize=4_096)
def peer_of(pem: bytes) -> Peer:
    """Return the owner and expiry of a PEM certificate that a handshake has verified, from a cache.

    Raises ConfigError.
    """
    try:
        leaf = x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise ConfigError("the certificate cannot be read") from error
    return Peer(identity_of(leaf), leaf.not_valid_after_utc.timestamp())


def peer_over(transport: asyncio.BaseTransport | None) -> Peer | None:
    """Return the owner of the certificate that was shown over a connection; None without one.
    Raises ConfigError.

    TLS verified it when the connection was made, which may be long ago.
    """
    shown = transport.get_extra_info("peercert") if transport else None
    return _peer_named(shown.get("subjectAltName", ()), shown["notAfter"]) if shown else None


@lru_cache(maxsize=4_096)
def _peer_named(names: tuple[tuple[str, str], ...], not_after: str) -> Peer:
    identity = Identity.of_uris(name for kind, name in names if kind == "URI")
    return Peer(identity, ssl.cert_time_to_seconds(not_after))


def leaf_of(path: Path) -> x509.Certificate:
    """Return the first certificate of a PEM file. Raises ConfigError."""
    return _certificates_in(path, _bytes_of(path), "a certificate in PEM")[0]


def authorities_in(path: Path) -> bytes:
    """Return the bytes of a CA file. Raises ConfigError if no certificate in it is a CA's."""
    data = _bytes_of(path)
    found = _certificates_in(path, data, "the CA's certificate in PEM")
    if not any(map(_vouches, found)):
        owner = found[0].subject.rfc4514_string()[:80]
        raise ConfigError(
            f"{path} cannot be used for TLS: it holds the certificate of {owner!r}, which is no"
            " CA's; give the certificate of the CA that signed it"
        )
    return data


def pair_in(certificate: Path, key: Path) -> tuple[bytes, bytes, x509.Certificate]:
    """Return the bytes of a certificate file and of its key file, and the parsed certificate.

    Raises ConfigError if the key is not the certificate's.
    """
    chain = _bytes_of(certificate)
    leaf = _certificates_in(certificate, chain, "a certificate in PEM")[0]
    data = _bytes_of(key)
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    try:
        private = load_pem_private_key(data, None)
        own = private.public_key().public_bytes(*form) == leaf.public_key().public_bytes(*form)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        # The error's text may hold bytes of the key.
        raise _unlike(key, data, "the certificate's private key in PEM without a password") from (
            error
        )
    if not own:
        raise ConfigError(
            f"{certificate} and {key} cannot be used for TLS: the key is not the certificate's"
        )
    if isinstance(private, RSAPrivateKey) and private.key_size < LEAST_RSA_BITS:
        raise ConfigError(
            f"{key} cannot be used for TLS: an RSA key of {private.key_size} bits is too short;"
            f" make one of {LEAST_RSA_BITS} at least"
        )
    return chain, data, leaf


def _certificates_in(path: Path, data: bytes, wanted: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise _unlike(path, data, wanted) from error


def _vouches(certificate: x509.Certificate) -> bool:
    if certificate.issuer == certificate.subject:
        # A certificate that signed itself vouches for itself.
        return True
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


def _unlike(path: Path, data: bytes, wanted: str) -> ConfigError:
    return ConfigError(
        f"{path} cannot be used for TLS: it holds {kind_of(data)}, and {wanted} is wanted"
    )


def _configuration(now: Material) -> "grpc.ServerCertificateConfiguration":
    import grpc

    return grpc.ssl_server_certificate_configuration([(now.key, now.certificate)], now.ca)


def _life_s(leaf: x509.Certificate) -> float:
    return (leaf.not_valid_after_utc - leaf.not_valid_before_utc).total_seconds()


def _bytes_of(path: Path) -> bytes:
    data = read_bounded(path, MAX_PEM_BYTES, MISSING)
    if len(data) > MAX_PEM_BYTES:
        raise ConfigError(f"TLS file {path} is longer than {MAX_PEM_BYTES} bytes; give a PEM file")
    return data


# ---- command lines ----

PATHS = ("ca", "certificate", "key")


def files_of(
    ca: Path | None, certificate: Path | None, key: Path | None
) -> CertificateFiles | None:
    """Return CertificateFiles of three paths, or None if all three are None.

    Raises ConfigError if only some are given.
    """
    if ca is None and certificate is None and key is None:
        return None
    if ca is None or certificate is None or key is None:
        raise ConfigError("TLS needs `ca`, `certificate` and `key`; give all three or none")
    return CertificateFiles(ca, certificate, key)


def add_certificate_options(parser: argparse.ArgumentParser) -> None:
    """Add --ca, --certificate and --key to a parser; `taken_certificates` reads them."""
    group = parser.add_argument_group("certificates", "all three, PEM; read again when they change")
    group.add_argument("--ca", type=Path, metavar="FILE", help="who vouches for the others")
    group.add_argument("--certificate", type=Path, metavar="FILE", help="this process's own")
    group.add_argument("--key", type=Path, metavar="FILE", help="its private key")


def taken_certificates(options: dict[str, Any]) -> CertificateFiles | None:
    """Remove the three paths from parsed options; return them as CertificateFiles, None if none was
    given.

    Raises ConfigError.
    """
    return files_of(*(options.pop(name) for name in PATHS))
