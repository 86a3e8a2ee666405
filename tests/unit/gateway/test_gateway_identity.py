"""A gateway asks who calls: by certificate over TLS, by token, and by both together."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rose.cli.cluster.explain import explain
from rose.client import GatewayCredentials, RequestRefused, RolloutClient, Sampling
from rose.command_line.output import View
from rose.errors import ConfigError, RefusedError
from rose.gateway import Gateway, GatewaySettings
from rose.security import CertificateFiles, Role
from rose.security.audit_log import verify
from rose.security.tokens import issue
from tests.fakes.replica import StandInReplica
from tests.harness.certificates import Certificates
from tests.unit.gateway.gateway_cases import entry, gateway_with, until
from tests.unit.gateway.wire_cases import VLLM, vllm_body
from weight_transfer import SigningKey

JOB = "grpo"


class GuardedGateway:
    """Gateway with TLS that also takes tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.certificates = Certificates(folder / "ca")
        self.key = SigningKey.generate()
        (folder / "keys").write_text(self.key.verify_key.hex)
        self.replica: StandInReplica
        self.gateway: Gateway

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.gateway.port}"

    def ca_alone(self) -> ssl.SSLContext:
        """Return the TLS of a caller that shows nothing, and knows the gateway's CA."""
        return ssl.create_default_context(cafile=str(self.certificates.ca.file))

    def session(self, context: ssl.SSLContext, *shown: Path, **more: Any) -> aiohttp.ClientSession:
        if shown:
            context.load_cert_chain(*shown)
        return aiohttp.ClientSession(self.url, connector=aiohttp.TCPConnector(ssl=context), **more)

    async def turn(
        self, files: CertificateFiles | None, token: str = "", **body: Any
    ) -> tuple[int, str]:
        """Status and line of a turn that a caller asks for with what it has."""
        context = files.client_context() if files else self.ca_alone()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with (
            self.session(context, headers=headers) as session,
            session.post(VLLM, json=vllm_body(2, **body)) as answer,
        ):
            told = await answer.json()
            if answer.status == 401:
                assert answer.headers["WWW-Authenticate"] == "Bearer"
            return answer.status, told.get("error", {}).get("message", "")


@pytest.fixture
async def case(tmp_path: Path) -> AsyncIterator[GuardedGateway]:
    case = GuardedGateway(tmp_path)
    async with (
        StandInReplica() as case.replica,
        gateway_with(
            entry(case.replica, "own-0"),
            certificates=case.certificates.of(Role.GATEWAY, "gw"),
            token_keys=tmp_path / "keys",
            log_dir=tmp_path / "log",
        ) as case.gateway,
    ):
        yield case


FORBIDDEN = "may not use a gateway; operator or trainer may"
OWN = "this caller's job is 'grpo', not 'ppo'"


@pytest.mark.parametrize(
    ("role", "name", "token", "job", "status", "says"),
    [
        (Role.TRAINER, JOB, "", None, 200, ""),
        (Role.TRAINER, JOB, "", JOB, 200, ""),
        (Role.TRAINER, JOB, "", "ppo", 403, OWN),
        *((Role.OPERATOR, "ada", "", job, 200, "") for job in (None, JOB, "ppo")),
        *(
            (role, "x", "", None, 403, f"{role} x {FORBIDDEN}")
            for role in (Role.NODE, Role.GATEWAY, Role.SCHEDULER, Role.RELAY)
        ),
        (None, "", "", None, 401, "Bearer TOKEN, or a certificate"),
        (None, "", JOB, None, 200, ""),
        (None, "", JOB, "ppo", 403, OWN),
        (Role.TRAINER, "ppo", JOB, None, 403, "a token is shown by its own job"),
    ],
)
async def test_a_caller_is_who_its_certificate_and_token_say(
    case: GuardedGateway,
    role: Role | None,
    name: str,
    token: str,
    job: str | None,
    status: int,
    says: str,
) -> None:
    """token: the job of the token that is shown, "" for no token."""
    files = case.certificates.of(role, name) if role else None
    got, line = await case.turn(files, issue(case.key, token) if token else "", job=job)
    assert got == status
    assert says in line


async def test_bad_tokens_are_refused_recorded_and_never_repeated(case: GuardedGateway) -> None:
    now_s = 1_000_000_000.0
    tokens = {
        "expired": issue(case.key, JOB, now_s=now_s),
        "not for 'rose'": issue(case.key, JOB, audience="staging"),
        "no key": issue(SigningKey.generate(), JOB),
        "no token": "x" * 3_000,
    }
    for line, token in tokens.items():
        # A good certificate does not make a bad token better.
        for files in (None, case.certificates.of(Role.TRAINER, JOB)):
            status, said = await case.turn(files, token)
            assert (status, line in said) == (401, True), said
    assert case.replica.requests == []
    case.gateway.flush_logs()
    (log,) = (case.folder / "log").glob("events-gateway.jsonl")
    text = log.read_text()
    refusals = [e for e in map(json.loads, text.splitlines()) if e["event"] == "caller_refused"]
    assert len(refusals) == 2 * len(tokens)
    assert {each["path"] for each in refusals} == {VLLM}
    assert not any(token[:40] in text for token in tokens.values())
    audited = case.folder / "log" / "audit-gateway.jsonl"
    await until(lambda: audited.exists() and verify(audited).records == len(refusals))
    assert verify(audited).wrong == ""


