"""`/metrics` of a node: what operators alert on, under names that stay."""

import asyncio
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from executor import Grant, GrantMode, GuestState, HostState
from rose import addresses
from rose.addresses import free_port
from rose.errors import ConfigError
from rose.node.guest.memory_gauges import HeldMemory
from rose.node.metrics import HostFigures, LatencyHistogram, NodeHealth, NodeMetrics, ReplicaFigures
from rose.security import Role
from tests.harness.certificates import Certificates

GRANT = Grant(GrantMode.FREEZE, epoch=3, reason="host_dead")
GUEST = GuestState(tokens_total=70, running=2, waiting=1, yielded_ns=1_500_000_000)
STATE = HostState(
    running=3, kv_used=10, kv_total=40, granules_total=8, granules_lent=5, bytes_lent=640
)
HOST = HostFigures(
    "", LatencyHistogram(0.45), LatencyHistogram(0.04), STATE, (98, 2),
    engine=("vLLM 0.33.0", "probed"), lacks=("lending: no KV pages",),
)  # fmt: skip
HELD = HeldMemory(17 << 30, "driver, by process")
VIEW = ReplicaFigures("g0", "healthy", 1, 9, 0.25, 40, GRANT, GUEST, owed_bytes=128, held=HELD)


@pytest.fixture
def metrics() -> Iterator[NodeMetrics]:
    made = NodeMetrics(lambda: [HOST], lambda: [VIEW])
    yield made
    made.close()


