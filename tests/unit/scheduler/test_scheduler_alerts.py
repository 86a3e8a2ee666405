"""Holds by alerts: Alertmanager's messages, an operator's rules, and the policies that follow."""

import asyncio
import contextlib
import io
import json
import re
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service_cases import Bench, FakeNode, running

from elastic_scheduler import HarvestMode
from elastic_scheduler.capacity import parse_policy
from rose.addresses import free_port
from rose.cli.main import main
from rose.controller.alerts import AlertReceiver, AlertRule, read_rules
from rose.dashboard import LeaderInfo, Watch
from rose.errors import ConfigError
from rose.main.scheduler import SchedulerSettings, serve, settings_of
from rose.scheduler.service import SchedulerService
from rose.security.roles import Role, server_name
from rose.store import StoreName
from tests.fakes.memory_store import InMemoryStore
from tests.harness.certificates import Certificates
from tests.harness.waiting import PATIENCE_S

TOKEN = "0123456789abcdef" * 4
BEARER = {"Authorization": f"Bearer {TOKEN}"}
RULES = """
- match: { severity: page, alertname: "Vllm*" }
  limit: 2h
  nodeName: instance
  policy: { name: users-first, stopPolicy: HoldAndDrain }
- match: { severity: incident }
  nodeLabels: { pool: pool }
  policy: { name: incident, mode: Off, nodeSelector: { matchLabels: { cluster: a } } }
"""
# 2026-12-24 12:00:30 UTC
NOW_S = 1_798_113_630.0


def alert(status: str = "firing", **labels: str) -> dict[str, Any]:
    """An alert as Alertmanager sends it."""
    return {
        "status": status,
        "labels": {"alertname": "VllmTtftHigh", "severity": "page"} | labels,
        "annotations": {"summary": "users wait"},
        "startsAt": "2026-12-24T11:58:30.1Z",
        "endsAt": "0001-01-01T00:00:00Z",
        "generatorURL": "http://prometheus/graph?g0.expr=up",
        "fingerprint": "c3f1a2b4d5e6f708",
    }


def message(*alerts: dict[str, Any], **changes: object) -> dict[str, Any]:
    """A message of the webhook, version 4, with every field that Alertmanager sends."""
    firing = any(each["status"] == "firing" for each in alerts)
    common = set.intersection(*(set(each["labels"].items()) for each in alerts))
    return {
        "receiver": "rose",
        "status": "firing" if firing else "resolved",
        "alerts": list(alerts),
        "groupLabels": {"alertname": "VllmTtftHigh"},
        "commonLabels": dict(common),
        "commonAnnotations": {"summary": "users wait"},
        "externalURL": "http://alertmanager:9093",
        "version": "4",
        "groupKey": '{}/{severity="page"}:{alertname="VllmTtftHigh"}',
        "truncatedAlerts": 0,
        **changes,
    }


class Sender:
    """Alertmanager, as far as its webhook goes."""

    def __init__(self, url: str, session: aiohttp.ClientSession, **tls: Any) -> None:
        self._url, self._session, self._tls = url, session, tls

    async def posts(self, body: object, headers: dict[str, str] | None = None) -> tuple[int, str]:
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        headers = {"Content-Type": "application/json"} | (BEARER if headers is None else headers)
        async with self._session.post(self._url, data=data, headers=headers, **self._tls) as answer:
            return answer.status, await answer.text()


@contextlib.asynccontextmanager
async def receiving(
    service: SchedulerService | None, folder: Path, rules: str = RULES, now_s: float = NOW_S
) -> AsyncIterator[Sender]:
    (folder / "rules.yaml").write_text(rules)
    (folder / "token").write_text(TOKEN + "\n")
    files = folder / "rules.yaml", folder / "token"
    receiver = AlertReceiver(*files, lambda: service, Mock(), wall_clock=lambda: now_s)
    address = f"127.0.0.1:{free_port()}"
    await receiver.start(address)
    try:
        async with aiohttp.ClientSession() as session:
            yield Sender(f"http://{address}/v1/alerts", session)
    finally:
        await receiver.close()


def held(bench: Bench) -> list[dict[str, Any]]:
    """The policies in force that alerts made."""
    policies, _ = bench.service.policies_in_force()
    return [json.loads(each.to_json()) for name, each in policies.items() if "alert." in name]


