"""Events of a scheduler at a receiver that verifies them by the library of Standard Webhooks."""

import asyncio
import base64
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from cloudevents.core.bindings.http import HTTPMessage, from_structured
from cloudevents.core.formats.json import JSONFormat
from standardwebhooks import Webhook as Verifier
from standardwebhooks import WebhookVerificationError

from rose.addresses import free_port
from rose.errors import ConfigError
from rose.main.scheduler import main, settings_of
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_channel
from rose.rpc.rose_pb2_grpc import SchedulerStub
from rose.scheduler import webhook as module
from rose.scheduler.webhook import EVENTS, NAMES, Severity, Webhook, WebhookSettings, source_of
from tests.harness.waiting import PATIENCE_S, until_async
from tests.harness.web_server import served

ROOT = Path(__file__).parents[3]


def a_secret(byte: int = 7, size: int = 32) -> str:
    return "whsec_" + base64.b64encode(bytes([byte]) * size).decode()


class Receiver:
    """Receiver that answers with each of `answers` in turn, then 204; it keeps what is verified."""

    def __init__(self, *answers: int, secret: str = a_secret(), slow_s: float = 0.0) -> None:
        self.answers, self.slow_s, self.secret = list(answers), slow_s, secret
        self.posts: list[tuple[str, dict[str, Any]]] = []
        self.refused = 0

    async def __call__(self, http: web.Request) -> web.Response:
        body = await http.read()
        try:
            said = Verifier(self.secret).verify(body, dict(http.headers))
        except WebhookVerificationError:
            self.refused += 1
            return web.Response(status=401)
        message = HTTPMessage({"content-type": http.headers["Content-Type"]}, body)
        event = from_structured(message, JSONFormat())
        assert http.headers["webhook-id"] == event.get_id() == said["id"]
        self.posts.append((event.get_id(), said))
        await asyncio.sleep(self.slow_s)
        headers = {"Location": "/elsewhere"}
        return web.Response(status=self.answers.pop(0) if self.answers else 204, headers=headers)


class Sending:
    """A webhook that runs, the sink that feeds it, and how many events ended how."""

    def __init__(self, url: str, file: Path, least: Severity, pauses_s: tuple[float, ...]) -> None:
        self.ended: Counter[str] = Counter()
        self.audited: list[str] = []
        settings = WebhookSettings(url, file, least)
        counted: Callable[[str], object] = lambda result: self.ended.update([result])  # noqa: E731
        self.webhook = Webhook(settings, source_of("prod", "h:1"), counted, pauses_s)
        self.tell = self.webhook.telling(lambda event, fields, by: self.audited.append(event))

    async def until(self, **ended: int) -> None:
        await until_async(lambda: self.ended == ended, PATIENCE_S, f"{ended} and not {self.ended}")


@asynccontextmanager
async def sending(
    url: str,
    folder: Path,
    secrets: str = a_secret(),
    least: Severity = Severity.INFO,
    pauses_s: tuple[float, ...] = (0.01,) * 4,
) -> AsyncIterator[Sending]:
    (folder / "secret").write_text(secrets)
    made = Sending(url, folder / "secret", least, pauses_s)
    task = asyncio.create_task(made.webhook.run())
    try:
        yield made
    finally:
        task.cancel()


async def test_an_event_is_a_signed_cloud_event_with_allowed_fields_alone(tmp_path: Path) -> None:
    receiver = Receiver()
    async with served(receiver) as url, sending(url, tmp_path) as sender:
        sender.tell(
            "policy_applied",
            {"policy": {"name": "night", "mode": "Active", "nodeSelector": {"pool": "secret"}}},
            "alice",
        )
        sender.tell("lease_granted", {"replica": "g0"}, "")
        sender.tell("activation_failed", {"replica": "g0", "message": "x" * 999, "token": "t"}, "")
        sender.tell("SetHarvestRequest", {"mode": "HARVEST_MODE_OFF", "answer": 3}, "alice")
        await sender.until(delivered=3)
    assert sender.audited[1] == "lease_granted"
    said = [said for _, said in receiver.posts]
    assert said[0] | {"time": "", "id": ""} == {
        "specversion": "1.0",
        "id": "",
        "source": "/rose/prod/scheduler/h:1",
        "type": "dev.rose.policy_applied",
        "subject": "policy/night",
        "time": "",
        "datacontenttype": "application/json",
        "severitytext": "ticket",
        "severitynumber": 13,
        "data": {"policy": "night", "mode": "Active", "by": "alice"},
    }
    assert said[1]["data"] == {"replica": "g0", "message": "x" * 400}
    assert said[2]["type"] == "dev.rose.harvest_set"
    assert len({name for name, _ in receiver.posts}) == 3


