"""Invalid messages of a peer end its own stream, call or offer: no tick and no other lease."""

import asyncio
import json
import math

import grpc
import grpc.aio
import pytest
from core_cases import JOB, CoreBench, bench_with, offer
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from service_cases import Bench, FakeNode

from elastic_scheduler import LeaseDecision, Move, ReplicaKind, Situation
from rose.errors import ConfigError, RefusedError
from rose.rpc import rose_pb2 as pb
from rose.scheduler import wire
from rose.scheduler.core.demand import GATEWAYS_KEPT, REPORT_TTL_S, DemandBook, JobFigures, Switched
from rose.scheduler.core.job_registry import MAX_VERSION_LEAD, TOLD_VERSIONS
from rose.scheduler.core.leasing import BROKEN_PAUSE_S
from rose.scheduler.core.messages import (
    Attached,
    Demanded,
    LogRecord,
    Offered,
    TakenBack,
    VersionAnnounced,
)
from rose.scheduler.core.scheduler_core import MOST_A_MINUTE, Complaints
from tests.fuzz import target_scheduler as target
from tests.fuzz.target_scheduler import UNARY
from tests.harness.waiting import PATIENCE_S

SENT: list[type[Message]] = [*UNARY, pb.NodeReport]
NAMES = ["good", "g0", "n7", "grpo", "", "http://h", "http://a..b", "x" * 300, "\n", "\u2028"]
ODD = [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-300, 1e300, 3.0]
CPP = FieldDescriptor
UNSIGNED = {CPP.CPPTYPE_UINT32: 2**32 - 1, CPP.CPPTYPE_UINT64: 2**64 - 1}


def messages() -> st.SearchStrategy[Message]:
    """Return reports of nodes and requests of all others, with any values in any field."""
    return st.sampled_from(SENT).flatmap(filled)


def filled(kind: type[Message]) -> st.SearchStrategy[Message]:
    """A message of this kind with any values in any of its fields."""
    fields = {each.name: _values(each) for each in kind.DESCRIPTOR.fields}
    return st.fixed_dictionaries({}, optional=fields).map(lambda values: _made(kind, values))


def _made(kind: type[Message], values: dict[str, object]) -> Message:
    # Only the last field of a oneof is set.
    return kind(**values)


def _values(field: FieldDescriptor) -> st.SearchStrategy[object]:
    one: st.SearchStrategy[object]
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return st.dictionaries(st.sampled_from(NAMES), st.sampled_from(NAMES), max_size=3)
    if field.message_type is not None:
        one = filled(getattr(pb, field.message_type.name))
    elif field.enum_type is not None:
        one = st.integers(0, 6)
    elif field.cpp_type == CPP.CPPTYPE_STRING:
        one = st.sampled_from(NAMES)
    elif field.cpp_type == CPP.CPPTYPE_BOOL:
        one = st.booleans()
    elif field.cpp_type == CPP.CPPTYPE_DOUBLE:
        one = st.sampled_from(ODD)
    else:
        most = UNSIGNED[field.cpp_type]
        one = st.sampled_from([0, 1, 2, 5, 2**31, most]) | st.integers(0, most)
    return st.lists(one, max_size=3) if field.is_repeated else one


# ---- a peer ----


WHOLE = {"replica": "g0", "kind": 1, "url": "http://g0", "ttl_s": 3.0, "healthy": True}


def taken(bench: CoreBench, message: Message) -> bool:
    """Give the core a message as the service does; False when it was refused."""
    try:
        if not isinstance(message, pb.NodeReport):
            bench.step(wire.asked(message))
        elif message.HasField("hello"):
            bench.step(wire.attached(message, 7))
        elif (event := wire.event_of(message, 7)) is not None:
            bench.step(event)
    except (ConfigError, RefusedError):
        return False
    return True


# ---- epochs ----


async def test_an_epoch_beyond_what_a_lease_can_carry_ends_nothing(bench: Bench) -> None:
    await bench.stub.RegisterJob(pb.RegisterJobRequest(job="j"))
    node = FakeNode(bench.stub)
    node.offer(epoch=5)
    assert (await node.hears("lease")).lease.epoch == 6
    node.say(revocation=pb.Revocation(replica="g0", epoch=6, reason="r"))
    node.offer(epoch=2**64 - 1)
    await asyncio.sleep(0.3)
    assert not bench.ticking.done()
    node.offer(epoch=6)
    assert (await node.hears("lease")).lease.epoch == 7
    assert "epoch of g0" in bench.log.read_text()


