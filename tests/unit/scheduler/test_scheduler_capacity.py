"""Capacity policies in the scheduler: live, stored, explained, beneath the operator's stop."""

import json
from pathlib import Path

import grpc.aio
import pytest
from core_cases import CoreBench, offer
from service_cases import Bench, FakeNode, running, shows

from elastic_scheduler import HarvestMode
from elastic_scheduler.capacity import policy_of
from rose.cli.cluster.policy import NodePolicy, explained
from rose.errors import ConfigError, RefusedError
from rose.operate.fleet import capacity_of
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.capacity import MAX_OVERRIDES, MOST_BYTES
from rose.scheduler.core.messages import (
    Attached,
    HarvestSet,
    LogRecord,
    Offered,
    PolicyApplied,
    PolicyDeleted,
    RatesMeasured,
    TakenBack,
    Tick,
)
from rose.scheduler.persistence import STOP, load
from rose.scheduler.wire import asked
from tests.fakes.memory_store import InMemoryStore

NOON_S = 1_700_000_000.0
ACTIVE = {"name": "p", "mode": "Active"}


def apply(bench: CoreBench, **said: object) -> None:
    bench.step(PolicyApplied(policy_of({**ACTIVE, **said})))


def attach(bench: CoreBench, stream: int = 1, **labels: str) -> list[pb.NodeCommand]:
    bench.step(Attached(f"n{stream - 1}", stream, labels=labels, takes_caps=True))
    return bench.commands(stream)


def modes(commands: list[pb.NodeCommand]) -> list[int]:
    return [each.harvest.mode for each in commands if each.HasField("harvest")]


def closed() -> CoreBench:
    return CoreBench(HarvestMode.OFF).with_job()


def test_a_policy_opens_the_harvest_and_another_closes_it_live() -> None:
    bench = closed()
    assert modes(attach(bench)) == [pb.HARVEST_MODE_OFF]
    bench.offered()
    assert "lease" not in bench.kinds()
    apply(bench)
    assert bench.answer() == 1
    assert modes(bench.commands()) == [pb.HARVEST_MODE_ACTIVE]
    assert bench.lease().epoch == 1
    apply(bench)
    assert bench.answer() == 0, "nothing changed"
    apply(bench, name="stop", stopPolicy="HoldAndDrain")
    assert bench.kinds()[-1] == "release"
    assert modes(bench.commands()) == [pb.HARVEST_MODE_HOLD_AND_DRAIN]
    bench.step(PolicyDeleted("stop"))
    bench.step(PolicyDeleted("p"))
    assert modes(bench.commands()) == [pb.HARVEST_MODE_OFF], "without a policy nothing is lent"
    with pytest.raises(RefusedError, match="in force: none"):
        bench.step(PolicyDeleted("p"))


def test_advice_says_bytes_and_compute() -> None:
    bench = closed()
    apply(bench, mode="Advisory", maxHarvest={"memory": "1Gi"})
    attach(bench)
    host = pb.HostTelemetry(node="n0", busy_share=0.25)
    guest = pb.GuestTelemetry(replica="g0", lend_bytes=4 << 30)
    bench.step(RatesMeasured(1, pb.Telemetry(host=host, guests=[guest])))
    bench.at(bench.now_s + 1.0).at(bench.now_s + 2.0)
    [row] = bench.core.explained("n0", 0.0)
    assert (row.mode, row.would) == (pb.HARVEST_MODE_OFF, pb.HARVEST_MODE_ACTIVE)
    assert (row.lend_bytes, row.lend_compute) == (1 << 30, 0.75)
    assert (row.advised_byte_s, row.advised_compute_s) == (2.0 * (1 << 30), 1.5)
    said = [*explained(NodePolicy("n0", capacity_of(row), ()))]
    assert "  would lend 1.0 GiB of KV memory and 75% of compute now" in said
    apply(bench, mode="Advisory", stopPolicy="Hold")
    [note] = [a for a in bench.actions if isinstance(a, LogRecord) and a.event == "capacity_advice"]
    assert (note.fields["would"], note.fields["bytes"], note.fields["compute"]) == ("hold", 0, 0.0)