def collected(metrics: NodeMetrics) -> dict[str, float]:
    text = generate_latest(metrics.registry).decode()
    return {
        s.name + "".join(f",{value}" for _, value in sorted(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


async def test_the_page_waits_a_moment_for_its_port(metrics: NodeMetrics) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        serving = asyncio.create_task(metrics.serve(port))
        await asyncio.sleep(0.1)
        assert not serving.done(), "a daemon that was killed lets go of its lock before its ports"
    await serving


def test_the_targets_are_bounds_of_the_latency_histograms() -> None:
    ttft, tpot = LatencyHistogram(0.45), LatencyHistogram(0.04)
    for seconds in (0.2, 0.45, 0.6):
        ttft.observe(seconds)
    found = collected(NodeMetrics(lambda: [HostFigures("h", ttft, tpot)], list))
    assert found["rose_host_ttft_seconds_bucket,h,0.45"] == 2
    assert found["rose_host_ttft_seconds_bucket,h,+Inf"] == 3
    assert found["rose_host_ttft_seconds_count,h"] == 3
    assert found["rose_host_ttft_seconds_sum,h"] == pytest.approx(1.25)
    assert found["rose_host_tpot_seconds_count,h"] == 0
    assert found["rose_host_ttft_target_seconds,h"] == 0.45


def test_each_host_has_series_of_its_own_and_none_once_it_left() -> None:
    hosts = [
        replace(HOST, name=name, ttft=LatencyHistogram(target_s))
        for name, target_s in (("a", 0.5), ("b", 2.0))
    ]
    made = NodeMetrics(lambda: hosts, lambda: [VIEW])
    found = collected(made)
    assert (found["rose_host_running,a"], found["rose_host_running,b"]) == (3, 3)
    assert found["rose_host_ttft_seconds_bucket,a,0.5"] == 0
    assert found["rose_host_ttft_seconds_bucket,b,2.0"] == 0
    hosts.pop()
    left = [name for name in collected(made) if name.startswith("rose_host")]
    assert left
    assert not [name for name in left if ",b" in name]
    hosts.clear()
    assert not [name for name in collected(made) if name.startswith("rose_host")]


GUEST_SHOWN = {
    "rose_guest_mode,freeze,host_dead,g0": 1,
    "rose_guest_mode,run,,g0": 0,
    "rose_guest_duty,g0": 0.25,
    "rose_guest_tokens_total,g0": 70,
    "rose_guest_yielded_seconds_total,g0": 1.5,
    "rose_grants_total,g0": 40,
    "rose_engine_restarts_total,g0": 1,
    "rose_policy_version,g0": 9,
    "rose_guest_memory_bytes,driver, by process,g0": 17 << 30,
    "rose_guest_owed_bytes,g0": 128,
}
HOST_SHOWN = {
    "rose_host_lent_bytes,": 640,
    "rose_host_lent_granules,": 5,
    "rose_host_reserve_missing_granules,": 0,
    "rose_host_kv_usage,": 0.25,
    "rose_host_engine_info,vLLM 0.33.0,,probed": 1,
    "rose_host_lacks,lending,": 1,
}
EVENTS: list[tuple[str, dict[str, object]]] = [
    ("grant", {"replica": "g0", "mode": "run", "reason": "leased"}),
    ("grant", {"replica": "g0", "mode": "freeze", "reason": "host_dead"}),
    ("grant", {"replica": "g0", "mode": "kill", "reason": "kill_switch"}),
    ("engine_adopted", {"engine": "g0", "pid": 1}),
    ("engine_reclaimed", {"engine": "g0", "reason": "kill switch", "seconds": 0.07}),
    ("engine_placed", {"engine": "g0", "share": "SCHED_IDLE", "cgroup": "/"}),
    ("reclaim_level", {"replica": "g0", "level": "sleep", "outcome": "held"}),
    ("reclaim_ended", {"replica": "g0", "enough": True, "in_time": True, "seconds": 0.3}),
    ("something_else", {}),
]
EVENTS_SHOWN = {
    "rose_guest_freezes_total,host_dead,g0": 1,
    "rose_guest_freezes_total,kill_switch,g0": 1,
    "rose_engine_starts_total,adopted,g0": 1,
    "rose_reclaim_seconds_bucket,0.1,g0": 1,
    "rose_engine_placement,g0,SCHED_IDLE": 1,
    "rose_ladder_levels_total,sleep,held,g0": 1,
    "rose_ladder_seconds_bucket,true,0.5,g0": 1,
    "rose_weight_update_bytes_total,g0": 800,
    "rose_weight_update_pause_seconds_count,g0": 2,
    "rose_weight_update_pause_seconds_bucket,0.025,g0": 1,
}


def test_guest_host_and_events_are_shown(metrics: NodeMetrics) -> None:
    for name, fields in EVENTS:
        metrics.heard(name, fields)
    for wire_bytes, pause_s in ((640, 0.02), (160, 0.3)):
        metrics.activated({"replica": "g0", "wire_bytes": wire_bytes, "pause_s": pause_s})
    found = collected(metrics)
    shown = GUEST_SHOWN | HOST_SHOWN | EVENTS_SHOWN
    assert {name: found.get(name) for name in shown} == shown
    assert not any("leased" in name for name in found)


@pytest.mark.parametrize(
    ("host", "view", "hidden"),
    [
        (HOST, replace(VIEW, held=None), "rose_guest_memory_bytes"),
        (HOST, replace(VIEW, held=HeldMemory(None, "kernel")), "rose_guest_memory_bytes"),
        (replace(HOST, state=None), VIEW, "rose_host_lent"),
    ],
)
def test_what_is_unknown_is_not_shown_as_none(
    host: HostFigures, view: ReplicaFigures, hidden: str
) -> None:
    found = collected(NodeMetrics(lambda: [host], lambda: [view]))
    assert not any(name.startswith(hidden) for name in found)


def test_what_alerts_count_is_0_before_it_first_happens() -> None:
    made = NodeMetrics(lambda: [HOST], lambda: [replace(VIEW, reclaim_s=5.0)])
    found = collected(made)
    assert found["rose_reclaim_deadline_seconds,g0"] == 5
    assert found["rose_late_reclaims_total,g0"] == 0
    assert found["rose_weights_rejected_total,g0,chunk"] == 0
    late = {"replica": "g0", "enough": True, "in_time": False, "seconds": 9.0}
    made.heard("chunk_rejected", {"replica": "g0", "chunk": "c"})
    made.heard("quarantined", {"replica": "g0", "version": 7})
    made.heard("signature_refused", {"replica": "g0", "version": 8})
    made.heard("reclaim_ended", late)
    made.heard("stop_overdue", {"replica": "g0", "held_bytes": 1})
    found = collected(made)
    assert found["rose_weights_rejected_total,g0,chunk"] == 1
    assert found["rose_weights_rejected_total,g0,engine"] == 1
    assert found["rose_weights_rejected_total,g0,signature"] == 1
    assert found["rose_weights_rejected_total,g0,version"] == 0
    assert found["rose_late_reclaims_total,g0"] == 2
    made.close()


def test_the_nodes_own_state_is_shown() -> None:
    health = NodeHealth(killed=True, cut_off_s=7.5, certificate=(1e9, 2e9))
    found = collected(NodeMetrics(lambda: [HOST], lambda: [VIEW], lambda: health))
    assert found["rose_kill_switch_active"] == 1
    assert found["rose_node_cut_off_seconds"] == 7.5
    assert found["rose_host_requests_total,,met"] == 98
    assert found["rose_host_requests_total,,missed"] == 2
    assert found["rose_certificate_not_before_timestamp_seconds"] == 1e9
    assert found["rose_certificate_not_after_timestamp_seconds"] == 2e9
    without = collected(NodeMetrics(list, lambda: [VIEW]))
    assert not any(name.startswith(("rose_host_requests", "rose_cert")) for name in without)


def test_a_replica_that_is_gone_leaves_no_series_and_a_placement_no_old_one() -> None:
    views = [VIEW]
    made = NodeMetrics(lambda: [HOST], lambda: views)
    for share in ("SCHED_IDLE", "nice"):
        made.heard("engine_placed", {"engine": "g0", "share": share})
    made.heard("grant", {"replica": "g0", "mode": "freeze", "reason": "host_dead"})
    made.heard("engine_started", {"engine": "g0"})
    made.heard("engine_reclaimed", {"engine": "g0", "seconds": 0.1})
    made.heard("quarantined", {"replica": "g0"})
    placed = [name for name in collected(made) if name.startswith("rose_engine_placement")]
    assert placed == ["rose_engine_placement,g0,nice"]
    views.clear()
    assert not [name for name in collected(made) if ",g0" in name]
    views.append(VIEW)
    assert collected(made)["rose_weights_rejected_total,g0,engine"] == 0


async def test_a_busy_port_is_named(metrics: NodeMetrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses.bound, "__defaults__", (0.1,))
    port = free_port()
    await metrics.serve(port)
    with pytest.raises(ConfigError, match=f"metrics_port {port}"):
        await NodeMetrics(list, list).serve(port)


async def test_beyond_loopback_it_is_served_over_tls_to_scrapers_without_a_certificate(
    metrics: NodeMetrics, tmp_path: Path
) -> None:
    made = Certificates(tmp_path / "ca")
    tls = made.of(Role.NODE, "n0").server_context(everybody=True)
    await metrics.serve(port := free_port(), "127.0.0.1", tls)
    context = ssl.create_default_context(cafile=str(made.ca.file))
    context.check_hostname = False

    def scrape() -> bytes:
        url = f"https://127.0.0.1:{port}/metrics"
        with urllib.request.urlopen(url, context=context) as answer:
            text: bytes = answer.read()
        return text

    # One that connects and never speaks keeps nobody waiting.
    with socket.create_connection(("127.0.0.1", port)):
        assert b"rose_build_info" in await asyncio.to_thread(scrape)
