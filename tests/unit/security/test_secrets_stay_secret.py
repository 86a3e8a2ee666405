"""No secret stands in a log, in what a process prints, in its arguments, or in an error."""

import asyncio
import re
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from rose.cli.main import main
from rose.errors import RoseError
from rose.security import Role
from rose.security.tokens import TokenVerifier, issue
from tests.harness.certificates import Certificates
from tests.harness.waiting import PATIENCE_S, until_async
from weight_transfer import SigningKey


def marks(secret: str) -> set[str]:
    """Pieces by which a secret, or a good part of it, is found."""
    text = re.sub(r"-----[A-Z ]+-----|\s", "", secret)
    return {text[start : start + 24] for start in range(0, len(text) - 24, 24)}


def written(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path, path.read_text(errors="replace")


def _arguments(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def _errors(folder: Path) -> list[tuple[str, str]]:
    return [(path.name, path.read_text()) for path in folder.glob("*.err")]


async def _process(errors: Path, *argv: str) -> asyncio.subprocess.Process:
    with errors.open("wb") as file:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rose.cli", *argv, stdout=asyncio.subprocess.PIPE, stderr=file
        )


async def test_processes_with_certificates_and_tokens_tell_none(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    certificates = Certificates(tmp_path / "ca")
    key = SigningKey.generate()
    key.save(tmp_path / "token.key")
    (tmp_path / "keys").write_text(key.verify_key.hex)
    port = unused_tcp_port
    logs = tmp_path / "logs"
    members = {
        role: certificates.of(role, "it") for role in (Role.SCHEDULER, Role.GATEWAY, Role.TRAINER)
    }

    def shown(role: Role) -> list[str]:
        ca, certificate, own = map(str, members[role].paths)
        return ["--ca", ca, "--certificate", certificate, "--key", own, "--log-dir", str(logs)]

    tokens = [issue(key, "it"), issue(key, "it", now_s=1.0), issue(SigningKey.generate(), "it")]
    scheduler = await _process(
        tmp_path / "scheduler.err",
        *("scheduler", "--port", str(port), "--store", str(tmp_path / "store")),
        *shown(Role.SCHEDULER),
    )
    gateway = await _process(
        tmp_path / "gateway.err",
        *("gateway", "--port", "0", "--scheduler", f"127.0.0.1:{port}"),
        *("--token-keys", str(tmp_path / "keys")),
        *shown(Role.GATEWAY),
    )
    said: list[str] = []
    try:
        assert gateway.stdout
        async with asyncio.timeout(PATIENCE_S):
            url = (await gateway.stdout.readline()).decode().split()[-1]
        context = ssl.create_default_context(cafile=str(certificates.ca.file))
        connector = aiohttp.TCPConnector(ssl=context)
        async with aiohttp.ClientSession(url, connector=connector) as session:
            for token in tokens:
                headers = {"Authorization": f"Bearer {token}"}
                async with session.get(f"/rose/v1/explain/{token}", headers=headers) as answer:
                    said.append(answer.headers.get("WWW-Authenticate", ""))
                    assert answer.status in {401, 404}
        for process in (scheduler, gateway):
            arguments = _arguments(process.pid)
            assert "--key" in arguments
            said.append(arguments)
        await until_async(
            lambda: "caller_refused" in (logs / "events-gateway.jsonl").read_text(),
            PATIENCE_S,
            "the refusal",
        )
    finally:
        for process in (gateway, scheduler):
            process.terminate()
            said.append((await process.communicate())[0].decode())
    private = [files.material().key.decode() for files in members.values()]
    private.append((tmp_path / "token.key").read_text())
    everything = [(str(path), text) for path, text in written(logs)]
    everything += [(name, text) for name, text in _errors(tmp_path)]
    assert len(everything) >= 6
    everything.append(("said", "\n".join(said)))
    for secret in (*private, *tokens):
        for where, text in everything:
            assert not any(mark in text for mark in marks(secret)), where


def test_no_command_quotes_a_file_that_may_hold_a_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = Certificates(tmp_path / "ca").of(Role.NODE, "n0").paths[2]
    with pytest.raises(RoseError) as caught:
        TokenVerifier(key)
    for argv, code in (
        (["token", "issue", "--key", str(key), "--job", "x"], 2),
        (["certs", "show", str(key)], 2),
        (["audit", "verify", str(key)], 1),
        (["audit", "tail", str(key)], 0),
    ):
        assert main(argv) == code
    told = "".join((repr(caught.value), repr(caught.value.__cause__), *capsys.readouterr()))
    assert not any(mark in told for mark in marks(key.read_text()))