@pytest.mark.parametrize(
    ("answers", "posts", "ended"),
    [
        ((), 1, "delivered"),
        ((503, 429, 408), 4, "delivered"),
        ((503,) * 5, 5, "failed"),
        ((400,), 1, "failed"),
        ((302,), 1, "failed"),
        ((410,), 1, "failed"),
    ],
)
async def test_an_event_is_posted_again_under_its_id_while_that_may_help(
    tmp_path: Path, caplog: pytest.LogCaptureFixture,
    answers: tuple[int, ...], posts: int, ended: str,
) -> None:  # fmt: skip
    receiver = Receiver(*answers)
    async with served(receiver) as url, sending(url, tmp_path) as sender:
        sender.tell("job_ended", {"job": "grpo"}, "")
        await sender.until(**{ended: 1})
        assert len(receiver.posts) == posts
        assert len({name for name, _ in receiver.posts}) == 1
        failed = ended == "failed"
        assert len(sender.webhook.troubles()) == len(caplog.records) == failed
        sender.tell("job_ended", {"job": "other"}, "")
        await sender.until(**Counter([ended, "delivered"]))
        assert not sender.webhook.troubles()
        assert ("takes events again" in caplog.text) == failed


async def test_a_proxy_that_cannot_be_used_is_a_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:99999")
    async with sending("http://receiver.example/rose", tmp_path) as sender:
        sender.tell("job_ended", {"job": "grpo"}, "")
        await sender.until(failed=1)
        assert "nothing can be posted there" in sender.webhook.troubles()[0]


async def test_a_receiver_that_is_down_or_slow_delays_nobody_and_costs_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.05)
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
    monkeypatch.setattr(module, "MOST_PENDING", 2)
    async with sending(f"http://127.0.0.1:{free_port()}", tmp_path) as down:
        down.tell("job_ended", {"job": "grpo"}, "")
        await down.until(failed=1)
        assert len(caplog.records) == 1
    caplog.clear()
    receiver = Receiver(slow_s=30.0)
    async with served(receiver) as url, sending(url, tmp_path) as slow:
        for _ in range(10):
            slow.tell("job_ended", {"job": "grpo"}, "")
        assert slow.ended == {"dropped": 8}
        assert len(slow.audited) == 10
        await slow.webhook.drain()
        assert "1,024" not in caplog.text
        assert "2 events wait" in caplog.text
        await slow.until(dropped=8, failed=2)
        assert len(receiver.posts) == 10


async def test_a_secret_is_replaced_without_a_lost_event(tmp_path: Path) -> None:
    receiver = Receiver(secret=a_secret(1))
    async with served(receiver) as url, sending(url, tmp_path, a_secret(1)) as sender:
        for number, (file, known) in enumerate(
            [
                (a_secret(1), a_secret(1)),
                (f"{a_secret(1)}\n{a_secret(2)}\n", a_secret(1)),
                (f"{a_secret(1)}\n{a_secret(2)}\n", a_secret(2)),
                (a_secret(2), a_secret(2)),
                ("half wri", a_secret(2)),
            ],
            1,
        ):
            (tmp_path / "secret").write_text(file)
            os.utime(tmp_path / "secret", ns=(number, number))
            receiver.secret = known
            sender.tell("job_ended", {"job": "grpo"}, "")
            await sender.until(delivered=number)
        assert not receiver.refused
        assert "whsec_" in sender.webhook.troubles()[0]
        assert a_secret(2) not in str(sender.webhook.troubles())
        receiver.secret = a_secret(3)
        sender.tell("job_ended", {"job": "grpo"}, "")
        await sender.until(delivered=5, failed=1)
        assert receiver.refused == 1


