"""A token proves one job for a while, to one audience, and nothing else."""

import base64
import itertools
import json
import stat
from pathlib import Path

import pytest

from rose.cli.main import main
from rose.errors import ConfigError
from rose.security.callers import Caller
from rose.security.tokens import (
    LEEWAY_S,
    MAX_LIFE_S,
    TokenFile,
    TokenRefusedError,
    TokenVerifier,
    issue,
)
from tests.harness.waiting import HandClock
from weight_transfer import SigningKey

NOW_S = 1_800_000_000.0
KEY = SigningKey.generate()


@pytest.fixture
def clock() -> HandClock:
    clock = HandClock()
    clock.now_s = NOW_S
    return clock


@pytest.fixture
def verifier(tmp_path: Path, clock: HandClock) -> TokenVerifier:
    (tmp_path / "keys").write_text(KEY.verify_key.hex + "\n")
    return TokenVerifier(tmp_path / "keys", clock=clock)


def made(**changes: object) -> str:
    options = {"job": "grpo", "now_s": NOW_S, **changes}
    return issue(KEY, **options)  # type: ignore[arg-type]


def refused(verifier: TokenVerifier, token: str) -> str:
    with pytest.raises(TokenRefusedError) as caught:
        verifier.caller(token)
    said = str(caught.value)
    assert "\n" not in said
    # No part of a token is repeated: the line goes to logs.
    assert not any(len(part) > 8 and part in said for part in token.split("."))
    return said


def test_a_token_names_job_and_subject(verifier: TokenVerifier) -> None:
    assert verifier.caller(made(subject="eval")) == Caller("grpo", "eval")
    assert verifier.caller(made()) == Caller("grpo", "trainer")


def test_a_token_ends(verifier: TokenVerifier, clock: HandClock) -> None:
    token = made(life_s=60)
    clock.now_s = NOW_S + 60 + LEEWAY_S - 1
    assert verifier.caller(token).job == "grpo"
    clock.now_s = NOW_S + 60 + LEEWAY_S
    assert "the token expired 5 s ago" in refused(verifier, token)


def test_a_token_of_the_future_is_none(verifier: TokenVerifier) -> None:
    assert verifier.caller(made(now_s=NOW_S + LEEWAY_S))
    assert "not valid yet" in refused(verifier, made(now_s=NOW_S + 60))


def encoded(*parts: bytes) -> str:
    texts = (base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)
    return ".".join(("rose1", *texts))


def claims_of(token: str) -> bytes:
    return base64.urlsafe_b64decode(token.split(".")[1] + "==")


def signed(payload: bytes, domain: bytes = b"rose/token/1\n") -> str:
    return encoded(payload, KEY.sign(domain + payload))


def edited(**changes: object) -> str:
    """Return a token whose claims were changed after it was signed."""
    payload = claims_of(made())
    text = json.dumps(json.loads(payload) | changes, separators=(",", ":")).encode()
    return ".".join((encoded(text), made().split(".")[2]))


CLAIMS = {
    "job": "j",
    "sub": "s",
    "aud": "rose",
    "iat": int(NOW_S),
    "exp": int(NOW_S) + 9,
    "jti": "",
}


def claiming(**changes: object) -> str:
    return signed(json.dumps(CLAIMS | changes).encode())


@pytest.mark.parametrize(
    ("token", "why"),
    [
        # Signed for somebody else, by somebody else, or as something else.
        (made(audience="staging"), "is for 'staging', not for 'rose'"),
        (issue(SigningKey.generate(), "grpo"), "no key of this gateway"),
        (signed(claims_of(made()), domain=b""), "no key"),
        # Edited.
        (edited(job="ppo"), "no key"),
        (edited(exp=2**40), "no key"),
        (edited(aud="x"), "no key"),
        (edited(sub="y"), "no key"),
        # No token at all.
        ("", ""),
        ("rose1", ""),
        ("rose1..", ""),
        ("rose2.aaaa.bbbb", ""),
        ("rose1.a.b", ""),
        ("rose1.é.b", ""),
        ("rose1." + "a" * 4_000 + ".b", ""),
        ("eyJhbGciOiJub25lIn0.e30.", ""),
        (made() + "=", ""),
        (made() + ".x", ""),
        (made().replace("rose1", "Rose1"), ""),
        (made()[:-1], ""),
        # Signed by the right key, and no token all the same.
        (signed(b""), ""),
        (signed(b"\xff"), ""),
        (signed(b"[" * 5_000), ""),
        (signed(b"{}"), ""),
        (claiming(admin=True), ""),
        (claiming(exp="never"), ""),
        (claiming(exp=1e400), ""),
        (claiming(job=""), ""),
        (claiming(job="a\x1fb"), ""),
        (claiming(exp=int(NOW_S + MAX_LIFE_S) + 9), ""),
        (claiming(exp=int(NOW_S)), ""),
    ],
    ids=itertools.count(),  # The tokens differ in each process.
)
def test_what_is_no_token_is_refused_with_one_line(
    verifier: TokenVerifier, token: str, why: str
) -> None:
    assert verifier.caller(claiming()) == Caller("j", "s")
    assert why in refused(verifier, token)


def test_keys_change_without_a_restart(
    verifier: TokenVerifier, tmp_path: Path, clock: HandClock
) -> None:
    newer, token = SigningKey.generate(), made()
    keys = tmp_path / "keys"
    keys.write_text(f"# both, for a day\n{KEY.verify_key.hex}\n{newer.verify_key.hex}\n")
    theirs = issue(newer, "grpo", now_s=NOW_S)
    assert verifier.caller(token) == verifier.caller(theirs)
    keys.write_text("nonsense\n")
    assert verifier.caller(theirs).job == "grpo"
    keys.write_text(f"{newer.verify_key.hex}\n")
    assert verifier.caller(theirs).job == "grpo"
    assert "no key" in refused(verifier, token)


def test_the_newest_token_of_a_file_is_borne(tmp_path: Path) -> None:
    file = tmp_path / "token"
    for bad in ("", "a\nb\n"):
        file.write_text(bad)
        with pytest.raises(ConfigError, match="holds no token"):
            TokenFile(file)
    file.write_text("rose1.a.b\n")
    borne = TokenFile(file)
    assert borne.token() == "rose1.a.b"
    file.write_text("rose1.cc.dd\n")
    assert borne.token() == "rose1.cc.dd"
    file.write_text("")
    assert borne.token() == "rose1.cc.dd"


@pytest.mark.parametrize(
    "changes", [{"job": ""}, {"job": "a\n"}, {"life_s": 0}, {"life_s": MAX_LIFE_S + 1}]
)
def test_what_no_gateway_takes_is_not_signed(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        made(**changes)


def test_the_command_line_makes_keys_and_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, out = tmp_path / "t.key", tmp_path / "token"
    assert main(["token", "issue", "--key", str(key), "--job", "grpo"]) == 2
    assert main(["token", "key", "--out", str(key)]) == 0
    assert main(["token", "key", "--out", str(key)]) == 2
    capsys.readouterr()
    assert main(["token", "issue", "--key", str(key), "--job", "grpo", "--ttl", "5m"]) == 0
    token = capsys.readouterr().out.strip()
    assert main(["token", "issue", "--key", str(key), "--job", "g2", "--out", str(out)]) == 0
    assert capsys.readouterr().out == ""
    verifier = TokenVerifier(tmp_path / "t.key.pub")
    assert verifier.caller(token).job == "grpo"
    assert verifier.caller(TokenFile(out).token()).job == "g2"
    assert {stat.S_IMODE(each.stat().st_mode) for each in (key, out)} == {0o600}
