"""Ed25519 keys: a manifest activates only when the trainer's key signed it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from weight_transfer.errors import SignatureError

SIGNATURE_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class VerifyKey:
    """Public half: 64 hex digits, safe to hand around."""

    hex: str

    def verify(self, message: bytes, signature: bytes) -> None:
        """Raise SignatureError unless `signature` signs `message`."""
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.hex))
            key.verify(signature, message)
        except (ValueError, InvalidSignature) as error:
            raise SignatureError(
                f"signature does not match key {self.hex[:16]}…; is this the job's trainer?"
            ) from error


class SigningKey:
    """Private half; stays with the trainer."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def generate(cls) -> SigningKey:
        """Make a new key."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_hex(cls, seed_hex: str) -> SigningKey:
        """Make the key of a 32-byte seed."""
        try:
            return cls(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(seed_hex.strip())))
        except ValueError as error:
            raise SignatureError("a signing key is 64 hex digits") from error

    @classmethod
    def load(cls, path: Path) -> SigningKey:
        """Read a key that `save` wrote."""
        return cls.from_hex(path.read_text(encoding="ascii"))

    def save(self, path: Path) -> None:
        """Write the key to a new file that only its owner can read."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(self._key.private_bytes_raw().hex() + "\n")

    @property
    def verify_key(self) -> VerifyKey:
        """Public half."""
        return VerifyKey(self._key.public_key().public_bytes_raw().hex())

    def sign(self, message: bytes) -> bytes:
        """Return the signature of `message`."""
        return self._key.sign(message)
