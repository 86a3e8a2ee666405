"""Rules and dashboards before a real Prometheus: parsed, played through, and answered.

Skipped with a reason where its programs are not there; `scripts/prometheus` fetches them.
"""

import asyncio
import itertools
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor import GuestState, LatencyRecord
from rose.dashboard.past import FLEET, NODE, PastReader
from rose.rpc import rose_pb2 as pb
from rose.rpc.leader_channel import LeaderChannel
from rose.weight_distribution import WeightPublisher
from tests.engine.fleet.counted_turns import counted_turns
from tests.engine.fleet.little_cluster import (
    JOB,
    LittleCluster,
    LittleHost,
    little_cluster,
    tensors,
)
from tests.harness.programs.prometheus import (
    Prometheus,
    needs_prometheus,
    needs_promtool,
    prometheus,
    promtool,
)
from tests.harness.waiting import PATIENCE_S

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
RULES = ROOT / "helm" / "rose" / "files" / "rules" / "rose.rules.yaml"
RULE_TESTS = ROOT / "tests" / "rules" / "rose.rules.test.yaml"
DASHBOARDS = sorted((ROOT / "helm" / "rose" / "files" / "dashboards").glob("*.json"))


def expressions() -> Iterator[tuple[str, str]]:
    """Every panel's and those of the scheduler's pages, of all nodes and some scrapes of a second
    each.
    """
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                put = re.sub(r"\$(cluster|node|instance)", ".*", target["expr"])
                # A panel that waits for a day of data has it at once.
                put = put.replace("$__rate_interval", "10s").replace("> 86400", "> 0")
                yield f"{file.stem}, {panel['title']}, {target['refId']}", put
    for number, line in enumerate((*FLEET, *NODE)):
        chosen = line.replace("$s", 'instance=~".*"').replace("$w", "10s")
        yield f"own dashboard, line {number}", chosen


@needs_promtool
def test_promtool_takes_the_rules() -> None:
    checked = promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))
    assert checked.returncode == 0, checked.stdout + checked.stderr


@needs_promtool
def test_each_alert_fires_where_it_should_and_nowhere_else() -> None:
    played = promtool("test", "rules", str(RULE_TESTS))
    assert played.returncode == 0, played.stdout + played.stderr


@needs_promtool
def test_promtool_parses_every_panel_and_line(tmp_path: Path) -> None:
    # Recording rules: one call for all of them.
    rules = [
        {"record": f"panel:{number}", "expr": text}
        for number, (_, text) in enumerate(expressions())
    ]
    file = tmp_path / "panels.yaml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    checked = promtool("check", "rules", str(file))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert len(rules) > 60


class LivelyHost:
    """A host whose users come and go, and whose guest makes tokens while it may."""

    def __init__(self, host: LittleHost) -> None:
        self._host = host
        self._lane = host.page.take_lane()
        self._guest = GuestState()

    async def run(self) -> None:
        for number in itertools.count():
            now_ns = time.monotonic_ns()
            # Every fourth request is slow: budgets burn, and what they are made of is shown.
            ttft_ns = 3 * 10**9 if number % 4 == 0 else 10**8
            self._lane.append(
                LatencyRecord(now_ns, ttft_ns, 10**7, 2 * ttft_ns, 8, 8, f"r{number}")
            )
            self._guest = self._stepped(now_ns)
            self._host.page.guest.write(self._guest)
            await asyncio.sleep(0.1)

    def _stepped(self, now_ns: int) -> GuestState:
        was, runs = self._guest, self._host.harvests
        return GuestState(
            step_seq=was.step_seq + runs,
            tokens_total=was.tokens_total + 8 * runs,
            yielded_ns=was.yielded_ns + 10**7,
            running=1,
            last_step_ns=10**7,
            bytes_mapped=1 << 20,
            heartbeat_ns=now_ns,
        )


async def _answered(real: Prometheus, missing: dict[str, str]) -> None:
    """Take out what has a sample by now."""
    for name, text in list(missing.items()):
        if await asyncio.to_thread(real.samples, text):
            del missing[name]


async def _all_answered(real: Prometheus, missing: dict[str, str], but: int = 0) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while len(missing) > but and time.monotonic() < until_s:
        await _answered(real, missing)
        await asyncio.sleep(0.5)


async def _scraped(real: Prometheus) -> None:
    """Wait until every target was: the first time comes some seconds after Prometheus does."""
    async with asyncio.timeout(PATIENCE_S):
        while troubles := await asyncio.to_thread(real.troubles):
            print(troubles)  # noqa: T201 - shown where it never ends
            await asyncio.sleep(0.2)


async def _asked(cluster: LittleCluster, replica: str) -> None:
    """An operator takes a lease back, advises only, and stops."""
    async with LeaderChannel(cluster.addresses) as channel:
        revoke = pb.RevokeRequest(replica=replica, reason="test")
        await channel.call(lambda stub, left_s: stub.Revoke(revoke, timeout=left_s), 5.0)
        advisory = pb.ApplyPolicyRequest(policy='{"name": "advice", "mode": "Advisory"}')
        await channel.call(lambda stub, left_s: stub.ApplyPolicy(advisory, timeout=left_s), 5.0)


@pytest.mark.nightly
@needs_prometheus
async def test_a_real_prometheus_has_a_sample_for_every_panel(tmp_path: Path) -> None:
    missing = dict(expressions())
    shape = {"schedulers": 1, "nodes": 1, "gateways": 1, "metrics": True}
    async with little_cluster(tmp_path, **shape) as cluster:
        lively = asyncio.create_task(LivelyHost(cluster.hosts["n0"]).run())
        with prometheus(tmp_path, cluster.scraped, RULES) as real:
            publisher = WeightPublisher(
                JOB, cluster.addresses, tmp_path / "published", cluster.trainer_port, cluster.key, 9
            )
            async with counted_turns(cluster.urls, 4) as turns, publisher:
                await cluster.leased()
                # Growth before the first scrape does not count.
                await _scraped(real)
                await publisher.publish(1, 0, tensors(0), tensors(1))
                await turns.more(8)
                # Series of updates come with the first one, and grow by the second.
                updated = "rose_weight_update_pause_seconds_count > 0"
                await _all_answered(real, {"an update": updated})
                await publisher.publish(2, 1, tensors(1), tensors(2))
                await _all_answered(real, missing, but=8)
                await turns.settled()
            # The ones that show an operator's actions, and paused guests.
            await _asked(cluster, "g0")
            await _all_answered(real, missing)
            past = await asyncio.to_thread(PastReader(real.url).read, "", "6h", time.time())
            assert (past.trouble, len(past.lines)) == ("", len(FLEET))
            assert not missing, "\n".join(f"{name}: {text}" for name, text in missing.items())
            broken = [rule["name"] for rule in real.rules() if rule["health"] == "err"]
            assert not broken
        lively.cancel()