async def test_a_severity_leaves_out_what_is_less_urgent(tmp_path: Path) -> None:
    receiver = Receiver()
    async with served(receiver) as url, sending(url, tmp_path, least=Severity.TICKET) as sender:
        sender.tell("job_ended", {"job": "grpo"}, "")
        sender.tell("store_stalled", {"message": "its disk does not answer"}, "")
        await sender.until(delivered=1)
    assert [said["type"] for _, said in receiver.posts] == ["dev.rose.store_stalled"]
    assert "subject" not in receiver.posts[0][1]


@pytest.mark.parametrize(
    ("url", "secret", "says"),
    [
        ("ftp://h/x", a_secret(), "https://HOST/PATH"),
        ("https:///x", a_secret(), "https://HOST/PATH"),
        ("https://u:hunter2@h/x", a_secret(), "https://HOST/PATH"),
        ("https://h:99999/x", a_secret(), "https://HOST/PATH"),
        ("", a_secret(), "need each other"),
        ("https://h/x", None, "cannot be read"),
        ("https://h/x", "", "openssl rand"),
        ("https://h/x", "hunter2", "openssl rand"),
        ("https://h/x", a_secret().removeprefix("whsec_"), "openssl rand"),
        ("https://h/x", a_secret(size=23), "openssl rand"),
        ("https://h/x", f"{a_secret()}\nwhsec_hunter2!", "openssl rand"),
    ],
)
def test_a_url_or_secret_that_cannot_be_used_is_one_line_without_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], url: str, secret: str | None, says: str
) -> None:
    if secret is not None:
        (tmp_path / "secret").write_text(secret)
    argv = ["--port", str(free_port()), "--store", f"{tmp_path}/s", "--log-dir", f"{tmp_path}/l"]
    argv += ["--webhook", url, "--webhook-secret-file", f"{tmp_path}/secret"]
    assert main(argv) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert says in err
    assert "hunter2" not in err
    if secret is not None and says == "need each other":
        with pytest.raises(ConfigError, match=says):
            settings_of([*argv[:-4], "--webhook", "https://h/x"])


async def test_the_process_posts_from_its_first_term_to_its_end(tmp_path: Path) -> None:
    receiver, port = Receiver(503), free_port()
    (tmp_path / "secret").write_text(a_secret())
    async with served(receiver) as url:
        argv = ["--port", str(port), "--store", f"{tmp_path}/s", "--log-dir", f"{tmp_path}/l"]
        argv += ["--webhook", f"{url}/hook", "--webhook-secret-file", f"{tmp_path}/secret"]
        process = subprocess.Popen(  # noqa: ASYNC220 - it is a server
            [sys.executable, "-m", "rose.command", "scheduler", *argv], cwd=ROOT
        )
        try:
            async with make_channel(f"127.0.0.1:{port}") as channel:
                stub = SchedulerStub(channel)
                asked = pb.RegisterJobRequest(job="grpo", max_staleness=1)
                await stub.RegisterJob(asked, wait_for_ready=True, timeout=PATIENCE_S)
                await stub.SetHarvest(pb.SetHarvestRequest(mode=pb.HARVEST_MODE_OFF))
            process.terminate()
            assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
        finally:
            process.kill()
    names = [said["type"].removeprefix("dev.rose.") for _, said in receiver.posts]
    assert names[:4] == ["scheduler_leads", "scheduler_leads", "job_registered", "harvest_set"]
    assert receiver.posts[0][0] == receiver.posts[1][0]
    assert receiver.posts[3][1]["source"] == f"/rose/rose/scheduler/127.0.0.1:{port}"
    assert receiver.posts[3][1]["data"]["mode"] == "OFF"


def test_the_docs_have_every_event_with_its_severity() -> None:
    page = (ROOT / "docs" / "operators" / "events.md").read_text()
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `")]
    said = {
        name.strip("` "): severity.strip() for names, severity in rows for name in names.split(",")
    }
    assert said == {NAMES.get(name, name): each.name.lower() for name, each in EVENTS.items()}
