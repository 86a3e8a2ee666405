"""Fuzz target: tokens, identities and audit lines of others are taken or refused, with one line."""

import base64
import contextlib
import tempfile
from pathlib import Path
from typing import Final
from unittest.mock import patch

from rose.errors import ConfigError
from rose.security.audit_log import START, opened, sealed
from rose.security.callers import Caller
from rose.security.certificates import peer_of
from rose.security.roles import Identity
from rose.security.tokens import MAX_NAME_CHARS, TokenRefusedError, TokenVerifier, issue
from weight_transfer import SigningKey

NOW_S: Final = 1_800_000_000.0
KEY: Final = SigningKey.from_hex("07" * 32)


def _verifier() -> TokenVerifier:
    with tempfile.NamedTemporaryFile("w", suffix=".pub", delete=False) as file:
        file.write(KEY.verify_key.hex)
    try:
        return TokenVerifier(Path(file.name), clock=lambda: NOW_S)
    finally:
        Path(file.name).unlink()


VERIFIER: Final = _verifier()


def _check(caller: Caller) -> None:
    """Check that an accepted token's names can be a job and a subject."""
    for name in (caller.job, caller.subject):
        assert name is not None
        assert 0 < len(name) <= MAX_NAME_CHARS
        assert name.isprintable()


def run_token(data: bytes) -> None:
    """Any text as a token: none but those that the key signed is taken."""
    text = data.decode("latin-1")
    with contextlib.suppress(TokenRefusedError):
        VERIFIER.caller(text)
        assert text == TOKEN, "a token that nobody signed was taken"


def run_signed_payload(data: bytes) -> None:
    """Any payload under a good signature."""
    signature = KEY.sign(b"rose/token/1\n" + data)
    parts = [base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in (data, signature)]
    with contextlib.suppress(TokenRefusedError):
        _check(VERIFIER.caller(".".join(("rose1", *parts))))


def run_identity(data: bytes) -> None:
    """Any text as the URI of a certificate; what is read is written the same."""
    uri = data.decode("utf-8", "replace")
    with contextlib.suppress(ConfigError):
        assert Identity.parse(uri).uri == uri


def run_certificate(data: bytes) -> None:
    """Any bytes as the certificate of a peer."""
    with contextlib.suppress(ConfigError):
        peer_of(data)


def run_audit_line(data: bytes) -> None:
    """Any bytes as a line of an audit log."""
    with contextlib.suppress(ValueError):
        opened(data)


# The same in each run: the corpus of an earlier one has tokens that were signed.
with patch("rose.security.tokens.secrets.token_hex", return_value="07" * 8):
    TOKEN = issue(KEY, "job", now_s=NOW_S)
SEEDS: Final = {
    "run_token": [TOKEN.encode()],
    "run_signed_payload": [base64.urlsafe_b64decode(TOKEN.split(".")[1] + "==")],
    "run_identity": [b"spiffe://rose/prod/node/gpu-7"],
    "run_audit_line": [
        sealed({"n": 1, "t": 1.0, "source": "s", "event": "e", "fields": {}}, START)[0].rstrip()
    ],
}