def test_no_figure_of_a_node_breaks_what_operators_ask() -> None:
    bench = closed()
    apply(bench, mode="Advisory")
    attach(bench)
    guests = [pb.GuestTelemetry(replica=f"g{n}", lend_bytes=2**64 - 1) for n in range(3)]
    bench.step(RatesMeasured(1, pb.Telemetry(guests=guests)))
    bench.at(bench.now_s + 1.0).at(bench.now_s + 2.0)
    assert bench.core.explained("n0", 0.0)[0].lend_bytes == MOST_BYTES


def test_caps_come_before_the_mode_and_follow_every_change() -> None:
    bench = closed()
    apply(bench, slackShare=0.1, maxHarvest={"memory": "1Gi"}, staleAfter="2s")
    commands = attach(bench)
    assert [each.WhichOneof("command") for each in commands] == ["caps", "harvest"]
    caps = commands[0].caps
    assert (caps.slack_share, caps.kv_bytes, caps.stale_after_s) == (0.1, 1 << 30, 2.0)
    assert not caps.HasField("compute")
    apply(bench, slackShare=0.2)
    assert bench.commands()[0].caps == pb.Caps(
        slack_share=0.2, stale_after_s=5.0, reclaim_deadline_s=5.0
    )


def test_a_node_that_takes_no_caps_lends_nothing_where_a_policy_bounds_one() -> None:
    bench = closed()
    apply(bench)
    assert modes(bench.attach()) == [pb.HARVEST_MODE_ACTIVE]
    apply(bench, slackShare=0.1)
    assert modes(bench.commands()) == [pb.HARVEST_MODE_OFF]
    assert bench.kinds() == ["harvest"]
    [row] = bench.core.explained("n0", 0.0)
    assert "upgrade it" in row.limits[0]


def test_labels_choose_the_nodes() -> None:
    bench = closed()
    apply(bench, nodeSelector={"matchLabels": {"pool": "chat"}})
    assert modes(attach(bench, 1, pool="chat")) == [pb.HARVEST_MODE_ACTIVE]
    assert modes(attach(bench, 2, pool="code")) == [pb.HARVEST_MODE_OFF]
    said = {row.node: row for row in bench.core.explained("", 0.0)}
    assert list(said["n1"].limits) == ["no policy matches this node"]
    assert [(f.path, f.value, f.policy) for f in said["n0"].fields if f.path == "mode"] == [
        ("mode", "Active", "p")
    ]


def test_the_operators_stop_holds_above_policies_and_resume_adds_none() -> None:
    bench = closed()
    apply(bench)
    attach(bench)
    bench.offered()
    bench.step(HarvestSet(HarvestMode.OFF, None, opens=False))
    assert bench.answer() == 1
    assert modes(bench.commands()) == [pb.HARVEST_MODE_OFF]
    apply(bench, name="q")
    assert set(modes(bench.commands())) <= {pb.HARVEST_MODE_OFF}, "a policy lifts no stop"
    bench.step(PolicyDeleted("p"))
    bench.step(PolicyDeleted("q"))
    bench.step(HarvestSet(HarvestMode.ACTIVE, None, opens=False))
    assert bench.core.capacity.gate.policies == ()
    assert set(modes(bench.commands())) <= {pb.HARVEST_MODE_OFF}


def test_the_harvest_command_opens_a_scheduler_without_policies() -> None:
    bench = closed()
    attach(bench)
    bench.step(HarvestSet(HarvestMode.ACTIVE, None))
    assert modes(bench.commands()) == [pb.HARVEST_MODE_ACTIVE]
    again = CoreBench(HarvestMode.OFF, bench.store).with_job()
    assert modes(attach(again)) == [pb.HARVEST_MODE_ACTIVE]
    assert again.core.status(again.now_s).harvest == pb.HARVEST_MODE_ACTIVE
    bench.step(HarvestSet(HarvestMode.OFF, None))
    assert modes(attach(CoreBench(HarvestMode.OFF, bench.store))) == [pb.HARVEST_MODE_OFF]


