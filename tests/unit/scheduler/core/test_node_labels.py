"""Labels of Kubernetes nodes reach policies, and no node is believed about them."""

from collections.abc import Mapping

from core_cases import CoreBench, offer

from elastic_scheduler import HarvestMode
from elastic_scheduler.capacity import policy_of
from elastic_scheduler.capacity.gate import SETTLE_S
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.leasing import LeaseTimes
from rose.scheduler.core.messages import Attached, ObjectsHeard, Offered, PolicyApplied, Tick
from rose.scheduler.core.scheduler_core import SchedulerCore
from rose.scheduler.persistence import load

KEYS = ("pool", "example.com/*")
UNHEARD = "labels of Kubernetes are unknown: the API server is not heard yet"
STRANGER = "labels of Kubernetes are unknown: it has no such node"
POLICIES = (
    {"name": "lend", "mode": "Active", "nodeSelector": {"matchLabels": {"pool": "a"}}},
    {"name": "never", "mode": "Off", "nodeSelector": {"matchLabels": {"pool": "b"}}},
)


def led(store: CoreBench | None = None) -> CoreBench:
    """A scheduler that asks for labels; `store`: the leader before it, whose store it reads."""
    made = store or CoreBench(HarvestMode.OFF)
    saved = load(made.store.entries)
    times = LeaseTimes(5.0, 1.0, 1.0)
    made.core = SchedulerCore(saved, HarvestMode.OFF, times, asks_objects=True, label_keys=KEYS)
    made.table = pb.ReplicaTable()
    made.at(made.now_s)
    made.with_job()
    for each in POLICIES if store is None else ():
        made.step(PolicyApplied(policy_of(each)))
    return made


def attach(made: CoreBench, node: str = "n0", stream: int = 1, **own: str) -> None:
    made.step(Attached(node, stream, labels=own, takes_caps=True))


def heard(made: CoreBench, **labels: Mapping[str, str]) -> None:
    made.step(ObjectsHeard(made.now_s, labels=labels))
    made.now_s += 1.0
    made.step(Tick())


def mode(made: CoreBench, node: str = "n0") -> HarvestMode:
    return made.core.capacity.gate.verdict(node).mode


def limits(made: CoreBench, node: str = "n0") -> list[str]:
    [row] = made.core.explained(node, 0.0)
    return list(row.limits)


def labels(made: CoreBench) -> Mapping[str, str]:
    [seen] = made.core.observed(made.now_s).nodes
    return seen.labels


def test_pools_of_one_release_are_told_apart_and_follow_a_change() -> None:
    made = led()
    heard(made, n0={"pool": "a", "example.com/zone": "z"}, n1={"pool": "b"})
    attach(made, owner="chat")
    attach(made, "n1", 2)
    made.at(made.now_s + 1.0)
    assert (mode(made), mode(made, "n1")) == (HarvestMode.ACTIVE, HarvestMode.OFF)
    heard(made, n0={"pool": "b"}, n1={"pool": "a"})
    assert (mode(made), mode(made, "n1")) == (HarvestMode.OFF, HarvestMode.ACTIVE)
    heard(made, n0={}, n1={"pool": "a"})
    assert mode(made) is HarvestMode.OFF, "a label that is taken off lends nothing more"


def test_a_node_is_not_believed_about_labels_that_kubernetes_decides() -> None:
    made = led()
    heard(made, n0={"pool": "b"}, n1={})
    attach(made, **{"pool": "a", "example.com/zone": "mine", "owner": "chat"})
    made.at(made.now_s + 1.0)
    assert labels(made) == {"pool": "b", "owner": "chat"}
    assert mode(made) is HarvestMode.OFF
    attach(made, "n1", 2, pool="a")
    made.at(made.now_s + 1.0)
    assert mode(made, "n1") is HarvestMode.OFF


def test_a_node_that_kubernetes_does_not_know_lends_nothing() -> None:
    made = led()
    made.step(PolicyApplied(policy_of({"name": "all", "mode": "Active"})))
    heard(made, n1={"pool": "a"})
    made.at(made.now_s + SETTLE_S)
    heard(made, n1={"pool": "a"})
    attach(made, "stranger", pool="a")
    heard(made, n1={"pool": "a"})
    assert mode(made, "stranger") is HarvestMode.OFF
    assert limits(made, "stranger") == [STRANGER]


def test_a_new_leader_ends_no_loan_before_it_has_heard_the_labels() -> None:
    made = led()
    heard(made, n0={"pool": "a"})
    attach(made)
    made.at(made.now_s + 1.0)
    made.step(Offered(1, (offer(),)))
    assert made.lease().epoch == 1
    led(made)
    attach(made)
    assert made.commands() == [], "without labels no policy lends here, and it keeps its loan"
    made.offered(offer(epoch=1))
    made.at(made.now_s + 1.0)
    assert (mode(made), limits(made)) == (
        HarvestMode.HOLD,
        ["no policy matches this node", UNHEARD],
    )
    assert "release" not in made.kinds()
    heard(made, n0={"pool": "a"})
    assert mode(made) is HarvestMode.ACTIVE


def test_an_api_server_that_is_never_heard_counts_against_the_guest() -> None:
    made = led()
    attach(made)
    made.at(made.now_s + SETTLE_S + 1.0)
    assert mode(made) is HarvestMode.OFF
    assert made.core.capacity.gate.verdict("n0").settled


def test_old_labels_lend_nothing_new() -> None:
    made = led()
    heard(made, n0={"pool": "a"})
    attach(made)
    made.at(made.now_s + 1.0)
    assert mode(made) is HarvestMode.ACTIVE
    made.at(made.now_s + 30.0)
    assert mode(made) is HarvestMode.HOLD
    assert limits(made) == ["the API server is not heard (lend)"]
