"""Key files of ROSE and of TLS, told apart, so that one kind is never taken for another.

A private signing key is 128 hex digits, its seed and its public key; a public key is 64.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rose.errors import ConfigError

if TYPE_CHECKING:
    # Gateways and clients check tokens and do not need its codecs.
    from weight_transfer import SigningKey

_PEM: Final = re.compile(rb"-----BEGIN ([A-Z0-9 ]{1,40})-----")
# Random bytes of a key's length have about 30 different values; 16 come once in 10^13 keys.
_LEAST_DIFFERENT_BYTES: Final = 17


def kind_of(data: bytes) -> str:
    """Return a phrase for messages that says what kind of key or text a file's bytes are; it quotes
    none of them.
    """
    text = data.strip()
    labels = sorted({label.decode() for label in _PEM.findall(text)})
    if not text:
        return "nothing"
    if labels:
        locked = " under a password" if b"ENCRYPTED" in text else ""
        return f"PEM of {' and '.join(labels)}{locked}"
    if text.startswith(b"rose1."):
        return "a job token"
    if re.fullmatch(rb"[0-9a-fA-F]+", text):
        if is_private(text):
            return "a private signing key"
        return "a public key of 64 hex digits" if len(text) == 64 else f"{len(text)} hex digits"
    return "text that is no key" if text.isascii() else "bytes that are no text"


def is_private(text: bytes) -> bool:
    """Return True for the text of a private signing key: 128 hex digits of a seed and of its public
    key.
    """
    if not re.fullmatch(rb"[0-9a-f]{128}", text.strip()):
        return False
    pair = bytes.fromhex(text.decode())
    seed = Ed25519PrivateKey.from_private_bytes(pair[:32])
    return seed.public_key().public_bytes_raw() == pair[32:]


def check_no_key(path: Path, data: bytes) -> None:
    """Raise ConfigError if a token file's data is a private key, which would be sent off."""
    if is_private(data) or _PEM.search(data):
        raise ConfigError(
            f"{path} holds {kind_of(data)}, and a token is wanted: keys never leave their machine"
        )


def public_key(text: str) -> str:
    """Return the text if it is a public signing key of 64 hex digits.

    Raises ConfigError for anything else, and for placeholders.
    """
    wanted = "the 64 hex digits are wanted that `rose token key` writes to FILE.pub"
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise ConfigError(f"{kind_of(text.encode())} is no public key; {wanted}")
    if len(set(bytes.fromhex(text))) < _LEAST_DIFFERENT_BYTES:
        raise ConfigError(f"{text[:8]}… is a placeholder and no public key; {wanted}")
    return text


def signing_key(path: Path) -> "SigningKey":
    """Return the private signing key in a file.

    Raises ConfigError for a file that holds anything else.
    """
    from weight_transfer import SignatureError, SigningKey

    made = f"make a pair: rose token key --out {path}"
    try:
        return SigningKey.load(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); {made}") from error
    except (UnicodeDecodeError, SignatureError) as error:
        data = path.read_bytes()
        older = "; the key of an older ROSE lacks the digits of its public key: append them"
        raise ConfigError(
            f"{path} holds {kind_of(data)}, and the private key of a pair, 128 hex digits, is"
            f" wanted; {made}{older if len(data.strip()) == 64 else ''}"
        ) from error