async def test_an_alert_holds_its_node_until_it_is_resolved(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = FakeNode(bench.stub, "serving-0")
    await node.hears("harvest")
    async with receiving(bench.service, tmp_path, now_s=time.time()) as sender:
        firing = message(alert(instance="serving-0:8000"), alert("resolved", instance="gone:8000"))
        status, said = await sender.posts(firing)
        [policy] = held(bench)
        assert (status, json.loads(said)["applied"]) == (200, [policy["name"]])
        assert policy["name"].startswith("alert.users-first.vllmttfthigh.")
        assert policy["nodeSelector"]["names"] == ["serving-0", "serving-0:8000"]
        for words, cell in (
            (("policy", "explain", "serving-0"), f"stopPolicy: HoldAndDrain ({policy['name']})"),
            (("status",), f"stopPolicy HoldAndDrain ({policy['name']})"),
            (("policy", "get"), policy["name"]),
        ):
            line = [*words, "--scheduler", bench.address]
            assert await asyncio.to_thread(main, line) == 0
            assert cell in capsys.readouterr().out
        watch = Watch(lambda: bench.service, lambda: LeaderInfo("", ""), "")
        await watch.look()
        for page in ("/", "/node"):
            assert policy["name"] in (await watch.page(page, {"name": "serving-0"}) or "")
        watch.close()
        written = [record for record in bench.audited if record[0] == "policy_applied"]
        assert [(fields["policy"], by) for _, fields, by in written] == [(policy, "alertmanager")]
        assert (await sender.posts(firing))[0] == 200
        assert len([record for record in bench.audited if record[0] == "policy_applied"]) == 1
        over = message(alert("resolved", instance="serving-0:8000"))
        assert json.loads((await sender.posts(over))[1])["ended"] == [policy["name"]]
        assert held(bench) == []
        assert (await sender.posts(over))[0] == 200
    await node.leave()


SERVING = alert(instance="serving-[0]:8000")


@pytest.mark.parametrize(
    ("sent", "policies"),
    [
        # Brackets of a name are no pattern.
        (
            message(SERVING),
            [("users-first", {"names": ["serving-[[]0]", "serving-[[]0]:8000"]}, "14:01:00")],
        ),
        (message(SERVING, alert()), [("users-first", {}, "14:01:00")]),
        (message(alert(alertname="Other")), []),
        (message(alert("resolved")), []),
        (
            message(alert(alertname="Fire", severity="incident", pool="chat")),
            [("incident", {"matchLabels": {"cluster": "a"}, "pool": ["chat"]}, "")],
        ),
        (
            message(alert(alertname="Fire", severity="incident")),
            [("incident", {"matchLabels": {"cluster": "a"}}, "")],
        ),
        # Alerts that were left out may be any with the common labels.
        (message(SERVING, truncatedAlerts=3), [("users-first", {}, "14:01:00")]),
        (
            message(alert(alertname="Fire"), truncatedAlerts=1, commonLabels={}),
            [("incident", {"matchLabels": {"cluster": "a"}}, ""), ("users-first", {}, "14:01:00")],
        ),
        (message(alert(alertname="Fire"), truncatedAlerts=1), []),
        # More names than a policy may have.
        (message(*(alert(instance=f"node-{n:05}") for n in range(1_500))),
         [("users-first", {}, "14:01:00")]),
    ],
)  # fmt: skip
async def test_rules_say_which_nodes_an_alert_holds_and_how_long(
    bench: Bench, tmp_path: Path, sent: dict[str, Any], policies: list[tuple[str, object, str]]
) -> None:
    async with receiving(bench.service, tmp_path) as sender:
        assert (await sender.posts(sent))[0] == 200
    found = []
    for each in held(bench):
        selector = each.get("nodeSelector", {})
        for expression in selector.pop("matchExpressions", []):
            selector[expression["key"]] = expression["values"]
        until = each.get("until", "").removeprefix("2026-12-24T").removesuffix("Z")
        found.append((each["name"].split(".")[1], selector, until))
    assert found == policies


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
LABELS = st.dictionaries(st.sampled_from(["alertname", "instance", "pool"]), TEXT)


@given(st.lists(LABELS, min_size=1, max_size=20), st.floats(0, 4e9))
@settings(max_examples=100)
def test_whatever_labels_alerts_have_a_policy_is_made_that_a_store_keeps(
    alerts: list[dict[str, str]], wall_s: float
) -> None:
    rule = AlertRule({"a": "b"}, {"name": "p", "mode": "Off"}, "instance", {"pool": "pool"}, "1h")
    made = rule.policy_for(alerts, "0" * 12, wall_s)
    assert parse_policy(made.to_json()) == made
    assert made.until is not None
    assert 3_600 < made.until.timestamp() - wall_s <= 3_660
    for labels in alerts:
        node, pool = labels.get("instance") or "any", labels.get("pool") or "any"
        assert made.node_selector.matches(node, {"pool": pool}), "its own node is held"


async def test_a_hold_outlives_the_leader_and_ends_by_its_limit_or_an_operator(
    tmp_path: Path,
) -> None:
    store = InMemoryStore()
    both = message(alert(instance="n0"), alert(alertname="Fire", severity="incident"))
    async with (
        running(Bench(store, tmp_path)) as first,
        receiving(first.service, tmp_path) as sender,
    ):
        await sender.posts(both)
        before = held(first)
    async with running(Bench(store, tmp_path)) as second:
        assert [each["name"] for each in before] == [each["name"] for each in held(second)]
        assert held(second) == before
        policies, _ = second.service.policies_in_force()
        [incident, users] = [each for each in policies.values() if "alert." in each.name]
        # A "resolved" that never comes: the limit ends the one, an operator alone the other.
        day_s = 86_400.0
        counts = [each.counts_at(NOW_S + s) for each in (users, incident) for s in (7_200, day_s)]
        assert counts == [True, False, True, True]
        # One whose time is over is cleared away with the next message.
        async with receiving(second.service, tmp_path, now_s=NOW_S + day_s) as sender:
            await sender.posts(message(alert(alertname="Other"), groupKey="another"))
        assert [each["name"] for each in held(second)] == [incident.name]
        line = ["policy", "delete", incident.name, "--scheduler", second.address]
        assert await asyncio.to_thread(main, line) == 0
        assert held(second) == []


TORN = json.dumps(message(alert())).encode()[:-40]


@pytest.mark.parametrize(
    ("body", "headers", "status", "line"),
    [
        (message(alert()), {}, 401, "show the token of --alerts-token-file as Authorization"),
        (message(alert()), {"Authorization": "Bearer " + "f" * 64}, 401, "show the token"),
        (message(alert()), {"Authorization": f"Basic {TOKEN}"}, 401, "show the token"),
        (TORN, None, 400, "version 4: Input data was truncated"),
        (b"\xff", None, 400, "version 4: JSON is malformed"),
        (b"[" * 100_000, None, 400, "version 4: "),
        (message(alert(), version="3"), None, 400, "Invalid enum value '3' - at `$.version`"),
        ({"version": "4"}, None, 400, "missing required field `groupKey`"),
        (message(alert("silent")), None, 400, "Invalid enum value 'silent'"),
        (b" " * 2_000_000, None, 413, "Maximum request body size 1048576 exceeded"),
    ],
)  # fmt: skip
async def test_what_is_torn_too_large_or_of_a_stranger_is_refused_in_a_line(
    bench: Bench,
    tmp_path: Path,
    body: object,
    headers: dict[str, str] | None,
    status: int,
    line: str,
) -> None:
    async with receiving(bench.service, tmp_path) as sender:
        answered, said = await sender.posts(body, headers)
    assert (answered, line in said, said.count("\n")) == (status, True, 0)
    assert held(bench) == []


async def test_a_standby_and_a_full_store_ask_to_send_it_again(
    bench: Bench, tmp_path: Path
) -> None:
    async with receiving(None, tmp_path) as sender:
        status, said = await sender.posts(message(alert()))
        assert (status, said.split(";")[0]) == (503, "this scheduler is a standby")
    async with receiving(bench.service, tmp_path) as sender:
        for number in range(140):
            status, said = await sender.posts(message(alert(), groupKey=str(number)))
        assert (status, said) == (503, "128 policies are in force; delete one first; send it again")
    assert "128 policies are in force" in bench.log.read_text()
    # Expired policies make room.
    async with receiving(bench.service, tmp_path, now_s=NOW_S + 86_400) as sender:
        assert (await sender.posts(message(alert(), groupKey="new")))[0] == 200
    assert len(held(bench)) == 1


async def test_a_standby_takes_over_the_holds_of_the_leader_over_tls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Certificates(tmp_path / "ca")
    (tmp_path / "rules.yaml").write_text(RULES)
    (tmp_path / "token").write_text(TOKEN)
    stops, tasks, senders = [], [], []
    context = ssl.create_default_context(cafile=str(made.ca.file))
    tls = {"ssl": context, "server_hostname": server_name(Role.SCHEDULER, "prod")}
    async with aiohttp.ClientSession() as session, asyncio.timeout(4 * PATIENCE_S):
        for name in ("one", "other"):
            options = SchedulerSettings(
                "127.0.0.1", 0, StoreName(str(tmp_path / "s.sqlite")), tmp_path / name,
                HarvestMode.OFF, 1.0, certificates=made.of(Role.SCHEDULER, name),
                alerts=tmp_path / "rules.yaml", alerts_token_file=tmp_path / "token",
                alerts_address=f"127.0.0.1:{free_port()}",
            )  # fmt: skip
            stops.append(asyncio.Event())
            tasks.append(asyncio.create_task(serve(options, stops[-1])))
            url = f"https://{options.alerts_address}/v1/alerts"
            senders.append(Sender(url, session, **tls))
            log = tmp_path / name / "events-scheduler.jsonl"
            while not (log.exists() and "scheduler_started" in log.read_text()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        one, other = senders
        rule = message(alert(alertname="Fire", severity="incident"))
        status, said = await one.posts(rule)
        [name] = json.loads(said)["applied"]
        assert status == 200
        assert (await other.posts(rule))[0] == 503
        stops[0].set()
        await tasks[0]
        over = message(alert("resolved", alertname="Fire", severity="incident"))
        while (answer := await other.posts(over))[0] == 503:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert answer[0] == 200
        assert json.loads(answer[1])["ended"] == [name]
        stops[1].set()
        await tasks[1]
    assert capsys.readouterr().out.count("rose scheduler: listening on 127.0.0.1:") == 2


@pytest.mark.parametrize(
    ("rules", "line"),
    [
        ("- match: {a: b}\n  polcy: {}", "Object contains unknown field `polcy` - at `$[0][0]`"),
        ("- match: {a: b}", "missing required field `policy`"),
        ("match: {a: b}", "Expected `array`, got `object`"),
        ("- match: {a: 1}\n  policy: {}", "Expected `str`, got `int`"),
        ("- {match: {}, policy: {name: a, mode: Off}}", "rule 1: match: names no label; write"),
        ("- {match: {a: b}, policy: {name: a}}", "rule 1: policy: holds nothing; write stopPolicy"),
        ("- {match: {a: b}, policy: {name: a, mode: Active}}", "mode: no alert lends; write"),
        ("- {match: {a: b}, policy: {name: a, mde: Off}}", "mde: there is no such field; did you"),
        ("- {match: {a: b}, policy: {name: a, mode: Off}, limit: 5s}", "5s is out of bounds"),
        ("- {match: {a: b}, policy: {name: a, mode: Off}, limit: 5}", "Expected `str`, got `int`"),
        ("- {match: {a: b}, policy: {name: a, mode: Off}, limit: 9000h}", "write 1m to 8760h"),
        ("- {match: {a: b}, policy: {name: a, mode: Off}, limit: soon}", "'soon' is no duration"),
        (
            "- {match: {a: b}, policy: {name: a, mode: Off}, nodeLabels: {'': n}}",
            "matchExpressions[0].key: String should have at least 1 char",
        ),
        (
            "- match: {a: b}\n  nodeName: n\n"
            "  policy: {name: a, mode: Off, nodeSelector: {names: [x]}}",
            "nodeName gives the names; leave one out",
        ),
        ("- &r {match: {a: b}, policy: {name: a, mode: Off}}\n- *r", "rule 2: another one is"),
        ("{", "is no list of alert rules: line 1"),
    ],
)  # fmt: skip
def test_a_rule_that_cannot_hold_is_refused_in_a_line(
    tmp_path: Path, rules: str, line: str
) -> None:
    (tmp_path / "rules.yaml").write_text(rules)
    with pytest.raises(ConfigError) as caught:
        read_rules(tmp_path / "rules.yaml")
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--alerts", "r"], "--alerts-token-file need each other"),
        (["--alerts-token-file", "t"], "--alerts and --alerts-token-file need"),
        (["--alerts", "r", "--alerts-token-file", "t", "--alerts-address", "7490"], "HOST:PORT"),
        (
            ["--alerts", "r", "--alerts-token-file", "t", "--alerts-address", "0.0.0.0:7490"],
            "whoever reaches it can",
        ),
    ],
)
def test_options_that_contradict_are_refused_in_a_line(options: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        settings_of(["--store", "s", "--log-dir", "l", *options])


def test_the_rules_of_the_docs_are_read(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "operators" / "alerts.md"
    [block] = re.findall(r"```yaml\n# alert-rules.yaml.*?\n(.*?)```", page.read_text(), re.S)
    (tmp_path / "rules.yaml").write_text(block)
    users, incident = read_rules(tmp_path / "rules.yaml")
    assert users.matches({"severity": "page", "alertname": "VllmTtftHigh"})
    assert incident.matches({"team": "serving", "incident": "INC-1"})
    assert not incident.matches({"team": "serving"})


def test_a_short_token_or_a_missing_file_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(RULES)
    (tmp_path / "token").write_text("short")
    for rules, token, line in (
        (
            "rules.yaml",
            "token",
            "--alerts-token-file .* holds 5 characters; put at least 43 there: openssl rand",
        ),
        ("rules.yaml", "nothing", "cannot be read"),
        ("nothing", "token", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=line):
            AlertReceiver(tmp_path / rules, tmp_path / token, lambda: None, Mock())
