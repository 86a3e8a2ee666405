"""`/metrics` of a scheduler: what operators alert on, under names that stay, in few series."""

import asyncio
import ssl
import time
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from service_cases import Bench, FakeNode, shows

from rose.addresses import free_port
from rose.errors import ConfigError, UnavailableError
from rose.main.scheduler import settings_of
from rose.metrics_server import MetricsServer
from rose.rpc import rose_pb2 as pb
from rose.scheduler.metrics import JOB_KEPT_S, MOST_JOBS, OTHERS, SchedulerMetrics
from rose.security import Role
from rose.store import MeteredStore
from tests.fakes.memory_store import InMemoryStore
from tests.harness.certificates import Certificates

AUDIT = SimpleNamespace(records=7, lost=0)
LEADS = SimpleNamespace(leads=lambda: True, term=3)
STANDS_BY = SimpleNamespace(leads=lambda: False, term=0)


def metrics_of(bench: Bench | None) -> SchedulerMetrics:
    metrics = SchedulerMetrics(AUDIT)  # type: ignore[arg-type]
    leadership = LEADS if bench else STANDS_BY
    metrics.watch(leadership, lambda: bench.service if bench else None)  # type: ignore[arg-type]
    if bench:
        bench.events.listen(metrics.heard)
    return metrics


def samples(metrics: SchedulerMetrics) -> dict[str, float]:
    """By name and labels: `name{label=value}`."""
    metrics.look()
    return read(generate_latest(metrics.registry).decode())


def read(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sample.labels.items())
            name = sample.name.removeprefix("rose_scheduler_")
            found[f"{name}{{{labels}}}" if labels else name] = sample.value
    return found