def test_an_epoch_far_ahead_of_the_store_is_no_offer() -> None:
    bench = bench_with()
    bench.offered(offer("g0", epoch=2**20), offer("g1", epoch=2**20 + 1))
    assert bench.lease().epoch == 2**20 + 1
    assert [row.id for row in bench.table.replicas] == ["g0"]
    assert "offer_refused" in bench.records()


# ---- figures ----


@pytest.mark.parametrize("figure", ["decode_tok_s", "prefill_tok_s", "ttl_s"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_an_offer_with_a_figure_that_is_none_is_left_out(figure: str, value: float) -> None:
    offers = [pb.Offer(**{**WHOLE, "replica": "bad", figure: value}), pb.Offer(**WHOLE)]
    event = wire.event_of(pb.NodeReport(node="n", offers=pb.Offers(offers=offers)), 1)
    assert isinstance(event, Offered)
    assert [each.replica for each in event.offers] == ["g0"]
    assert [figure in line and "bad" in line for line in event.refused] == [True]


def test_a_rate_that_is_no_number_gives_no_guest_back() -> None:
    bench = bench_with()
    poisoned = pb.Offer(**{**WHOLE, "replica": "d0", "kind": 2, "decode_tok_s": math.nan})
    epochs = dict.fromkeys(("g0", "g1", "g2"), 0)
    for _ in range(120):
        bench.step(Demanded("gw", (JobFigures(JOB, 1_000, 1e6, 100.0),)))
        for command in bench.commands():
            epochs[command.lease.replica] = command.lease.epoch
        good = [offer(name, epoch=epoch) for name, epoch in epochs.items()]
        report = pb.NodeReport(node="n0", offers=pb.Offers(offers=[poisoned]))
        refused = wire.event_of(report, 1)
        assert isinstance(refused, Offered)
        bench.step(Offered(1, (*good, *refused.offers), refused.refused))
        for command in bench.commands():
            epochs[command.lease.replica] = command.lease.epoch
        bench.now_s += 0.5
    assert len(bench.core.status(bench.now_s).leases) == 3


def test_no_switch_can_have_taken_longer_than_its_lease_lives() -> None:
    bench = bench_with("rose")
    bench.offered(offer("g0"))
    bench.now_s += 2.0
    bench.step(Demanded("anyone", (), (Switched("g0", 1, 1e12),)))
    bench.step(Demanded("anyone", (), (Switched("g0", 1, 60.0),)))
    assert "first_token" not in bench.records()
    assert "switch_refused" in bench.records()
    bench.step(Demanded("gw", (), (Switched("g0", 1, 1.5),)))
    assert "first_token" in bench.records(), "a forged one does not take the place of the real one"


BAD = (math.nan, math.inf, -1.0)


def reported(**said: object) -> Message:
    return pb.NodeReport(node="n", **said)  # type: ignore[arg-type]


def demanded(**said: object) -> Message:
    return pb.DemandReport(gateway="g", **said)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "reports"),
    [
        (
            r"Switch.took_s",
            [demanded(switches=[pb.Switch(replica="g0", took_s=bad)]) for bad in BAD],
        ),
        (
            "owed_tokens",
            [demanded(jobs=[pb.JobDemand(job="j", owed_tokens=bad)]) for bad in (*BAD, 1e300)],
        ),
        (
            "made_tok_s",
            [demanded(jobs=[pb.JobDemand(job="j", made_tok_s=bad)]) for bad in (*BAD, 1e300)],
        ),
        (
            "ttft_p95_s",
            [
                reported(telemetry=telemetry)
                for host in [pb.HostTelemetry(ttft_p95_s=bad) for bad in BAD]
                for telemetry in (pb.Telemetry(host=host), pb.Telemetry(hosts=[host]))
            ],
        ),
        (
            "hosts of a node's telemetry: 65",
            [reported(telemetry=pb.Telemetry(hosts=[pb.HostTelemetry()] * 65))],
        ),
        ("at most", [demanded(jobs=[pb.JobDemand(job=f"j{i}", turns=1) for i in range(300)])]),
        (
            "at most",
            [
                reported(
                    offers=pb.Offers(
                        offers=[pb.Offer(**{**WHOLE, "replica": f"r{i}"}) for i in range(300)]
                    )
                )
            ],
        ),
    ],
    ids=["switch", "owed", "made", "telemetry", "hosts", "jobs", "offers"],
)
def test_a_report_with_bad_figures_or_too_many_rows_is_refused(
    words: str, reports: list[Message]
) -> None:
    for report in reports:
        with pytest.raises(ConfigError, match=words):
            wire.demanded(report) if isinstance(report, pb.DemandReport) else wire.event_of(
                report, 1
            )