def test_a_stop_that_is_over_lends_nothing_without_a_policy() -> None:
    store = InMemoryStore()
    store.write(STOP, b'{"mode": "active"}')
    bench = CoreBench(HarvestMode.OFF, store).with_job()
    assert modes(attach(bench)) == [pb.HARVEST_MODE_OFF]
    assert not bench.core.capacity.gate.policies


@pytest.mark.parametrize("key", ["harvest", "job"])
def test_a_store_of_an_old_layout_is_refused(key: str) -> None:
    store = InMemoryStore()
    store.write(key, b'"off"')
    with pytest.raises(ConfigError, match=r"before 0\.3\.0"):
        load(store.entries)


def test_policies_and_a_halted_canary_survive_a_restart() -> None:
    bench = closed()
    apply(bench, slackShare=0.3, canary={"percent": 50})
    for stream in range(1, 9):
        attach(bench, stream)
    lending = [v.node for v in bench.core.capacity.gate.verdicts() if v.mode is HarvestMode.ACTIVE]
    stream = int(lending[0].removeprefix("n")) + 1
    bench.step(Offered(stream, (offer(node=lending[0], ttl_s=10.0),)))
    bad = 0
    for minute in range(61):
        bench.now_s += 60.0
        bench.step(Offered(stream, (offer(node=lending[0], ttl_s=10.0, epoch=minute),)))
        bench.step(Tick(NOON_S))
        bad += 50
        host = pb.HostTelemetry(slo_good=bad, slo_bad=bad)
        bench.step(RatesMeasured(stream, pb.Telemetry(host=host)))
        bench.at(bench.now_s + 2.0)
    assert bench.core.capacity.gate.halted("p")
    saved = load(bench.store.entries)
    assert saved.policies == bench.core.capacity.gate.policies
    again = CoreBench(HarvestMode.OFF, bench.store)
    attach(again)
    assert "canary halted" in again.core.capacity.gate.verdict("n0").limits[0].text
    assert {v.mode for v in bench.core.capacity.gate.verdicts()} == {HarvestMode.OFF}


def test_a_node_is_held_for_the_one_of_its_hosts_that_burns_its_budget() -> None:
    bench = closed()
    apply(bench)
    attach(bench)
    for minute in range(61):
        bench.now_s += 60.0
        bench.step(Offered(1, (offer(ttl_s=10.0, epoch=minute),)))
        counts = {"a": (80 * minute, 20 * minute), "b": (9_000 * minute, 0)}
        hosts = [pb.HostTelemetry(host=h, slo_good=g, slo_bad=b) for h, (g, b) in counts.items()]
        whole = pb.HostTelemetry(slo_good=9_080 * minute, slo_bad=20 * minute)
        bench.step(RatesMeasured(1, pb.Telemetry(host=whole, hosts=hosts)))
        bench.at(bench.now_s + 2.0)
    [row] = bench.core.explained("n0", 0.0)
    assert row.mode == pb.HARVEST_MODE_HOLD_AND_DRAIN
    assert row.limits[0].startswith("SLO budget of host a: ")


def test_a_blackout_begins_and_ends_by_the_wall_clock_that_is_handed_in() -> None:
    bench = closed()
    apply(bench, blackoutWindows=[{"from": "22:00", "to": "23:00", "timeZone": "UTC"}])
    attach(bench)
    assert modes(bench.commands()) == [pb.HARVEST_MODE_HOLD_AND_DRAIN], "the time is not known yet"
    bench.now_s += 2.0
    bench.step(Tick(NOON_S))
    assert modes(bench.commands()) == []
    bench.now_s += 2.0
    bench.step(Tick(NOON_S + 3_600))
    assert modes(bench.commands()) == [pb.HARVEST_MODE_ACTIVE]


