"""A real host in a shared folder: found by its seat, measured by its users, gone when killed."""

import asyncio
import json
import signal
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from engine_specs import HOST
from pool import HOST_NAME, Started
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm_versions import VERSIONS

from rose.addresses import free_port
from rose.node import NodeConfig, NodeDaemon
from rose.node.discovery import look
from tests.harness.waiting import until, until_async

pytestmark = [
    pytest.mark.engine,
    pytest.mark.engines(HOST, versions=VERSIONS, spends=True),
    pytest.mark.timeout(600),
]

PATIENCE_S = 30.0
USERS = 3


@pytest.fixture(scope="module")
def host(engines: list[Started]) -> Started:
    [host] = engines
    return host


def folder(host: Started) -> Path:
    return host.control.path.parent


def ask(host: Started, user: int) -> None:
    body = {"model": host.spec.name, "prompt": [1, 2, 3 + user], "max_tokens": 8}
    body |= {"ignore_eos": True, "detokenize": False}
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{host.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=60) as answer:
        assert answer.status == 200


@asynccontextmanager
async def node(host: Started, tmp_path: Path) -> AsyncIterator[NodeDaemon]:
    """A node that was told a folder, and of no host."""
    said = {
        "node": "n0",
        "scheduler": f"127.0.0.1:{free_port()}",
        "run_dir": tmp_path / "run",
        "log_dir": tmp_path / "logs",
        "discover": {"folder": folder(host), "ttft_target_s": 9.0, "tpot_target_s": 9.0},
        "replicas": [],
        "unsigned": True,
    }
    daemon = NodeDaemon(NodeConfig.model_validate(said))
    running = asyncio.create_task(daemon.run())
    try:
        yield daemon
    finally:
        daemon.stop()
        await running


def shown(daemon: NodeDaemon) -> dict[str, float]:
    """Samples of `/metrics` that name the host, without their label of it."""
    found: dict[str, float] = {}
    text = generate_latest(daemon._metrics.registry).decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.pop("host", "") == HOST_NAME:
                found[",".join((sample.name, *sample.labels.values()))] = sample.value
    return found


def test_it_describes_itself_where_a_node_looks(host: Started) -> None:
    seen = look(folder(host))
    assert not seen.unusable
    assert not seen.dead
    [found] = seen.hosts.values()
    assert (found.name, found.page, found.alone) == (HOST_NAME, host.control.path, True)
    assert found.said.model == host.spec.name
    assert found.said.devices == (), "it has no GPU"
    assert (found.said.ttft_s, found.said.tpot_s) == (0.5, 0.15), "of its own environment"


async def test_a_node_measures_what_its_users_get(host: Started, tmp_path: Path) -> None:
    async with node(host, tmp_path) as daemon:
        await until_async(lambda: shown(daemon), PATIENCE_S, "it is found")
        assert shown(daemon)["rose_host_ttft_target_seconds"] == 0.5
        before = shown(daemon)["rose_host_ttft_seconds_count"]
        await asyncio.gather(*(asyncio.to_thread(ask, host, user) for user in range(USERS)))

        def measured() -> bool:
            now = shown(daemon)
            requests = now["rose_host_requests_total,met"] + now["rose_host_requests_total,missed"]
            return now["rose_host_ttft_seconds_count"] == before + USERS == before + requests

        await until_async(measured, PATIENCE_S, "each request is counted once")
        assert shown(daemon)["rose_host_busy_seconds_total"] > 0
        assert daemon._count_hosts() == {"guarded": 0, "watched": 1, "refused": 0}


async def test_killed_it_is_gone_at_once_and_its_series_with_it(
    host: Started, tmp_path: Path
) -> None:
    async with node(host, tmp_path) as daemon:
        await until_async(lambda: shown(daemon), PATIENCE_S, "it is found")
        host.spend("it is killed")
        host.signal(signal.SIGKILL)
        until(lambda: not look(folder(host)).hosts, PATIENCE_S, "nobody holds its seat")
        await until_async(lambda: not shown(daemon), PATIENCE_S, "the node has let it go")
        assert daemon._count_hosts() == {"guarded": 0, "watched": 0, "refused": 0}
