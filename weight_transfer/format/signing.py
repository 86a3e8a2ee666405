"""Ed25519 signatures of manifests and catalogs: keys, and the envelope of a signed payload.

A manifest activates only when the trainer's key signed it.

magic "ROSS" | format u8 | kind u8 | 2 zeros | Ed25519 signature, 64 bytes (zeros: none) | payload

The signature is of the domain, the format, the kind and the BLAKE3 of the payload. So it is checked
over the bytes as they came, before anything parses them. Hashing, unlike a signature over
megabytes, does not hold the interpreter's lock.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Final

import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from weight_transfer.errors import ManifestError, SignatureError

SIGNATURE_BYTES: Final = 64
SEED_BYTES: Final = 32
FORMAT: Final = 2
_MAGIC: Final = b"ROSS"
_DOMAIN: Final = b"rose/signed\n"
"""Prefix of each signed message, so that a signature of ROSE's means nothing elsewhere."""
_UNSIGNED: Final = bytes(SIGNATURE_BYTES)
_BLOCK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class VerifyKey:
    """Public Ed25519 key of a trainer, 64 hex digits; safe to hand around."""

    hex: str

    def verify(self, message: bytes, signature: bytes) -> None:
        """Raise SignatureError unless `signature` is this key's signature of `message`."""
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.hex))
            key.verify(signature, message)
        except (ValueError, InvalidSignature) as error:
            raise SignatureError(
                f"signature does not match key {self.hex[:16]}…; is this the job's trainer?"
            ) from error


@dataclass(frozen=True, slots=True)
class JobKeys:
    """Public keys of several jobs: a key signs its own job's versions alone. default: key of the
    jobs without one of their own, None if their versions are refused.
    """

    default: VerifyKey | None
    jobs: Mapping[str, VerifyKey] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> JobKeys:
        """Return the keys in a text that `text` made, or the one key of all jobs in its hex
        digits.
        """
        keys = json.loads(text) if text.startswith("{") else {"": text}
        default = keys.pop("", None)
        jobs = {job: VerifyKey(key) for job, key in keys.items()}
        return cls(VerifyKey(default) if default else None, jobs)

    @property
    def text(self) -> str:
        """Keys as text, for an environment variable."""
        keys = {job: key.hex for job, key in self.jobs.items()}
        if self.default is None:
            return json.dumps(keys)
        return json.dumps({"": self.default.hex, **keys}) if keys else self.default.hex

    def of(self, job: str) -> VerifyKey:
        """Return the key that signs a job's versions. Raises SignatureError without one."""
        key = self.jobs.get(job, self.default)
        if key is None:
            raise SignatureError(f"no key of job {job} is known here; add it to `job_keys`")
        return key


Keys = VerifyKey | JobKeys | None
"""One key of all jobs, a key for each, or None where no signature is asked for."""


def key_of(keys: Keys, job: str) -> VerifyKey | None:
    """Return the key that signs a job's versions, None where no signature is asked for. Raises
    SignatureError for a job without a key among those of others.
    """
    return keys.of(job) if isinstance(keys, JobKeys) else keys


class SigningKey:
    """Private Ed25519 key of a trainer, which signs manifests and catalogs.

    It stays with the trainer.
    """

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def generate(cls) -> SigningKey:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_hex(cls, seed_hex: str) -> SigningKey:
        """Return the key of a 32-byte seed of 64 hex digits. Raises SignatureError."""
        try:
            return cls(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(seed_hex.strip())))
        except ValueError as error:
            raise SignatureError("a signing key is 64 hex digits") from error

    @classmethod
    def load(cls, path: Path) -> SigningKey:
        """Read a key that `save` wrote. Raises SignatureError for anything else.

        The public half stands behind the seed: a public key is never taken for a private one.
        """
        text = path.read_text(encoding="ascii").strip()
        key = cls.from_hex(text[: 2 * SEED_BYTES])
        if text[2 * SEED_BYTES :] != key.verify_key.hex:
            raise SignatureError("a private key is 128 hex digits: its seed and its public key")
        return key

    def save(self, path: Path) -> None:
        """Write the key to a new file with mode 0600. Raises FileExistsError."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(self._key.private_bytes_raw().hex() + self.verify_key.hex + "\n")

    @property
    def verify_key(self) -> VerifyKey:
        """Public key, which verifies this key's signatures."""
        return VerifyKey(self._key.public_key().public_bytes_raw().hex())

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


class Kind(IntEnum):
    """Kind of a signed payload: the signature of one kind does not verify as another."""

    MANIFEST = 1
    CATALOG = 2


def _head(kind: Kind) -> bytes:
    return _MAGIC + bytes((FORMAT, kind, 0, 0))


HEAD_BYTES: Final = len(_head(Kind.MANIFEST)) + SIGNATURE_BYTES
"""Bytes that an envelope adds to its payload."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A payload that is not parsed yet, and the signature that came with it (empty: none).

    The payload is a view of the received bytes, not a copy: copying megabytes holds the
    interpreter's lock.
    """

    kind: Kind
    payload: bytes | memoryview
    signature: bytes = b""

    @classmethod
    def of(cls, raw: bytes | bytearray, kind: Kind, most_bytes: int) -> Envelope:
        """Return the envelope in untrusted bytes, of which the payload is not parsed and not
        verified.

        Raises ManifestError for more than `most_bytes`, another kind or another format.
        """
        if len(raw) > most_bytes:
            raise ManifestError(f"{len(raw)} bytes; {most_bytes} are allowed")
        head = _head(kind)
        if len(raw) < HEAD_BYTES or not raw.startswith(head):
            raise ManifestError(
                f"not a {kind.name.lower()} of format {FORMAT}; do publisher and node run the same"
                " version of ROSE?"
            )
        signature = bytes(raw[len(head) : HEAD_BYTES])
        payload = memoryview(raw)[HEAD_BYTES:]
        return cls(kind, payload, b"" if signature == _UNSIGNED else signature)

    def signed(self, key: SigningKey) -> Envelope:
        """Return an envelope of the same payload with `key`'s signature."""
        return Envelope(self.kind, self.payload, key.sign(self._message()))

    def verify(self, key: VerifyKey) -> None:
        """Raise SignatureError unless `key` signed exactly this payload as this kind."""
        if not self.signature:
            raise SignatureError("there is no signature; let the job's trainer publish it")
        key.verify(self._message(), self.signature)

    def to_bytes(self) -> bytes:
        return b"".join((_head(self.kind), self.signature or _UNSIGNED, self.payload))

    def _message(self) -> bytes:
        digest = blake3.blake3()
        payload = memoryview(self.payload)
        for at in range(0, len(payload), _BLOCK_BYTES):
            digest.update(payload[at : at + _BLOCK_BYTES])
        return _DOMAIN + _head(self.kind) + digest.digest()