async def test_another_cas_and_expired_certificates_are_refused_by_tls(
    case: GuardedGateway,
) -> None:
    foreign = Certificates(case.folder / "theirs").ca.issue(Role.TRAINER, JOB)
    late = case.certificates.ca.issue(Role.TRAINER, "late", life_s=-10)
    for issued in (foreign, late):
        async with case.session(case.ca_alone(), issued.certificate, issued.key) as session:
            with pytest.raises((aiohttp.ClientError, OSError)):
                await session.post(VLLM, json=vllm_body(2))
    assert case.replica.requests == []


async def test_another_clusters_member_is_refused_under_one_ca(case: GuardedGateway) -> None:
    other = Certificates(case.folder / "staging", "staging")
    ours = case.certificates.ca.file
    theirs = other.of(Role.TRAINER, JOB)
    ours.write_bytes(ours.read_bytes() + other.ca.file.read_bytes())
    _, certificate, key = theirs.paths
    status, line = await case.turn(CertificateFiles(ours, certificate, key))
    assert status == 403
    assert "is of cluster staging; this is prod" in line


async def test_probes_and_scrapers_show_nothing(case: GuardedGateway) -> None:
    async with case.session(case.ca_alone()) as session:
        for path, status in (
            ("/health", 200),
            ("/metrics", 200),
            ("/rose/v1/stats", 401),
            ("/v1/models", 401),
            ("/rose/v1/explain/x", 401),
            ("/rose/v1/versions", 401),
            ("/health/../rose/v1/stats", 401),
        ):
            async with session.get(path) as answer:
                assert answer.status == status, path
        for path in ("/inference/v1/abort_requests", "/finish_session", "/tokenize", "/nowhere"):
            async with session.post(path, json={}) as answer:
                assert answer.status == 401, path


async def test_the_trainers_client_shows_its_newest_token(case: GuardedGateway) -> None:
    file = case.folder / "token"
    file.write_text(issue(case.key, JOB))
    credentials = GatewayCredentials(token_file=file, ca=case.certificates.ca.file)
    async with RolloutClient(case.url, credentials=credentials) as client:
        turn = await client.generate([1, 2], Sampling(max_tokens=2))
        assert len(turn.token_ids) == 2
        file.write_text(issue(case.key, JOB, audience="elsewhere"))
        with pytest.raises(RequestRefused, match="HTTP 401"):
            await client.generate([1, 2], Sampling(max_tokens=2))
        file.write_text(issue(case.key, JOB, "eval"))
        await client.generate([1, 2], Sampling(max_tokens=2), request_id="q")
    assert len((await _explained(case, "q", issue(case.key, JOB, "eval"))).lines) == 1
    with pytest.raises(RefusedError, match="remembers no choice"):
        await _explained(case, "q", issue(case.key, JOB))
    with pytest.raises(RefusedError, match="--token-file"):
        await _explained(case, "q", "")


async def _explained(case: GuardedGateway, subject: str, token: str) -> View:
    reader = case.certificates.of(Role.NODE, "reader")
    return await asyncio.to_thread(explain, case.url, subject, "", token, reader)


async def test_a_client_with_a_certificate_needs_no_token(case: GuardedGateway) -> None:
    ca, certificate, key = case.certificates.of(Role.TRAINER, JOB).paths
    credentials = GatewayCredentials(ca=ca, certificate=certificate, key=key)
    async with RolloutClient(case.url, credentials=credentials) as client:
        assert (await client.generate([1], Sampling(max_tokens=2))).token_ids


def test_a_client_sends_no_token_in_the_clear(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in the clear"):
        RolloutClient("http://gw:8000", credentials=GatewayCredentials(token_file=tmp_path))
    # A CA alone is enough, so the error of half a pair does not ask for all three.
    with pytest.raises(ConfigError, match="`key` is missing; give `certificate` and `key`"):
        GatewayCredentials(certificate=tmp_path)
    RolloutClient("http://127.0.0.1:8000", credentials=GatewayCredentials(token_file=tmp_path))


def test_the_network_is_not_served_by_tokens_alone(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(SigningKey.generate().verify_key.hex)
    with pytest.raises(ConfigError, match="give --ca, --certificate and --key"):
        GatewaySettings(port=0, host="0.0.0.0", scheduler="127.0.0.1:1", token_keys=keys)
