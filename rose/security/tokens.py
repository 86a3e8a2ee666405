"""Job tokens: short-lived bearer tokens of one job, signed by an operator's Ed25519 key.

    rose1.PAYLOAD.SIGNATURE, both base64url without padding
    PAYLOAD    JSON: job, sub (subject), aud (audience), iat and exp (Unix seconds), jti
    SIGNATURE  Ed25519 of "rose/token/1\\n" and the payload as it is sent

The signature is checked over the received bytes before they are parsed. A token cannot be
revoked: it lives for an hour by default, a day at most, and its file is replaced in time.
"""

import base64
import binascii
import hmac
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from rose.errors import ConfigError, RefusedError, decoded
from rose.security.callers import TRAINER, Caller
from rose.security.keys import check_no_key, public_key
from rose.security.watched_files import WatchedFiles, read_bounded

if TYPE_CHECKING:
    # Gateways and clients do not need its codecs.
    from weight_transfer import SigningKey

PREFIX: Final = "rose1"
AUDIENCE: Final = "rose"
LIFE_S: Final = 3_600.0
MAX_LIFE_S: Final = 86_400.0
# Clocks of a cluster differ.
LEEWAY_S: Final = 5.0
MAX_TOKEN_CHARS: Final = 2_048
MAX_NAME_CHARS: Final = 253
MAX_KEYS: Final = 8
MAX_FILE_BYTES = 16 << 10
REMEMBERED = 1_024
_DOMAIN: Final = b"rose/token/1\n"


class TokenRefusedError(RefusedError):
    """Error: a token is not for this gateway, or not valid now."""