def test_advice_is_logged_and_shown_and_nothing_is_done() -> None:
    bench = closed()
    apply(bench, mode="Advisory")
    attach(bench)
    assert "capacity_advice" in bench.records()
    bench.offered()
    assert "lease" not in bench.kinds()
    [row] = bench.core.status(bench.now_s).capacity
    assert (row.mode, row.would) == (pb.HARVEST_MODE_OFF, pb.HARVEST_MODE_ACTIVE)
    assert list(row.limits) == ["mode Advisory (p)"]


def test_a_quota_bounds_the_guests_of_a_job() -> None:
    bench = closed()
    apply(bench, tenants=[{"job": "grpo", "maxGuests": 1}])
    attach(bench)
    bench.offered(offer("g0"), offer("g1"))
    assert [each.replica for each in bench.core._leasing.leases()] == ["g0"]


def test_a_policys_cooldown_is_kept_after_a_revocation() -> None:
    bench = closed()
    apply(bench, cooldown="30s")
    attach(bench)
    bench.offered()
    bench.step(TakenBack(1, "g0", 1, "pressure"))
    bench.now_s += 5.0
    bench.offered()
    assert "lease" not in bench.kinds()
    bench.now_s += 26.0
    bench.offered()
    assert bench.lease().epoch == 2


def test_a_store_with_a_policy_that_cannot_be_is_refused_in_one_line() -> None:
    store = InMemoryStore()
    store.write("policies/p", json.dumps({"policy": {"name": "p", "mod": "Off"}}).encode())
    with pytest.raises(ConfigError, match="no scheduler wrote"):
        load(store.entries)


def test_what_is_no_policy_is_refused_with_its_path() -> None:
    with pytest.raises(ConfigError, match=r"maxHarvst: .* did you mean maxHarvest"):
        asked(pb.ApplyPolicyRequest(policy='{"name":"p","maxHarvst":{}}'))


def test_modes_of_single_replicas_are_bounded_in_number() -> None:
    bench = CoreBench()
    for number in range(MAX_OVERRIDES):
        bench.core.capacity.stop.set_mode(HarvestMode.HOLD, f"r{number}")
    with pytest.raises(RefusedError, match="set the mode of the cluster"):
        bench.step(HarvestSet(HarvestMode.HOLD, "one-more"))


async def test_the_whole_round_over_grpc(tmp_path: Path) -> None:
    async with running(Bench(InMemoryStore(), tmp_path)) as bench:
        await bench.stub.RegisterJob(pb.RegisterJobRequest(job="j"))
        node = FakeNode(bench.stub)
        node.offer()
        assert (await node.hears("lease")).lease.epoch == 1
        request = pb.ApplyPolicyRequest(policy='{"name":"p","stopPolicy":"HoldAndDrain"}')
        request.dry_run = True
        assert (await bench.stub.ApplyPolicy(request)).changed
        assert len((await bench.stub.ListPolicies(pb.ListPoliciesRequest())).policies) == 1
        request.dry_run = False
        assert (await bench.stub.ApplyPolicy(request)).changed
        assert (await node.hears("release")).release.epoch == 1
        listed = (await bench.stub.ListPolicies(pb.ListPoliciesRequest())).policies
        assert [each.name for each in listed] == ["cli", "p"]
        [row] = (await bench.stub.ExplainPolicy(pb.ExplainPolicyRequest(node="n0"))).nodes
        assert row.policy_mode == "Advisory"
        await bench.stub.DeletePolicy(pb.DeletePolicyRequest(name="p"))
        await shows(bench, lambda said: said.harvest == pb.HARVEST_MODE_ACTIVE)
        for call in (
            bench.stub.DeletePolicy(pb.DeletePolicyRequest(name="p")),
            bench.stub.ExplainPolicy(pb.ExplainPolicyRequest(node="x")),
            bench.stub.ApplyPolicy(pb.ApplyPolicyRequest(policy="{")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert ";" in (caught.value.details() or "")
        await node.leave()
