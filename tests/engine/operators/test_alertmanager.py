"""Holds by alerts from a real Alertmanager, configured as the docs say, over TLS.

Skipped with a reason where it is not there; `scripts/prometheus` fetches it.
"""

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_scheduler import HarvestMode
from rose.addresses import free_port
from rose.main.scheduler import SchedulerSettings, serve
from rose.security.roles import Role
from rose.store import StoreName
from tests.harness.certificates import Certificates
from tests.harness.programs.prometheus import alertmanager, needs_alertmanager
from tests.harness.waiting import PATIENCE_S

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]

PAGE = Path(__file__).parents[3] / "docs" / "operators" / "alerts.md"


def block(name: str) -> str:
    """Return the YAML on the page whose first line is a comment with this name."""
    [text] = re.findall(rf"```yaml\n# {re.escape(name)}.*?\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(text)


def configuration(address: str, token: Path, ca: Path) -> dict[str, Any]:
    """Return the page's configuration of Alertmanager, with these files and with short waits."""
    text = block("alertmanager.yml").replace("CLUSTER", "prod")
    for there, here in (
        ("rose-scheduler:7470", address),
        ("/etc/alertmanager/rose-token", str(token)),
        ("/etc/alertmanager/rose-ca.crt", str(ca)),
    ):
        assert there in text
        text = text.replace(there, here)
    config: dict[str, Any] = yaml.safe_load(text)
    config["route"] |= {"receiver": "rose", "group_wait": "100ms", "group_interval": "1s"}
    return config


def logged(log: Path, event: str) -> dict[str, Any]:
    """Wait for an event in a scheduler's log, and return the newest."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        lines = log.read_text().splitlines() if log.exists() else []
        records = [json.loads(line) for line in lines if f'"{event}"' in line]
        if records:
            return dict(records[-1])
        time.sleep(0.05)
    raise AssertionError(f"no {event} is logged")


@needs_alertmanager
async def test_an_alert_of_a_real_alertmanager_holds_until_it_is_over(tmp_path: Path) -> None:
    made = Certificates(tmp_path / "ca", "prod")
    rules, token = tmp_path / "alert-rules.yaml", tmp_path / "token"
    rules.write_text(block("alert-rules.yaml"))
    token.write_text("0123456789abcdef" * 4 + "\n")
    address = f"127.0.0.1:{free_port()}"
    settings = SchedulerSettings(
        "127.0.0.1", 0, StoreName(str(tmp_path / "s.sqlite")), tmp_path / "log",
        HarvestMode.OFF, 1.0, certificates=made.of(Role.SCHEDULER, "s0"),
        alerts=rules, alerts_token_file=token, alerts_address=address,
    )  # fmt: skip
    log = tmp_path / "log" / "events-scheduler.jsonl"
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(settings, stop))
    await asyncio.to_thread(logged, log, "scheduler_leads")
    labels = {"alertname": "VllmTtftHigh", "severity": "page", "instance": "serving-0:8000"}
    with alertmanager(tmp_path, configuration(address, token, made.ca.file)) as real:
        await asyncio.to_thread(real.tell, labels)
        policy = (await asyncio.to_thread(logged, log, "policy_applied"))["policy"]
        assert policy["name"].startswith("alert.users-first.vllmttfthigh.")
        assert policy["nodeSelector"]["names"] == ["serving-0", "serving-0:8000"]
        assert policy["stopPolicy"] == "HoldAndDrain"
        await asyncio.to_thread(real.tell, labels, over=True)
        assert (await asyncio.to_thread(logged, log, "policy_deleted"))["policy"] == policy["name"]
    stop.set()
    await serving