class Claims(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Payload of a token: job, subject, audience, times of issue and expiry in Unix seconds, and
    the token's id.
    """

    job: str
    sub: str
    aud: str
    iat: int
    exp: int
    jti: str


Keys = tuple[Ed25519PublicKey, ...]
_CLAIMS = msgspec.json.Decoder(Claims)


def issue(
    key: "SigningKey",
    job: str,
    subject: str = TRAINER,
    audience: str = AUDIENCE,
    life_s: float = LIFE_S,
    now_s: float | None = None,
) -> str:
    """Return a new signed token as text, valid for `life_s` seconds from now.

    Raises ConfigError for names and times that gateways refuse.
    """
    for name, whose in ((job, "job"), (subject, "subject"), (audience, "audience")):
        if not _is_name(name):
            raise ConfigError(
                f"{whose} {name[:40]!r} is no name; give 1 to {MAX_NAME_CHARS} printable characters"
            )
    if not 1 <= life_s <= MAX_LIFE_S:
        raise ConfigError(
            f"a token lives for 1 s to {MAX_LIFE_S / 3_600:.0f} h: it cannot be taken back"
        )
    begins = int(time.time() if now_s is None else now_s)
    claims = Claims(job, subject, audience, begins, begins + int(life_s), secrets.token_hex(8))
    payload = msgspec.json.encode(claims)
    token = f"{PREFIX}.{_text(payload)}.{_text(key.sign(_DOMAIN + payload))}"
    if len(token) > MAX_TOKEN_CHARS:
        raise ConfigError("job, subject and audience are too long for one token; give shorter ones")
    return token


class TokenVerifier:
    """Verifier of tokens for one audience, by the public keys in a file (one line of hex each).

    The file is read again when it changes. Keep the old and the new key in it while tokens are
    being replaced.
    """

    def __init__(
        self, keys: Path, audience: str = AUDIENCE, clock: Callable[[], float] = time.time
    ) -> None:
        """Read the public keys. clock: Unix seconds. Raises ConfigError for a file without keys."""
        self._audience = audience
        self._clock = clock
        # Keys, and the claims that one of them signed.
        self._keys = WatchedFiles[tuple[Keys, dict[str, Claims]]](
            (keys,), lambda: (_keys_of(keys), {})
        )

    def caller(self, token: str) -> Caller:
        """Return the caller that a valid token names.

        Raises TokenRefusedError, whose message quotes none of the token.
        """
        claims = self._signed(token)
        now_s = self._clock()
        if claims.aud != self._audience:
            raise TokenRefusedError(
                f"the token is for {claims.aud[:80]!r}, not for {self._audience!r}: issue one with"
                f" --audience {self._audience}"
            )
        if not 0 < claims.exp - claims.iat <= MAX_LIFE_S:
            raise TokenRefusedError("the token lives too long: issue one of a day at most")
        if now_s < claims.iat - LEEWAY_S:
            raise TokenRefusedError("the token is not valid yet: are the clocks right?")
        if now_s >= claims.exp + LEEWAY_S:
            raise TokenRefusedError(
                f"the token expired {now_s - claims.exp:.0f} s ago: put a newer one in its file"
            )
        return Caller(claims.job, claims.sub)

    def _signed(self, token: str) -> Claims:
        """Return the token's claims, from a cache, if one of the keys signed it.

        Raises TokenRefusedError.
        """
        keys, known = self._keys.newest()
        if token not in known:
            claims = _claims_of(token, keys)
            if len(known) >= REMEMBERED:
                known.clear()
            known[token] = claims
        return known[token]


class TokenFile:
    """Token in a file that another program renews; the file is read again when it changes."""

    def __init__(self, path: Path) -> None:
        """Read the token. Raises ConfigError for a file without one."""
        self._file = WatchedFiles((path,), lambda: _token_of(path))

    def token(self) -> str:
        """Return the file's token, or the last usable one while the file cannot be read."""
        return self._file.newest()


class SecretFile:
    """Secret in a file, which is read again at each check, so that it may be replaced."""

    def __init__(self, path: Path, option: str, least_chars: int = 16) -> None:
        """Read the secret. option: names the file in errors. Raises ConfigError without one."""
        self._path, self._option, self._least_chars = path, option, least_chars
        self._read()

    def has(self, shown: str) -> bool:
        """Return True if `shown` is the secret; False while the file has no usable one."""
        try:
            return hmac.compare_digest(self._read(), shown.encode("utf-8", "replace"))
        except ConfigError:
            return False

    def is_borne(self, authorization: str) -> bool:
        """Return True if a header `Authorization` bears the secret."""
        scheme, _, shown = authorization.partition(" ")
        return scheme.lower() == "bearer" and self.has(shown.strip())

    def _read(self) -> bytes:
        unread = f"{self._option} {{}} cannot be read"
        secret = read_bounded(self._path, MAX_FILE_BYTES, unread).strip()
        check_no_key(self._path, secret)
        if len(secret) < self._least_chars:
            raise ConfigError(
                f"{self._option} {self._path} holds {len(secret)} characters; put at least"
                f" {self._least_chars} there: openssl rand -hex 32"
            )
        return secret


def _claims_of(token: str, keys: Keys) -> Claims:
    parts = token.split(".")
    if len(token) > MAX_TOKEN_CHARS or len(parts) != 3 or parts[0] != PREFIX:
        raise TokenRefusedError("this is no token of ROSE: issue one with `rose token issue`")
    try:
        payload, signature = _data(parts[1]), _data(parts[2])
    except (ValueError, binascii.Error) as error:
        raise TokenRefusedError("the token is damaged: issue another one") from error
    if not any(_signs(key, payload, signature) for key in keys):
        raise TokenRefusedError("no key of this gateway signed the token: issue one with its key")
    try:
        claims = decoded(_CLAIMS, payload)
    except msgspec.DecodeError as error:
        raise TokenRefusedError("the token says something else than a token of ROSE") from error
    if not (_is_name(claims.job) and _is_name(claims.sub)):
        raise TokenRefusedError("the token names no job or no subject")
    return claims


def _signs(key: Ed25519PublicKey, payload: bytes, signature: bytes) -> bool:
    try:
        key.verify(signature, _DOMAIN + payload)
    except InvalidSignature:
        return False
    return True


def _is_name(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME_CHARS and name.isprintable()


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _data(text: str) -> bytes:
    data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if _text(data) != text:
        raise ValueError("another text of the same bytes")
    return data


def _lines_of(path: Path) -> list[str]:
    try:
        text = read_bounded(path, MAX_FILE_BYTES).decode("ascii")
    except UnicodeDecodeError:
        raise ConfigError(
            f"{path} is no text; keys are lines of hex, a token is one line"
        ) from None
    return [line for line in map(str.strip, text.splitlines()) if line and line[0] != "#"]


def _keys_of(path: Path) -> Keys:
    lines = _lines_of(path)
    if not 0 < len(lines) <= MAX_KEYS:
        raise ConfigError(
            f"{path} holds {len(lines)} lines: 1 to {MAX_KEYS} public keys are wanted, a line each,"
            " as `rose token key` writes them"
        )
    try:
        keys = [bytes.fromhex(public_key(line)) for line in lines]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return tuple(map(Ed25519PublicKey.from_public_bytes, keys))


def _token_of(path: Path) -> str:
    lines = _lines_of(path)
    check_no_key(path, "\n".join(lines).encode())
    if len(lines) != 1 or len(lines[0]) > MAX_TOKEN_CHARS:
        raise ConfigError(f"{path} holds no token: one line, as `rose token issue` prints it")
    return lines[0]
