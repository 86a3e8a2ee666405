"""Capacity policies on a scheduler: verdicts, orders, objects of Kubernetes, and usage."""

import csv
import io
import json
import time
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
from core_cases import CoreBench, offer
from service_cases import Bench, FakeNode, running, shows

from elastic_scheduler import HarvestMode
from elastic_scheduler.capacity import CLI, CapacityPolicy, Halt, policy_of
from rose.cli.cluster.policy import NodePolicy, explained
from rose.cli.main import main
from rose.errors import ConfigError, RefusedError
from rose.operate.fleet import capacity_of
from rose.rpc import rose_pb2 as pb
from rose.scheduler import wire
from rose.scheduler.core.capacity import MAX_OVERRIDES, MOST_BYTES
from rose.scheduler.core.leasing import LeaseTimes
from rose.scheduler.core.messages import (
    Attached,
    Detached,
    HarvestSet,
    LogRecord,
    Obeyed,
    ObjectsHeard,
    Offered,
    PolicyApplied,
    PolicyDeleted,
    RatesMeasured,
    Save,
    TakenBack,
    Tick,
)
from rose.scheduler.core.observed import PolicyView
from rose.scheduler.core.scheduler_core import SchedulerCore
from rose.scheduler.core.usage import (
    KEPT_S,
    MOST_PAIRS,
    OTHERS,
    GuestReading,
    Lent,
    UsageBook,
    UsageLog,
    owner_of,
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


def lending(**said: object) -> CoreBench:
    """Return a scheduler with a job, a policy of these fields and a node that confirms orders."""
    bench = closed()
    apply(bench, **said)
    attach_obeying(bench)
    return bench


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
    bench = lending(mode="Advisory", maxHarvest={"memory": "1Gi"})
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
    bench = lending(mode="Advisory")
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
    bench = lending()
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
    bench = lending()
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
    bench = lending(blackoutWindows=[{"from": "22:00", "to": "23:00", "timeZone": "UTC"}])
    assert modes(bench.commands()) == [pb.HARVEST_MODE_HOLD_AND_DRAIN], "the time is not known yet"
    bench.now_s += 2.0
    bench.step(Tick(NOON_S))
    assert modes(bench.commands()) == []
    bench.now_s += 2.0
    bench.step(Tick(NOON_S + 3_600))
    assert modes(bench.commands()) == [pb.HARVEST_MODE_ACTIVE]


def test_advice_is_logged_and_shown_and_nothing_is_done() -> None:
    bench = lending(mode="Advisory")
    assert "capacity_advice" in bench.records()
    bench.offered()
    assert "lease" not in bench.kinds()
    [row] = bench.core.status(bench.now_s).capacity
    assert (row.mode, row.would) == (pb.HARVEST_MODE_OFF, pb.HARVEST_MODE_ACTIVE)
    assert list(row.limits) == ["mode Advisory (p)"]


def test_a_quota_bounds_the_guests_of_a_job() -> None:
    bench = lending(tenants=[{"job": "grpo", "maxGuests": 1}])
    bench.offered(offer("g0"), offer("g1"))
    assert [each.replica for each in bench.core._leasing.leases()] == ["g0"]


@pytest.mark.parametrize(
    "fewer", [{"tenants": [{"job": "grpo", "maxGuests": 1}]}, {"maxHarvest": {"guests": 1}}]
)
def test_fewer_guests_in_a_policy_end_the_newest_leases(fewer: dict[str, object]) -> None:
    bench = lending()
    bench.offered(offer("g1"))
    bench.now_s += 1.0
    bench.offered(offer("g0"), offer("g1"))
    assert len(bench.core._leasing.leases()) == 2
    event = PolicyApplied(policy_of({**ACTIVE, **fewer}))
    assert bench.core.outlook(event, bench.now_s).ends == ["g0"]
    apply(bench, **fewer)
    [released] = [each.release for each in bench.commands() if each.HasField("release")]
    assert (released.replica, released.reason) == ("g0", "more guests than a policy allows")


def test_a_policys_cooldown_is_kept_after_a_revocation() -> None:
    bench = lending(cooldown="30s")
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
        outlook = await bench.stub.ApplyPolicy(request)
        assert (outlook.changed, [*outlook.nodes], outlook.attached) == (True, ["n0"], 1)
        assert [*outlook.ends] == ["g0"]
        assert len((await bench.stub.ListPolicies(pb.ListPoliciesRequest())).policies) == 1
        request.dry_run = False
        assert (await bench.stub.ApplyPolicy(request)).changed
        assert (await node.hears("release")).release.epoch == 1
        listed = (await bench.stub.ListPolicies(pb.ListPoliciesRequest())).policies
        assert [each.name for each in listed] == ["cli", "p"]
        [row] = (await bench.stub.ExplainPolicy(pb.ExplainPolicyRequest(node="n0"))).nodes
        assert row.policy_mode == "Active"
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


# ---- orders ----


def attach_obeying(bench: CoreBench, *, obeys: bool = True) -> list[pb.NodeCommand]:
    bench.step(Attached("n0", 1, obeys=obeys, release="0.3.0", takes_caps=True))
    return bench.commands()


def stop(bench: CoreBench) -> pb.Harvest:
    bench.step(HarvestSet(HarvestMode.OFF, None, opens=False))
    [told] = [each.harvest for each in bench.commands() if each.HasField("harvest")]
    return told


def row(bench: CoreBench) -> pb.AttachedNode:
    [found] = bench.core.status(bench.now_s).nodes
    return found


def confirmed_s(bench: CoreBench) -> float | None:
    return row(bench).obeyed_s if row(bench).HasField("obeyed_s") else None


def test_a_stop_is_confirmed_with_its_time_and_each_stop_anew() -> None:
    bench = lending()
    for took_s in (0.04, 0.25):
        told = stop(bench)
        assert (told.mode, confirmed_s(bench)) == (pb.HARVEST_MODE_OFF, None)
        bench.now_s += took_s
        bench.step(Obeyed(1, told.order))
        assert confirmed_s(bench) == pytest.approx(took_s)


def test_a_word_about_an_earlier_order_confirms_nothing() -> None:
    bench = lending()
    first = stop(bench)
    again = stop(bench)
    assert again.order > first.order
    bench.step(Obeyed(1, first.order))
    assert confirmed_s(bench) is None


def test_only_the_last_of_several_commands_is_answered() -> None:
    bench = closed()
    apply(bench)
    bench.step(HarvestSet(HarvestMode.HOLD, "g0", opens=False))
    orders = [each.harvest.order for each in attach_obeying(bench) if each.HasField("harvest")]
    assert [order > 0 for order in orders] == [False, True]


def test_a_node_that_never_confirms_is_not_asked_and_not_expected_to() -> None:
    bench = closed()
    apply(bench)
    told = attach_obeying(bench, obeys=False)
    assert modes(told) == [pb.HARVEST_MODE_ACTIVE]
    assert all(not each.harvest.order for each in told)
    assert not row(bench).obeys


def test_a_snapshot_says_of_which_release_and_how_silent_each_node_is() -> None:
    bench = closed()
    attach_obeying(bench)
    guests = [pb.GuestTelemetry(replica="g0")]
    bench.step(RatesMeasured(1, pb.Telemetry(guests=guests)))
    bench.now_s += 4.0
    found = row(bench)
    assert (found.node, found.release, found.silent_s) == ("n0", "0.3.0", 4.0)
    assert list(found.replicas) == ["g0"]


def test_a_confirmation_is_read_from_the_wire() -> None:
    report = pb.NodeReport(node="n0", obeyed=pb.Obeyed(order=7))
    assert wire.event_of(report, 3) == Obeyed(3, 7)


def test_a_full_kv_cache_is_a_limit_with_its_figures() -> None:
    bench = lending(watermarks={"high": 0.8, "low": 0.7})
    for share, limits in ((0.83, ["watermarks.high (kv 83% > 80%) (p)"]), (0.8, [])):
        host = pb.HostTelemetry(node="n0", kv_share=share)
        bench.step(RatesMeasured(1, pb.Telemetry(host=host)))
        [found] = bench.core.explained("n0", 0.0)
        assert list(found.limits) == limits
        assert found.kv_share == share


# ---- objects ----


def policy(name: str = "chat", **said: object) -> CapacityPolicy:
    return policy_of({"name": name, "mode": "Active", **said})


def bench(*policies: CapacityPolicy, asks: bool = True) -> CoreBench:
    """A scheduler that asks an API server, with these policies of objects in force, and a node."""
    made = CoreBench(HarvestMode.OFF)
    restarted(made, asks=asks)
    made.with_job()
    for each in policies:
        made.step(PolicyApplied(each, of_object=True))
    made.step(Attached("n0", 1, labels={"pool": "a"}, takes_caps=True))
    made.step(ObjectsHeard(made.now_s))
    return made


def restarted(made: CoreBench, *, asks: bool) -> None:
    """The next leader, of what is stored."""
    saved = load(made.store.entries)
    made.core = SchedulerCore(saved, HarvestMode.OFF, LeaseTimes(5.0, 1.0, 1.0), asks_objects=asks)
    made.table = pb.ReplicaTable()
    made.at(made.now_s)


def mode(made: CoreBench) -> HarvestMode:
    return made.core.capacity.gate.verdict("n0").mode


def limits(made: CoreBench) -> list[str]:
    [row] = made.core.explained("n0", 0.0)
    return list(row.limits)


def test_without_news_the_policy_holds_for_stale_after_and_then_nothing_new_is_lent() -> None:
    made = bench(policy(staleAfter="3s"))
    made.at(made.now_s + 3.0)
    assert mode(made) is HarvestMode.ACTIVE, "the last policy holds"
    made.at(made.now_s + 1.5)
    assert mode(made) is HarvestMode.HOLD, "not Off: nothing is drained"
    assert limits(made) == ["the API server is not heard (chat)"]
    made.step(ObjectsHeard(made.now_s))
    made.at(made.now_s + 1.0)
    assert mode(made) is HarvestMode.ACTIVE


def test_what_was_heard_before_a_lease_ends_no_lease() -> None:
    made = bench(policy())
    made.step(Offered(1, (offer(),)))
    assert made.lease().epoch == 1
    made.at(made.now_s + 1.0)
    made.offered(offer(epoch=1))
    made.at(made.now_s + 4.5)
    assert mode(made) is HarvestMode.HOLD
    assert "release" not in made.kinds()


def test_news_that_come_late_say_nothing_newer() -> None:
    made = bench(policy())
    made.step(ObjectsHeard(made.now_s - 50.0))
    made.at(made.now_s + 1.0)
    assert mode(made) is HarvestMode.ACTIVE


def test_policies_of_operators_need_no_api_server() -> None:
    made = bench()
    made.step(PolicyApplied(policy("own")))
    made.at(made.now_s + 60.0)
    assert mode(made) is HarvestMode.ACTIVE


def test_an_object_that_cannot_be_taken_holds_what_it_said_before() -> None:
    made = bench(policy())
    made.step(ObjectsHeard(made.now_s, frozenset({"chat", "unknown"})))
    made.at(made.now_s + 1.0)
    assert mode(made) is HarvestMode.HOLD
    assert limits(made) == ["the object cannot be taken as it is now (chat)"]


def test_a_new_leader_keeps_the_policy_and_has_stale_after_to_hear_the_api_server() -> None:
    made = bench(policy())
    restarted(made, asks=True)
    made.with_job()
    made.step(Attached("n0", 1, labels={}, takes_caps=True))
    made.at(made.now_s + 4.0)
    assert mode(made) is HarvestMode.ACTIVE
    made.at(made.now_s + 2.0)
    assert mode(made) is HarvestMode.HOLD


def test_a_scheduler_that_asks_nobody_holds_what_objects_said() -> None:
    made = bench(policy())
    restarted(made, asks=False)
    made.step(Attached("n0", 1, labels={}, takes_caps=True))
    made.at(made.now_s + 1.0)
    assert mode(made) is HarvestMode.HOLD
    assert "start the scheduler with --kubernetes" in limits(made)[0]
    made.step(PolicyDeleted("chat"))
    assert not load(made.store.entries).policies, "an operator may take it out"


def test_each_policy_has_one_owner() -> None:
    made = bench(policy("chat"))
    made.step(PolicyApplied(policy("own")))
    for refused, words in (
        (PolicyApplied(policy("chat", slackShare=0.5)), "kubectl edit rcp chat"),
        (PolicyDeleted("chat"), "kubectl edit rcp chat"),
        (PolicyApplied(policy("own"), of_object=True), "rose policy delete own"),
        (PolicyDeleted("own", of_object=True), "rose policy delete own"),
        (PolicyApplied(policy(CLI), of_object=True), "another name"),
    ):
        with pytest.raises(RefusedError, match=words):
            made.step(refused)


def test_a_canary_that_halts_is_still_its_objects() -> None:
    made = bench(policy())
    [save] = made.core.capacity._recorded([Halt("chat", "n0 burns")])
    assert isinstance(save, Save)
    made.write(save.write)
    saved = load(made.store.entries)
    assert saved.objects == {"chat"}
    assert saved.halted == {"chat": "n0 burns"}


# ---- what is seen of a policy ----


def view(made: CoreBench, name: str = "chat") -> PolicyView:
    return made.core.policy_views(made.now_s)[name]


def test_a_view_counts_nodes_leases_and_what_holds_them_back() -> None:
    made = bench(
        policy(), policy("strict", stopPolicy="HoldAndDrain", nodeSelector={"names": ["n1"]})
    )
    made.step(Attached("n1", 2, labels={"pool": "a"}, takes_caps=True))
    made.step(Offered(1, (offer(),)))
    made.at(made.now_s + 1.0)
    guest = pb.GuestTelemetry(replica="g0", kv_bytes=5, state="healthy")
    made.step(RatesMeasured(1, pb.Telemetry(guests=[guest])))
    found = view(made)
    assert (found.nodes, found.lending, found.lent_bytes) == (2, 1, 5)
    assert found.limits == {"stop_policy": (1, "stopPolicy HoldAndDrain (strict)")}
    assert found.stricter == {}, "it says nothing about a stop itself"
    assert view(made, "strict").nodes == 1


def test_a_stricter_policy_is_named_for_the_fields_that_this_one_sets() -> None:
    made = bench(
        policy(maxHarvest={"compute": 0.5, "memory": "8Gi"}),
        policy("everywhere", mode="Advisory", maxHarvest={"compute": 0.2, "memory": "8Gi"}),
    )
    made.at(made.now_s + 1.0)
    assert view(made).stricter == {
        ("everywhere", "mode"): 1,
        ("everywhere", "maxHarvest.compute"): 1,
    }
    assert view(made, "everywhere").stricter == {}, "the same value is no conflict"


def test_a_stop_is_not_done_before_the_node_has_measured_that_nothing_is_left() -> None:
    made = bench(policy(mode="Off"))
    made.at(made.now_s + 1.0)
    made.step(Offered(1, (offer(),)))
    for held, behind in ((7, {"n0": "g0 is stopped and holds 7 bytes"}), (0, {})):
        guest = pb.GuestTelemetry(replica="g0", held_bytes=held, state="stopped")
        made.step(RatesMeasured(1, pb.Telemetry(guests=[guest])))
        assert view(made).behind == behind
    assert view(made).seen == 1


def test_nodes_that_are_silent_or_away_are_named_by_the_labels_that_they_had() -> None:
    made = bench(policy(nodeSelector={"matchLabels": {"pool": "a"}}))
    made.at(made.now_s + 6.0)
    assert list(view(made).silent) == ["n0"], "attached, and not heard"
    made.step(Detached(1))
    assert list(view(made).silent) == ["n0"]
    assert view(made).nodes == 0


# ---- usage ----


def guest(job: str, tokens: int = 0, duty: float = 0.5, replica: str = "g0") -> GuestReading:
    return GuestReading(replica, job, duty, 100, tokens)


def test_time_compute_memory_and_tokens_are_summed_between_two_looks() -> None:
    book = UsageBook()
    book.heard("n0", "chat", [guest("grpo", 10)], 0.0)
    assert book.sums(0.0) == {}
    book.heard("n0", "chat", [guest("grpo", 30)], 2.0)
    book.heard("n0", "chat", [guest("grpo", 35)], 3.0)
    assert book.sums(3.0) == {("chat", "grpo"): Lent(3.0, 1.5, 300.0, 25)}


@pytest.mark.parametrize(("ranks", "counted"), [(0, 1), (1, 1), (8, 8), (2**32 - 1, 64)])
def test_compute_counts_each_gpu_of_a_guest(ranks: int, counted: int) -> None:
    book = UsageBook()
    for at_s in (0.0, 2.0):
        book.heard("n0", "chat", [replace(guest("grpo"), ranks=ranks)], at_s)
    assert book.sums(2.0) == {("chat", "grpo"): Lent(2.0, 1.0 * counted, 200.0, 0)}


def test_time_of_nobody_and_of_two_jobs_is_not_counted() -> None:
    book = UsageBook()
    book.heard("n0", "chat", [guest("")], 0.0)
    book.heard("n0", "chat", [guest("a")], 1.0)
    book.heard("n0", "chat", [guest("b")], 2.0)
    book.heard("n0", "chat", [guest("b")], 60.0)
    assert not any(lent.seconds for lent in book.sums(60.0).values()), "silence lends nothing"
    book.heard("n0", "chat", [guest("b")], 61.0)
    book.forget("n0")
    book.heard("n0", "chat", [guest("b")], 62.0)
    assert book.sums(62.0)["chat", "b"].seconds == 1.0


def test_an_engine_that_was_started_again_counts_from_0() -> None:
    book = UsageBook()
    for at_s, tokens in enumerate((100, 150, 7)):
        book.heard("n0", "", [guest("a", tokens)], float(at_s))
    assert book.sums(2.0)["", "a"].tokens == 57


def test_pairs_are_bounded_and_old_ones_are_forgotten() -> None:
    book = UsageBook()
    for number in range(MOST_PAIRS + 5):
        for at_s in (0.0, 1.0):
            book.heard(f"n{number}", f"o{number}", [guest("a")], at_s)
    sums = book.sums(1.0)
    assert len(sums) == MOST_PAIRS + 1
    assert sums[OTHERS, OTHERS].seconds == 5.0
    assert book.sums(2.0 + KEPT_S) == {}


def test_the_owner_is_a_label_or_else_the_deployment() -> None:
    assert owner_of({"rose.dev/owner": "team", "rose.dev/deployment": "chat"}) == "team"
    assert owner_of({"rose.dev/deployment": "chat"}) == "chat"
    assert owner_of({}) == ""


def test_the_log_has_what_came_on_top_each_time() -> None:
    written: list[dict[str, object]] = []
    log = UsageLog(lambda record: written.append(dict(record)))
    log.take({("chat", "a"): Lent(60.0, 30.0, 600.0, 5)}, 100.0)
    log.take({("chat", "a"): Lent(60.0, 30.0, 600.0, 5), ("chat", "b"): Lent(1.0)}, 160.0)
    log.take({("chat", "a"): Lent(90.0, 30.0, 600.0, 9)}, 220.0)
    assert [(each["t"], each["job"], each["seconds"]) for each in written] == [
        (100.0, "a", 60.0),
        (160.0, "b", 1.0),
        (220.0, "a", 30.0),
    ]
    assert written[-1]["tokens"] == 4


@pytest.fixture
def records(tmp_path: Path) -> Path:
    file = tmp_path / "usage.jsonl"
    log: list[str] = []
    book = UsageLog(lambda record: log.append(json.dumps(record) + "\n"))
    now_s = time.time()
    sums = {("chat", "a"): Lent(3_600.0, 1_800.0, float(3_600 << 30), 50)}
    book.take(sums, now_s - 7_200.0)
    sums |= {("code", "a"): Lent(7_200.0, 7_200.0, 0.0, 7)}
    book.take(sums, now_s - 60.0)
    file.with_name("usage.jsonl.1").write_text(log[0])
    file.write_text(log[1] + '{"t": 1')
    return file


def test_usage_prints_sums_of_the_time_that_was_asked_for(
    records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["usage", "--since", "1d", str(records)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:2] == ["lent", "since"]
    assert lines[3] == ["chat", "a", "1.00", "0.50", "1.00", "50"]
    assert lines[4] == ["code", "a", "2.00", "2.00", "0.00", "7"]
    assert main(["usage", "--since", "1h", "--by", "job", "-o", "json", str(records)]) == 0
    row = {"job": "a", "leased_s": 7200.0, "gpu_s": 7200.0, "byte_s": 0, "tokens": 7}
    assert json.loads(capsys.readouterr().out) == [row]
    with records.with_name("usage.jsonl.1").open("a") as file:
        file.write('{"records_dropped": 3, "t_s": 1.0}\n')
    assert main(["usage", "--since", "1s", str(records)]) == 0
    assert "lacks 3 records" in capsys.readouterr().err
    assert main(["usage", "--since", "1s", str(records)]) == 0
    assert "nothing was lent" in capsys.readouterr().out


def test_usage_is_priced_by_day_and_exported(
    records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spent = ["usage", "--since", "1d", "--gpu-hour", "2.5", str(records)]
    assert main([*spent, "-o", "csv", "--by", "job,owner"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(r["job"], r["owner"], r["gpu_hours"], r["cost"]) for r in rows] == [
        ("a", "chat", "0.500000", "1.25"),
        ("a", "code", "2.000000", "5.0"),
    ]
    assert main([*spent, "-o", "opencost"]) == 0
    days = json.loads(capsys.readouterr().out)["data"]
    found = {name: each for day in days for name, each in day.items()}
    assert {name: (e["gpuHours"], e["gpuCost"], e["minutes"]) for name, e in found.items()} == {
        "chat/a": (0.5, 1.25, 60.0),
        "code/a": (2.0, 5.0, 120.0),
    }
    assert found["code/a"]["properties"] == {"labels": {"rose_owner": "code", "rose_job": "a"}}
    assert found["code/a"]["start"] < found["code/a"]["end"]
    assert main([*spent, "--by", "day,team"]) == 2
    assert "write some of owner, job, day" in capsys.readouterr().err


def test_usage_refuses_what_is_no_record_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("hello\n")
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\n")
    no_record = "line 1, is no record"
    for file, said in ((other, no_record), (binary, no_record), (tmp_path / "none", "is no file")):
        assert main(["usage", str(file)]) == 2
        assert said in capsys.readouterr().err


def test_a_record_that_is_cut_within_a_character_is_left_for_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = tmp_path / "usage.jsonl"
    records.write_bytes('{"t": 1, "job": "модель'.encode()[:-1])
    assert main(["usage", str(records)]) == 0
    assert "nothing was lent" in capsys.readouterr().out


async def test_a_leased_guests_telemetry_is_counted_for_its_job(tmp_path: Path) -> None:
    async with running(Bench(InMemoryStore(), tmp_path)) as bench:
        await bench.stub.RegisterJob(pb.RegisterJobRequest(job="grpo", max_staleness=1))
        node = FakeNode(bench.stub)
        node.offer()
        await node.hears("lease")
        await shows(bench, lambda reply: bool(reply.leases))

        def tell(tokens: int) -> None:
            said = pb.GuestTelemetry(replica="g0", duty=1.0, kv_bytes=64, tokens_total=tokens)
            node.say(telemetry=pb.Telemetry(guests=[said]))

        tell(10)
        await shows(bench, lambda reply: any(g.tokens_total == 10 for g in reply.guests))
        tell(30)
        await shows(bench, lambda reply: any(g.tokens_total == 30 for g in reply.guests))
        usage = bench.service.figures().core.usage
        assert usage["", "grpo"].tokens == 20
        assert usage["", "grpo"].seconds > 0
        await node.leave()
