"""Policies of Kubernetes objects in the scheduler: whose they are, and what holds without news."""

import pytest
from core_cases import CoreBench, offer

from elastic_scheduler import HarvestMode
from elastic_scheduler.capacity import CLI, CapacityPolicy, Halt, policy_of
from rose.errors import RefusedError
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.leasing import LeaseTimes
from rose.scheduler.core.messages import (
    Attached,
    Detached,
    ObjectsHeard,
    Offered,
    PolicyApplied,
    PolicyDeleted,
    RatesMeasured,
    Save,
)
from rose.scheduler.core.policy_views import PolicyView
from rose.scheduler.core.scheduler_core import SchedulerCore
from rose.scheduler.persistence import load


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