# ---- versions and addresses ----


def test_no_version_can_be_announced_that_leaves_none_after_it() -> None:
    bench = bench_with()
    bench.announce(1)
    for version in (2**64 - 1, 2**53, 2 + MAX_VERSION_LEAD):
        request = pb.AnnounceVersionRequest(job=JOB, version=version, url="http://t")
        assert not taken(bench, request)
    bench.announce(2)
    assert bench.table.latest_version == 2


@pytest.mark.parametrize("url", ["", "http://a..b", "http://" + "a" * 64, "ftp://t", "http://t:0"])
async def test_no_address_is_passed_on_that_cannot_be_one(bench: Bench, url: str) -> None:
    await bench.stub.RegisterJob(pb.RegisterJobRequest(job="j"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.stub.AnnounceVersion(pb.AnnounceVersionRequest(job="j", version=1, url=url))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith("AnnounceVersion.url")
    node = FakeNode(bench.stub)
    node.offer(url=url)
    await node.hears("harvest")
    await asyncio.sleep(0.05)
    assert not (await bench.stub.Snapshot(pb.SnapshotRequest())).replicas
    await node.leave()
    hello = pb.NodeReport(node="n", hello=pb.Hello(protocol=2, relay_url=url or "x"))
    with pytest.raises(ConfigError, match="relay_url"):
        wire.attached(hello, 1)


def test_a_long_chain_does_not_keep_nodes_from_attaching() -> None:
    bench = bench_with()
    for version in range(1, TOLD_VERSIONS + 10):
        bench.step(VersionAnnounced(JOB, version, version - 1, "http://t"))
    told = [c.version.version for c in bench.attach(2, "n1") if c.HasField("version")]
    assert told == list(range(10, TOLD_VERSIONS + 10))


# ---- one stream, one call ----


async def test_a_report_that_means_nothing_ends_its_stream_with_a_line(bench: Bench) -> None:
    good = FakeNode(bench.stub, "good")
    await good.hears("harvest")
    bad = FakeNode(bench.stub, "bad")
    await bad.hears("harvest")
    bad.say(telemetry=pb.Telemetry(host=pb.HostTelemetry(window_s=math.nan)))
    async with asyncio.timeout(PATIENCE_S):
        assert await bad.call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "window_s" in (await bad.call.details())
    assert not good.call.done()
    events = [json.loads(line) for line in bench.log.read_text().splitlines()]
    assert {"peer_refused"} <= {each["event"] for each in events}
    await good.leave()


async def test_what_breaks_the_core_ends_one_stream_and_no_tick(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = bench.core.step

    def breaks(event: object, now_s: float) -> object:
        if isinstance(event, TakenBack):
            raise ValueError("what nobody thought of")
        return step(event, now_s)  # type: ignore[arg-type]

    monkeypatch.setattr(bench.core, "step", breaks)
    node, other = FakeNode(bench.stub), FakeNode(bench.stub, "n1")
    await other.hears("harvest")
    node.say(revocation=pb.Revocation(replica="g0", epoch=1))
    async with asyncio.timeout(PATIENCE_S):
        assert await node.call.code() is grpc.StatusCode.INTERNAL
    assert "nobody thought of" not in (await node.call.details())
    assert "nobody thought of" in bench.log.read_text()
    assert not bench.ticking.done()
    assert not other.call.done()
    await other.leave()


async def test_a_tick_that_breaks_is_not_the_last_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.scheduler.service.BROKEN_TICK_S", 0.01)
    step, broken = bench.core.step, [True]
    monkeypatch.setattr(bench.core, "step", lambda e, s: {}["x"] if broken else step(e, s))
    await asyncio.sleep(0.3)
    broken.clear()
    await bench.stub.RegisterJob(pb.RegisterJobRequest(job="j"))
    assert not bench.ticking.done()
    assert bench.log.read_text().count("tick_broken") == 1


class Dreamer:
    """A policy that also takes what nobody offers."""

    name = "dreamer"

    def decide(self, situation: Situation) -> LeaseDecision:
        take = [Move(JOB, each.replica, "offered") for each in situation.free]
        return LeaseDecision((Move(JOB, "dreamt of", "why not"), *take), ())


class Broken(Dreamer):
    """A policy that breaks once."""

    left = 1

    def decide(self, situation: Situation) -> LeaseDecision:
        if self.left and situation.free:
            self.left -= 1
            raise ZeroDivisionError
        return LeaseDecision(tuple(Move(JOB, each.replica, "it") for each in situation.free), ())


def test_what_breaks_for_one_replica_keeps_no_lease_from_another() -> None:
    bench = bench_with(Dreamer())
    bench.offered(offer("g0"))
    assert "replica_broken" in bench.records()
    assert bench.lease().replica == "g0"


def test_a_policy_that_breaks_rests_and_live_leases_go_on() -> None:
    bench = bench_with(Broken())
    bench.offered(offer("g0", ttl_s=60.0))
    assert "policy_broken" in bench.records()
    bench.at(bench.now_s + BROKEN_PAUSE_S)
    assert bench.lease().replica == "g0"


# ---- numbers of things ----


def test_gateways_are_bounded_in_number_and_forgotten_without_any_job() -> None:
    bench = CoreBench()
    for number in range(GATEWAYS_KEPT):
        bench.step(Demanded(f"g{number}", (JobFigures("j", 1, 1.0),)))
    with pytest.raises(RefusedError, match="gateways"):
        bench.step(Demanded("one more", ()))
    bench.step(Demanded("g7", (JobFigures("j", 2, 1.0),)))
    bench.at(bench.now_s + REPORT_TTL_S)
    assert len(bench.core.demand) == 0


def test_a_gateway_is_one_sum_whatever_its_callers_name_their_jobs() -> None:
    book = DemandBook()
    book.hear("a", [JobFigures(f"j{i}", 1, 2.0, 3.0) for i in range(64)], 0.0)
    assert book.figures("x", 0.0) == JobFigures("x", 64, 128.0, 192.0)


def test_complaints_are_said_once_and_so_many_a_minute() -> None:
    book, written = Complaints(), []
    for number in range(5_000):
        for _ in range(2):
            written += book.about("offer_refused", "n", f"reason {number}", number / 1_000)
    assert len(written) == MOST_A_MINUTE
    [unsaid] = book.due(61.0)
    assert unsaid.event == "complaints_unsaid"
    assert book.about("offer_refused", "n", "another", 62.0)


def test_refused_offers_are_not_written_down_without_end() -> None:
    bench, records = bench_with(), 0
    for report in range(50):
        refused = tuple(f"reason {report}-{number}" for number in range(256))
        records += sum(
            isinstance(action, LogRecord) for action in bench.step(Offered(1, (), refused))
        )
    assert records <= MOST_A_MINUTE


def test_a_node_that_names_ever_more_replicas_is_let_go() -> None:
    bench = bench_with()
    for number in range(16):
        bench.offered(*(offer(f"r{number}-{each}", healthy=False) for each in range(256)))
    with pytest.raises(RefusedError, match="lasting names"):
        bench.offered(offer("one more"))


# ---- any message at all ----


@given(st.lists(messages(), max_size=12))
def test_whatever_is_said_is_taken_or_refused_and_the_next_tick_comes(
    said: list[Message],
) -> None:
    bench = bench_with()
    bench.offered(offer("good"))
    bench.step(Attached("n7", 7))
    for message in said:
        bench.now_s += 0.25
        taken(bench, message)
        bench.at(bench.now_s + 0.25)
        bench.core.status(bench.now_s)
    assert bench.offered(offer("d0", kind=ReplicaKind.DEDICATED), stream=1) is not None


# ---- fuzz target ----


# In the order of the target: unary calls, then the streams of two nodes.
KINDS: list[type[Message]] = [*target.UNARY, pb.NodeReport, pb.NodeReport]


def framed(kind: int, body: bytes) -> bytes:
    return bytes([kind]) + len(body).to_bytes(2, "big") + body


@st.composite
def inputs(draw: st.DrawFn) -> bytes:
    data = b""
    for kind in draw(st.lists(st.integers(0, len(KINDS) - 1), max_size=6)):
        message: Message = draw(filled(KINDS[kind]))
        data += framed(kind, message.SerializeToString())
    return data


@given(inputs(), st.integers(0, 10_000), st.integers(0, 255))
def test_damaged_messages_break_nothing(data: bytes, at: int, byte: int) -> None:
    target.run_messages(data)
    if data:
        damaged = bytearray(data)
        damaged[at % len(data)] = byte
        target.run_messages(bytes(damaged))


@given(st.binary(max_size=400))
def test_any_bytes_break_nothing(data: bytes) -> None:
    target.run_messages(data)
