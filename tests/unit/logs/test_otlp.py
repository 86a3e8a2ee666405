"""Logs and metrics at an OTLP receiver, from processes that the environment tells of one."""

import asyncio
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.utils import floatToGoString

from rose.addresses import free_port
from rose.errors import ConfigError
from rose.otlp import converted, export_metrics, is_asked
from scripts.metrics_reference import (
    gateway_text,
    node_metrics,
    relay_metrics,
    scheduler_metrics,
)
from tests.harness.waiting import PATIENCE_S, until_async
from tests.harness.web_server import served

encoder = pytest.importorskip("opentelemetry.exporter.otlp.proto.common.metrics_encoder")
logs_pb2 = pytest.importorskip("opentelemetry.proto.collector.logs.v1.logs_service_pb2")
metrics_pb2 = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")

ROOT = Path(__file__).parents[3]


def value_of(value: Any) -> Any:
    """The Python value of an OTLP AnyValue."""
    kind = value.WhichOneof("value")
    if kind == "kvlist_value":
        return attributes(value.kvlist_value.values)
    if kind == "array_value":
        return [value_of(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None


def attributes(pairs: Sequence[Any]) -> dict[str, Any]:
    return {pair.key: value_of(pair.value) for pair in pairs}


def samples_of(metric: Any) -> Iterator[tuple[str, tuple[tuple[str, str], ...], float]]:
    """The samples that Prometheus would show of an OTLP metric."""
    kind = metric.WhichOneof("data")
    for point in getattr(metric, kind).data_points:
        labels = tuple(sorted(attributes(point.attributes).items()))
        if kind != "histogram":
            yield metric.name, labels, point.as_double or point.as_int
            continue
        assert (metric.histogram.aggregation_temporality, point.HasField("min")) == (2, False)
        counted = 0
        bounds = [*point.explicit_bounds, float("inf")]
        for bound, count in zip(bounds, point.bucket_counts, strict=True):
            counted += count
            le = ("le", floatToGoString(bound))
            yield f"{metric.name}_bucket", tuple(sorted((*labels, le))), counted
        yield f"{metric.name}_count", labels, point.count
        yield f"{metric.name}_sum", labels, point.sum


class Collector:
    """Receiver of OTLP over HTTP that keeps what it gets, by the service's name."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.posts = 0
        self.logs: dict[str, list[Any]] = {}
        self.metrics: dict[str, dict[str, Any]] = {}
        self.resources: list[dict[str, Any]] = []

    async def __call__(self, http: web.Request) -> web.Response:
        body, self.posts = await http.read(), self.posts + 1
        if http.path == "/v1/logs":
            for each in logs_pb2.ExportLogsServiceRequest.FromString(body).resource_logs:
                self.resources.append(attributes(each.resource.attributes))
                found = self.logs.setdefault(self.resources[-1]["service.name"], [])
                found += [record for scope in each.scope_logs for record in scope.log_records]
        elif http.path == "/v1/metrics":
            for each in metrics_pb2.ExportMetricsServiceRequest.FromString(body).resource_metrics:
                self.resources.append(attributes(each.resource.attributes))
                newest = {m.name: m for scope in each.scope_metrics for m in scope.metrics}
                self.metrics[self.resources[-1]["service.name"]] = newest
        return web.Response(status=self.status)

    def said(self, service: str) -> list[str]:
        return [record.body.string_value for record in self.logs.get(service, [])]

    def records(self, service: str) -> list[dict[str, Any]]:
        found = [attributes(record.attributes) for record in self.logs.get(service, [])]
        return [each["fields"] for each in found if "fields" in each]


def environment(url: str, **more: str) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("OTEL_")},
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "OTEL_BLRP_SCHEDULE_DELAY": "50",
        "OTEL_METRIC_EXPORT_INTERVAL": "50",
        **more,
    }


BOTH = {"OTEL_LOGS_EXPORTER": "otlp", "OTEL_METRICS_EXPORTER": "console, otlp"}


@asynccontextmanager
async def process(
    env: Mapping[str, str], out: Path, *argv: str
) -> AsyncIterator["subprocess.Popen[bytes]"]:
    with out.open("wb") as file:
        command = [sys.executable, "-m", "rose.command", *argv]
        running = subprocess.Popen(  # noqa: ASYNC220 - it is a server
            command, cwd=ROOT, env=env, stdout=file, stderr=file
        )
    try:
        yield running
        running.terminate()
        # The collector answers on this loop meanwhile.
        assert await asyncio.to_thread(running.wait, PATIENCE_S) == 0
    finally:
        running.kill()


def a_scheduler(folder: Path) -> list[str]:
    port = str(free_port())
    return ["scheduler", "--port", port, "--store", f"{folder}/s", "--log-dir", f"{folder}/l"]


@pytest.mark.parametrize(
    "families",
    [
        lambda: node_metrics(2).registry.collect(),
        lambda: scheduler_metrics(2, 2).registry.collect(),
        lambda: text_string_to_metric_families(gateway_text(2)),
        lambda: relay_metrics(2).registry.collect(),
    ],
    ids=["node", "scheduler", "gateway", "relay"],
)
def test_every_sample_of_every_process_keeps_its_name_labels_and_value(families: Any) -> None:
    from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    found: list[Metric] = list(families())
    scope = ScopeMetrics(InstrumentationScope("rose"), list(converted(found, 1)), "")
    data = MetricsData([ResourceMetrics(Resource({}), [scope], "")])
    sent = encoder.encode_metrics(data).resource_metrics[0].scope_metrics[0].metrics
    shown = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in found
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    said = {(name, labels): value for metric in sent for name, labels, value in samples_of(metric)}
    assert said == pytest.approx(shown)
    kinds = {metric.name: metric.WhichOneof("data") for metric in sent}
    assert {kind for name, kind in kinds.items() if name.endswith("_total")} <= {"sum"}
    assert all(metric.sum.is_monotonic for metric in sent if metric.HasField("sum"))


@pytest.mark.parametrize("form", ["text", "json"])
async def test_a_scheduler_sends_its_log_its_records_and_its_metrics(
    tmp_path: Path, form: str
) -> None:
    collector = Collector()
    out = tmp_path / "out"
    async with served(collector) as url:
        env = environment(url, **BOTH, OTEL_RESOURCE_ATTRIBUTES="team=serving")
        async with process(env, out, *a_scheduler(tmp_path), "--log-format", form):
            await until_async(
                lambda: "rose_scheduler_nodes" in collector.metrics.get("rose-scheduler", {}),
                PATIENCE_S,
                "metrics of a leader",
            )
    fields = {each["event"]: each for each in collector.records("rose-scheduler")}
    assert {"scheduler_leads", "scheduler_started", "scheduler_stopped"} <= fields.keys()
    assert fields["scheduler_started"]["source"] == "scheduler"
    assert [line for line in collector.said("rose-scheduler") if "listening on" in line]
    leader = collector.metrics["rose-scheduler"]["rose_scheduler_leader"]
    assert [value for _, _, value in samples_of(leader)] == [1.0]
    assert all(each["team"] == "serving" for each in collector.resources)
    assert len({each["service.instance.id"] for each in collector.resources}) == 1
    said = out.read_text()
    assert said.count("listening on") == 1, "standard output is what it was"
    assert ("scheduler_leads" in said) == (form == "json")


async def test_gateways_and_relays_send_theirs(tmp_path: Path) -> None:
    collector = Collector()
    async with served(collector) as url:
        env = environment(url, **BOTH, OTEL_SERVICE_NAME="mine")
        gateway = ["gateway", "--port", str(free_port()), "--replica", "http://127.0.0.1:9"]
        async with process(env, tmp_path / "g", *gateway):
            await until_async(lambda: "mine" in collector.metrics, PATIENCE_S, "a gateway's")
        assert "rose_gateway_turns_total" in collector.metrics.pop("mine")
        relay = [
            "relay",
            "--store",
            f"{tmp_path}/w",
            "--origin",
            "http://127.0.0.1:9",
            "--job",
            "j",
        ]
        relay += ["--unsigned", "--port", str(free_port())]
        async with process(env, tmp_path / "r", *relay):
            await until_async(lambda: "mine" in collector.metrics, PATIENCE_S, "a relay's")
        assert "rose_relay_readers" in collector.metrics["mine"]
    assert len({each["service.instance.id"] for each in collector.resources}) == 2


@pytest.mark.parametrize("collector", [None, 503])
async def test_a_collector_that_takes_nothing_costs_a_line_a_minute_and_no_time(
    tmp_path: Path, collector: int | None
) -> None:
    receiver = Collector(collector or 200)
    out, log = tmp_path / "out", tmp_path / "l" / "events-scheduler.jsonl"
    async with served(receiver) as url:
        env = environment(url if collector else f"http://127.0.0.1:{free_port()}", **BOTH)
        async with process(env, out, *a_scheduler(tmp_path)) as running:
            await until_async(
                lambda: log.exists() and "scheduler_started" in log.read_text(), PATIENCE_S, "it"
            )
            await asyncio.sleep(1.0)
            began_s = time.monotonic()
            running.terminate()
            assert await asyncio.to_thread(running.wait, PATIENCE_S) == 0
            assert time.monotonic() - began_s < 5.0
    lines = [line for line in out.read_text().splitlines() if "opentelemetry" in line]
    assert 1 <= len(lines) <= 2, "one of logs, one of metrics"
    assert "Traceback" not in out.read_text()


async def test_without_being_asked_nothing_is_sent_or_imported(tmp_path: Path) -> None:
    collector = Collector()
    async with served(collector) as url:
        out = tmp_path / "out"
        async with process(environment(url), out, *a_scheduler(tmp_path)):
            await until_async(lambda: "listening" in out.read_text(), PATIENCE_S, "it")
            await asyncio.sleep(0.2)
    assert collector.posts == 0
    for more in ({}, {**BOTH, "OTEL_SDK_DISABLED": "true"}, dict.fromkeys(BOTH, "none")):
        assert not is_asked("LOGS", environment("http://h", **more))
    check = (
        "import sys; from rose.logs.process_log import start_logging; start_logging('x', [])\n"
        "assert not [m for m in sys.modules if m.startswith('opentelemetry')]"
    )
    env = environment("http://127.0.0.1:9")
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", check], cwd=ROOT, env=env, check=False
    )
    assert done.returncode == 0


async def test_values_that_otlp_does_not_know_and_own_lines_do_no_harm(tmp_path: Path) -> None:
    collector = Collector()
    script = (
        "import logging, os\n"
        "from pathlib import Path\n"
        "from rose.logs.eventlog import EventLog\n"
        "from rose.logs.process_log import complain, start_logging\n"
        "start_logging('node', ['--log-level', 'debug'])\n"
        f"events = EventLog(Path({str(tmp_path)!r}), 'n')\n"
        "events.write('odd', path=Path('/x'), none=None, nan=float('nan'), some=[1, {'a': (2,)}])\n"
        "logging.getLogger('urllib3').error('about the export')\n"
        "complain('rose node', 'the end')\n"
    )
    async with served(collector) as url:
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", script],
            cwd=ROOT,
            env=environment(url, **BOTH),
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    [odd] = collector.records("rose-node")
    assert odd["event"] == "odd"
    assert (odd["path"], odd["none"], odd["some"]) == ("/x", None, [1, {"a": [2]}])
    assert not [line for line in collector.said("rose-node") if "export" in line]
    assert "the end" in collector.said("rose-node")
    assert re.findall("the end", done.stderr) == ["the end"]


def test_what_is_asked_and_cannot_be_had_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    assert not is_asked("LOGS", BOTH)
    assert "no logs are sent; install rose-rollout[otel]" in caplog.text
    monkeypatch.undo()
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "soon")

    async def begin() -> None:
        export_metrics("x", lambda: None, lambda _: [])

    with pytest.raises(ConfigError, match="OTEL_METRIC_EXPORT_INTERVAL='soon'"):
        asyncio.run(begin())
    assert logging.getLogger("records").level > logging.CRITICAL
