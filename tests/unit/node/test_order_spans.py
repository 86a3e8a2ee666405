"""Spans of a lease and of a weight update: one trace over trainer, scheduler and node."""

from typing import Any

import pytest
from node_bench import NodeBench

from rose.node.order_spans import OrderSpans
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.messages import Command, LogRecord
from rose.scheduler.lease_spans import LeaseSpans
from rose.tracing import NO_SPANS, TraceContext
from tests.harness.spans import otel

BENCH = {"kind": "dedicated"}
ASKED = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", sampled=True)


@pytest.mark.usefixtures("standins")
async def test_a_lease_is_one_trace_from_its_grant_to_its_end(
    bench: NodeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans, tracer, exporter = otel()
    bench.service._lease_spans = LeaseSpans(spans)
    monkeypatch.setattr("rose.node.daemon.spans_of", lambda _: spans)
    async with bench.running():
        await bench.until("leased", lambda row: row.leased)
        await bench.until_noted("lease_taken")
        with tracer.start_as_current_span("train step") as step:
            await bench.publish(1)
        await bench.until("caught up", lambda row: row.policy_version == 1)
        await bench.stub.EndJob(pb.EndJobRequest(job="job"))
        await bench.until_noted("lease_ended")
        await bench.until("ended", lambda row: not row.leased)

        async def lease_span() -> Any:
            ended = {span.name: span for span in exporter.get_finished_spans()}
            return ended if "rose lease" in ended else None

        by_name = await bench.awaited("a span of the lease", lease_span)
    lease, release = by_name["rose lease"], by_name["rose release"]
    parents = {
        "rose admit": lease,
        "rose release": lease,
        "rose drain": release,
        "rose weights": step,
    }
    for name, parent in parents.items():
        assert by_name[name].parent.span_id == parent.context.span_id, name
        assert by_name[name].attributes["replica"] == "r0"
        assert by_name[name].end_time >= by_name[name].start_time
    assert lease.parent is None
    assert lease.attributes["end"] == "lease_released"
    assert by_name["rose weights"].attributes["version"] == 1
    assert by_name["rose drain"].attributes["reason"]


def grant(epoch: int) -> list[LogRecord | Command]:
    fields: dict[str, object] = {"replica": "g0", "epoch": epoch, "job": "grpo"}
    lease = pb.Lease(replica="g0", epoch=epoch)
    return [Command(1, pb.NodeCommand(lease=lease)), LogRecord("lease_granted", fields)]


def test_without_a_collector_only_the_trainers_context_goes_on() -> None:
    granted = grant(7)
    version = pb.NodeCommand(version=pb.Version(job="grpo", version=1))
    LeaseSpans().trace([*granted, Command(1, version)], ASKED)
    assert version.traceparent == ASKED.traceparent
    assert [each.command.traceparent for each in granted if isinstance(each, Command)] == [""]
    quiet = OrderSpans()
    quiet.ordered(version)
    quiet.heard("engine_reclaimed", {"replica": "g0", "seconds": 0.5})
    assert quiet._spans is NO_SPANS
    assert not quiet._orders


def test_a_reclaim_lasts_from_its_decision_and_a_term_ends_its_leases() -> None:
    spans, _, exporter = otel()
    leases, orders = LeaseSpans(spans), OrderSpans(spans)
    granted = grant(7)
    leases.trace(granted, None)
    (command,) = [each.command for each in granted if isinstance(each, Command)]
    orders.ordered(command)
    renewal = pb.NodeCommand(lease=pb.Lease(replica="g0", epoch=7))
    orders.ordered(renewal)
    orders.heard("lease_taken_back", {"replica": "g0", "epoch": 7, "reason": "host"})
    orders.heard("engine_reclaimed", {"replica": "g0", "reason": "host", "seconds": 0.5})
    orders.heard("lease_ended", {"replica": "g0", "epoch": 7, "aborted": 2})
    orders.heard("version_refused", {"replica": "g0", "version": 2, "message": "torn"})
    orders.heard("node_started", {"node": "n0"})
    leases.close()
    reclaim, drain, weights, lease = exporter.get_finished_spans()
    names = [each.name for each in (reclaim, drain, weights, lease)]
    assert names == ["rose reclaim", "rose drain", "rose weights", "rose lease"]
    assert {each.parent.span_id for each in (reclaim, drain, weights)} == {lease.context.span_id}
    assert reclaim.end_time - reclaim.start_time == pytest.approx(0.5e9, abs=0.1e9)
    assert drain.attributes["aborted"] == 2
    assert weights.status.description == "torn"
    assert lease.attributes["end"] == "term_over"