async def test_a_leader_shows_leases_demand_holds_and_advice(bench: Bench) -> None:
    metrics = metrics_of(bench)
    await bench.stub.RegisterJob(pb.RegisterJobRequest(job="grpo", max_staleness=1))
    node = FakeNode(bench.stub)
    node.offer()
    host = pb.HostTelemetry(node="n0", busy_share=0.25, slo_good=1)
    guest = pb.GuestTelemetry(replica="g0", lend_bytes=1 << 30)
    node.say(telemetry=pb.Telemetry(host=host, guests=[guest]))
    lease = (await node.hears("lease")).lease
    await shows(bench, lambda reply: bool(reply.leases))
    demand = [pb.JobDemand(job="grpo", turns=5, owed_tokens=900.0, made_tok_s=30.0)]
    await bench.stub.ReportDemand(pb.DemandReport(gateway="gw", jobs=demand))
    now = samples(metrics)
    assert (now["leader"], now["term"], now["nodes"], now["gateways"]) == (1, 3, 1, 1)
    assert now["leases{job=grpo,kind=guest}"] == now["node_leases{node=n0}"] == 1
    assert now["replicas{kind=guest,state=leased}"] == 1
    assert now["lease_grants_total{job=grpo}"] == 1
    assert now["job_turns{job=grpo}"] == 5
    assert now["job_owed_tokens{job=grpo}"] == 900
    assert now["node_modes{mode=active}"] == 1
    assert now["slo_budget_left_ratio{deployment=}"] == 1.0
    assert now["audit_records_total"] == 7
    assert now["node_silent_seconds{node=n0}"] < 60
    assert now["stop_mode{mode=active}"] == 1
    assert now["stop_mode{mode=hold}"] == 0
    await bench.stub.Revoke(pb.RevokeRequest(replica=lease.replica, reason="by hand"))
    policy = '{"name": "p", "mode": "Advisory"}'
    await bench.stub.ApplyPolicy(pb.ApplyPolicyRequest(policy=policy))
    async with asyncio.timeout(20):
        while "held_nodes{reason=advisory}" not in (now := samples(metrics)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert now["node_lendable_bytes{node=n0}"] == 1 << 30
    assert now["node_lendable_compute_ratio{node=n0}"] == 0.75
    assert now["held_nodes{reason=advisory}"] == 1
    assert now["lease_ends_total{how=revoked,job=grpo}"] == 1
    assert now["revocations_total{by=operator,job=grpo}"] == 1
    await node.leave()


def test_a_standby_says_that_it_is_one() -> None:
    now = samples(metrics_of(None))
    assert (now["leader"], now["term"]) == (0, 0)
    assert not [name for name in now if name.startswith(("leases", "nodes", "job_"))]


async def test_calls_of_the_store_are_timed_and_failures_counted() -> None:
    class BrokenStore(InMemoryStore):
        async def get(self, key: str) -> None:
            raise UnavailableError("no store")

    metrics = metrics_of(None)
    store = MeteredStore(BrokenStore(), metrics.called)
    await store.put("k", b"v")
    with pytest.raises(UnavailableError):
        await store.get("k")
    assert [entry.key for entry in (await store.list("")).entries] == ["k"]
    now = samples(metrics)
    assert now["store_seconds_count{call=txn}"] == now["store_seconds_count{call=list}"] == 1
    assert now["store_errors_total{call=get}"] == 1
    assert "store_errors_total{call=txn}" not in now


def test_jobs_that_come_and_go_make_no_series_without_end() -> None:
    metrics = metrics_of(None)
    for number in range(3 * MOST_JOBS):
        metrics.heard("lease_granted", {"job": f"job-{number}"})
    granted = {k: v for k, v in samples(metrics).items() if k.startswith("lease_grants_total")}
    assert len(granted) == MOST_JOBS + 1
    assert granted[f"lease_grants_total{{job={OTHERS}}}"] == 2 * MOST_JOBS


async def test_a_job_that_is_over_is_forgotten_once_its_last_counts_were_seen(bench: Bench) -> None:
    clock = SimpleNamespace(now_s=0.0)
    metrics = SchedulerMetrics(AUDIT, clock_s=lambda: clock.now_s)  # type: ignore[arg-type]
    metrics.watch(LEADS, lambda: bench.service)  # type: ignore[arg-type]
    await bench.stub.RegisterJob(pb.RegisterJobRequest(job="grpo", max_staleness=1))
    metrics.heard("lease_granted", {"job": "grpo"})
    metrics.heard("lease_granted", {"job": "over"})
    metrics.heard("revoked", {"job": "over", "by": "node"})
    samples(metrics)
    clock.now_s = JOB_KEPT_S - 1
    assert samples(metrics)["revocations_total{by=node,job=over}"] == 1
    clock.now_s = JOB_KEPT_S
    now = samples(metrics)
    assert not [name for name in now if "job=over" in name]
    assert now["lease_grants_total{job=grpo}"] == 1


def test_a_scheduler_with_a_certificate_says_until_when_it_counts(tmp_path: Path) -> None:
    files = Certificates(tmp_path / "ca").of(Role.SCHEDULER, "s0")
    metrics = SchedulerMetrics(AUDIT, files)  # type: ignore[arg-type]
    now = read(generate_latest(metrics.registry).decode())
    begin_s = now["rose_certificate_not_before_timestamp_seconds"]
    assert begin_s < time.time() < now["rose_certificate_not_after_timestamp_seconds"]


async def test_it_answers_on_loopback_and_nothing_but_metrics() -> None:
    server = MetricsServer(metrics_of(None), "127.0.0.1", port := free_port())
    await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/metrics") as answer:
                assert answer.status == 200
                assert "rose_scheduler_leader 0.0" in await answer.text()
            async with session.get(f"http://127.0.0.1:{port}/other") as answer:
                assert answer.status == 404
        other = MetricsServer(metrics_of(None), "127.0.0.1", port)
        with pytest.raises(ConfigError, match="--metrics-port"):
            await other.start()
    finally:
        await server.close()


async def test_with_certificates_it_is_served_over_tls_to_scrapers_without_one(
    tmp_path: Path,
) -> None:
    made = Certificates(tmp_path / "ca")
    files = made.of(Role.SCHEDULER, "s0")
    server = MetricsServer(metrics_of(None), "127.0.0.1", port := free_port(), files)
    await server.start()
    try:
        context = ssl.create_default_context(cafile=str(made.ca.file))
        context.check_hostname = False
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"https://127.0.0.1:{port}/metrics", ssl=context) as answer,
        ):
            assert answer.status == 200
    finally:
        await server.close()


def test_the_network_reads_it_over_tls_or_where_the_operator_said_so(tmp_path: Path) -> None:
    words = ["--store", str(tmp_path / "s"), "--log-dir", str(tmp_path), "--metrics-port", "7401"]
    assert settings_of(words).metrics_host == "127.0.0.1"
    with pytest.raises(ConfigError, match="read how much each job and node uses"):
        settings_of([*words, "--metrics-host", "0.0.0.0"])
    assert settings_of([*words, "--metrics-host", "0.0.0.0", "--insecure"]).metrics_port == 7401
    with pytest.raises(ConfigError, match="metrics port 0"):
        settings_of([*words[:-1], "0"])
