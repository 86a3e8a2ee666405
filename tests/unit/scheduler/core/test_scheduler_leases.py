"""Leases follow offers, health, a policy, time and the operator's word, across leaders.

The stories are in tests/traces/scheduler.
"""

from pathlib import Path

import pytest
from core_cases import JOB, CoreBench, bench_with, offer
from hypothesis import given
from hypothesis import strategies as st

from elastic_scheduler import HarvestMode, ReplicaKind
from rose.errors import ConfigError, RefusedError
from rose.logs.eventlog import EventLog
from rose.main.scheduler import settings_of
from rose.node.scheduler_session import NodeIdentity, SchedulerSession, _apart
from rose.rpc import rose_pb2 as pb
from rose.scheduler import wire
from rose.scheduler.core.fleet import FORGOTTEN_S, LAPSED_S
from rose.scheduler.core.leasing import SETTLE_S
from rose.scheduler.core.messages import (
    Attached,
    Command,
    Detached,
    Event,
    HarvestSet,
    Held,
    JobRegistered,
    LogRecord,
    Offered,
    RatesMeasured,
    ReplicaDrained,
    RevokeAsked,
    TakenBack,
    Tick,
)
from rose.scheduler.core.scheduler_core import SchedulerCore
from rose.scheduler.persistence import load
from rose.scheduler.service import CommandQueue, SchedulerService
from tests.fakes.memory_store import InMemoryStore


@pytest.fixture
def bench() -> CoreBench:
    return bench_with()


def test_an_epoch_that_was_reserved_by_a_scheduler_that_died_is_not_used_again() -> None:
    first = CoreBench().with_job()
    first.attach()
    first.locked = True
    first.offered(offer("g0"))
    [reserve] = first.waiting
    first.write(reserve.write)
    second = CoreBench(store=first.store)
    second.attach()
    second.offered(offer("g0"))
    assert second.lease().epoch == 2


def test_an_unhealthy_offer_is_not_leased(bench: CoreBench) -> None:
    assert bench.offered(offer(healthy=False)) == []
    assert not bench.row().leased


def test_a_paused_scheduler_renews_nothing_that_ran_out(bench: CoreBench) -> None:
    bench.offered(offer(ttl_s=9.0))
    bench.at(107.0)
    assert "lease_expired" in bench.records()
    assert bench.lease().epoch == 2


def test_a_node_that_was_silent_for_too_long_gets_a_new_epoch(bench: CoreBench) -> None:
    bench.offered(offer(ttl_s=3.0))
    bench.at(102.0)
    bench.now_s = 105.5
    bench.offered()
    assert "lease_expired" in bench.records()
    assert bench.lease().epoch == 2


def test_new_offers_void_the_earlier_ones(bench: CoreBench) -> None:
    bench.offered(offer("g0"), offer("g1"))
    bench.offered(offer("g1"))
    assert [row.id for row in bench.table.replicas] == ["g1"]


def test_reports_of_an_older_epoch_change_nothing(bench: CoreBench) -> None:
    bench.offered(offer(epoch=6))
    assert bench.lease().epoch == 7
    for stale in (
        TakenBack(1, "g0", 6, "late"),
        ReplicaDrained(1, "g0", 6, 0),
        ReplicaDrained(1, "x", 7, 0),
    ):
        bench.step(stale)
        assert bench.records() == []
    assert bench.row().leased


def test_a_lost_node_takes_its_leases_along(bench: CoreBench) -> None:
    bench.attach(stream=2, node="n1")
    bench.offered()
    bench.offered(offer("d0", kind=ReplicaKind.DEDICATED, node="n1"), stream=2)
    bench.step(Detached(1))
    assert bench.records() == ["node_lost", "lease_released"]
    assert [row.id for row in bench.table.replicas] == ["d0"]
    bench.attach(stream=3)
    bench.offered(stream=3)
    assert bench.lease(3).epoch == 2


def test_a_replica_of_two_nodes_stays_with_the_first(bench: CoreBench) -> None:
    bench.attach(stream=2, node="n1")
    bench.offered()
    assert bench.offered(offer(node="n1"), stream=2) == []
    assert "offer_refused" in bench.records()
    bench.offered(offer(node="n1"), stream=2)
    assert bench.records() == []
    assert bench.row().node == "n0"


@pytest.mark.parametrize("mode", [HarvestMode.OFF, HarvestMode.HOLD, HarvestMode.HOLD_AND_DRAIN])
def test_guests_are_leased_only_when_active_but_dedicated_always(mode: HarvestMode) -> None:
    bench = CoreBench(mode).with_job()
    bench.attach()
    bench.offered(offer("g0"), offer("d0", kind=ReplicaKind.DEDICATED))
    assert bench.lease().replica == "d0"
    bench.step(HarvestSet(HarvestMode.ACTIVE, None))
    assert bench.lease().replica == "g0"


@pytest.mark.parametrize("mode", [HarvestMode.OFF, HarvestMode.HOLD_AND_DRAIN])
def test_a_stop_releases_guests_at_once(bench: CoreBench, mode: HarvestMode) -> None:
    bench.offered(offer("g0"), offer("d0", kind=ReplicaKind.DEDICATED))
    bench.step(HarvestSet(mode, None))
    assert bench.answer() == 1
    assert bench.kinds() == ["harvest", "release"]
    assert (bench.row("g0").leased, bench.row("d0").leased) == (False, True)
    bench.step(ReplicaDrained(1, "g0", 1, 3))
    assert bench.records() == ["lease_released"]
    bench.at(130.0)
    assert "g0" not in [lease.replica for lease in bench.core.status(130.0).leases]


def test_modes_survive_a_restart_and_are_told_on_attach(bench: CoreBench) -> None:
    bench.step(HarvestSet(HarvestMode.HOLD, None))
    bench.step(HarvestSet(HarvestMode.OFF, "g1"))
    again = CoreBench(HarvestMode.ACTIVE, bench.store)
    told = [(command.harvest.mode, command.harvest.replica) for command in again.attach()]
    assert told == [(2, ""), (1, "g1")]
    again.step(HarvestSet(HarvestMode.ACTIVE, "g1"))
    assert not CoreBench(store=bench.store).core.status(0.0).overrides


def test_a_silent_table_is_told_each_second_and_a_change_at_once(bench: CoreBench) -> None:
    bench.offered()
    revision = bench.table.revision
    bench.at(100.5)
    assert bench.table.revision == revision
    bench.at(101.0)
    assert bench.table.revision == revision + 1
    bench.offered(offer(policy_version=0, healthy=False))
    assert bench.table.revision == revision + 2


_EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.just(Tick()),
    st.builds(Attached, st.sampled_from(["n0", "n1"]), st.integers(1, 4)),
    st.builds(Detached, st.integers(1, 4)),
    st.builds(
        Offered,
        st.integers(1, 4),
        st.builds(
            lambda healthy, epoch: (offer(healthy=healthy, epoch=epoch),),
            st.booleans(),
            st.integers(0, 9),
        ),
    ),
    st.builds(TakenBack, st.integers(1, 4), st.just("g0"), st.integers(0, 9), st.just("x")),
    st.builds(ReplicaDrained, st.integers(1, 4), st.just("g0"), st.integers(0, 9), st.just(0)),
    st.builds(HarvestSet, st.sampled_from(HarvestMode), st.sampled_from([None, "g0"])),
    st.just(JobRegistered(JOB, 1)),
)


@given(st.lists(st.tuples(_EVENTS, st.floats(0, 3), st.booleans()), max_size=60))
def test_whatever_happens_epochs_grow_and_only_active_modes_lend(
    history: list[tuple[Event, float, bool]],
) -> None:
    bench, newest, streams = CoreBench(), 0, set[int]()
    for event, pause_s, restart in history:
        if restart:
            bench, streams = CoreBench(store=bench.store), set()
        if isinstance(event, Attached):
            if event.stream in streams:
                continue
            streams.add(event.stream)
        bench.now_s += pause_s
        before = {lease.id for lease in bench.core.status(bench.now_s).leases}
        bench.step(event)
        snapshot = bench.core.status(bench.now_s)
        for lease in snapshot.leases:
            if lease.id not in before:
                assert lease.epoch > newest
                newest = lease.epoch
                assert snapshot.harvest == 4
                assert not snapshot.overrides


# ---- policy and health ----


def test_fixed_leases_dedicated_replicas_only() -> None:
    bench = bench_with("fixed")
    bench.offered(offer("g0"), offer("d0", kind=ReplicaKind.DEDICATED))
    assert [lease.replica for lease in bench.core.status(100.0).leases] == ["d0"]


def test_a_revocation_slows_the_growth_of_guests() -> None:
    bench = bench_with("rose")
    offers = tuple(offer(f"g{number}") for number in range(4))
    bench.offered(*offers)
    bench.step(TakenBack(1, "g0", 1, "pressure"))
    bench.step(TakenBack(1, "g1", 1, "pressure"))
    held_at = {}
    for now_s in (102.0, 106.0, 111.0):
        bench.now_s = now_s
        bench.step(Offered(1, offers))
        held_at[now_s] = len(bench.core.status(now_s).leases)
    assert held_at == {102.0: 2, 106.0: 3, 111.0: 4}


def test_leases_and_revocations_say_why() -> None:
    bench = bench_with("rose")
    bench.offered()
    [lease] = bench.core.status(100.0).leases
    assert (lease.job, lease.why) == (JOB, "saves more than the switch costs")
    granted = [a for a in bench.actions if isinstance(a, LogRecord) and a.event == "lease_granted"]
    assert granted[0].fields["why"] == lease.why


def test_a_replica_back_from_a_long_silence_gets_turns_under_its_new_lease_only() -> None:
    bench = bench_with("rose")
    bench.offered(offer(epoch=1))
    assert bench.row().healthy
    bench.now_s = 110.0
    # The process was stopped: it still believes in the lease of epoch 2.
    bench.step(Offered(1, (offer(epoch=2),)))
    assert "health_changed" in bench.records()
    assert bench.row().leased
    assert bench.row().lease_epoch == 3
    assert not bench.row().healthy
    bench.step(Offered(1, (offer(epoch=3),)))
    assert bench.row().healthy


def test_a_silence_that_its_offers_outlived_changes_nothing() -> None:
    bench = bench_with("rose")
    bench.offered(offer(epoch=0, ttl_s=9.0))
    bench.at(104.0)
    bench.at(107.9)
    bench.step(Offered(1, (offer(epoch=1, ttl_s=9.0),)))
    assert (bench.row().healthy, bench.row().lease_epoch) == (True, 1)


def test_a_node_that_attaches_anew_is_believed_anew() -> None:
    bench = bench_with("rose")
    bench.offered(offer(epoch=5))
    bench.attach(stream=2)
    bench.step(Offered(2, (offer(epoch=0),)))
    assert bench.row().healthy


def test_the_policy_and_how_long_a_guest_stays_are_chosen_at_the_start(tmp_path: Path) -> None:
    argv = ["--store", f"{tmp_path}/s", "--log-dir", f"{tmp_path}"]
    assert settings_of(argv).policy == "rose"
    assert settings_of([*argv, "--policy", "spot"]).policy == "spot"
    assert settings_of([*argv, "--hold-s", "20"]).hold_s == 20
    for options, words in (
        (["--policy", "spott"], "did you mean 'spot'"),
        (["--policy", "spot", "--hold-s", "20"], "--hold-s"),
        (["--hold-s", "0"], "--hold-s"),
        (["--hold-s", "nan"], "--hold-s"),
    ):
        with pytest.raises(ConfigError, match=words):
            settings_of([*argv, *options])


# ---- a new leader ----


def led_before(*replicas: str) -> CoreBench:
    """A leader that granted leases of these replicas; its store outlives it."""
    bench = CoreBench().with_job()
    bench.attach()
    bench.offered(*(offer(name) for name in replicas))
    return bench


def new_leader(before: CoreBench) -> CoreBench:
    bench = CoreBench(store=before.store)
    bench.now_s = before.now_s + 2.5
    bench.step(Tick())
    return bench


def held(replica: str = "g0", job: str = JOB, epoch: int = 1, left_s: float = 2.0) -> Held:
    return Held(replica, job, epoch, left_s)


def test_a_lease_that_its_node_holds_goes_on_under_its_epoch() -> None:
    bench = new_leader(led_before("g0"))
    bench.attach()
    bench.step(Offered(1, (offer(epoch=1),), held=(held(),)))
    assert "lease_adopted" in bench.records()
    assert bench.row().leased
    assert bench.row().lease_epoch == 1
    assert bench.lease().epoch == 1, "renewed at once: it has no long life left"
    bench.at(bench.now_s + 2.9)
    assert bench.row().leased


def test_an_adopted_lease_that_is_not_renewed_lives_no_longer_than_its_node_said() -> None:
    bench = new_leader(led_before("g0"))
    bench.step(HarvestSet(HarvestMode.HOLD_AND_DRAIN, None))
    bench.attach()
    bench.step(Offered(1, (offer(epoch=1),), held=(held(left_s=1.0),)))
    assert bench.kinds() == ["release"]
    bench.at(bench.now_s + 1.0)
    assert "lease_expired" in bench.records()


@pytest.mark.parametrize(
    "said",
    [held(epoch=2), held(job="other"), held(left_s=0.0)],
    ids=["another epoch", "another job", "over"],
)
def test_what_was_not_granted_like_that_ends(said: Held) -> None:
    bench = new_leader(led_before("g0"))
    bench.attach()
    bench.step(Offered(1, (offer(epoch=said.epoch),), held=(said,)))
    [ended] = [c.release for c in bench.commands() if c.HasField("release")]
    assert (ended.replica, ended.epoch) == ("g0", said.epoch)
    assert bench.lease().epoch > said.epoch, "and a lease of its own follows"


def test_a_leader_takes_over_nothing_that_it_ended_itself() -> None:
    bench = led_before("g0")
    bench.step(RevokeAsked("g0", "operator"))
    bench.step(Offered(1, (offer(epoch=1),), held=(held(),)))
    assert not bench.row().leased
    later = new_leader(led_before("g0"))
    later.attach()
    later.step(Offered(1, (offer(epoch=1),), held=(held(),)))
    later.step(RevokeAsked("g0", "operator"))
    later.step(Offered(1, (offer(epoch=1),), held=(held(),)))
    assert not later.row().leased


def test_the_table_says_that_it_settles_until_all_were_heard_of_or_their_leases_are_over() -> None:
    bench = new_leader(led_before("g0", "g1"))
    assert bench.table.settling
    bench.attach()
    bench.step(Offered(1, (offer(epoch=1),), held=(held(),)))
    assert bench.table.settling
    bench.step(Offered(1, (offer(epoch=1), offer("g1", epoch=1))))
    assert not bench.table.settling
    silent = new_leader(led_before("g0"))
    silent.at(silent.now_s + SETTLE_S)
    assert not silent.table.settling
    assert not CoreBench().with_job().table.settling, "a new store has nothing to wait for"


def test_of_several_jobs_none_gets_more_before_it_is_known_what_each_holds() -> None:
    before = led_before("g0", "g1", "g2")
    before.step(JobRegistered("other", 1))
    bench = new_leader(before)
    bench.attach()
    bench.step(Offered(1, (offer("g2", epoch=1),)))
    assert "lease_granted" not in bench.records(), "g0 and g1 may be leased"
    both = (offer(epoch=1), offer("g1", epoch=1))
    bench.step(Offered(1, (offer("g2", epoch=1), *both), held=(held(), held("g1"))))
    assert bench.records().count("lease_adopted") == 2
    assert bench.row("g2").leased
    silent = new_leader(before)
    silent.attach()
    silent.step(Offered(1, (offer("g2", epoch=1),)))
    silent.at(silent.now_s + SETTLE_S)
    silent.offered(offer("g2", epoch=1))
    assert silent.row("g2").leased, "whoever held the others holds them no more"


def test_a_held_lease_that_means_nothing_is_left_out_with_a_reason() -> None:
    message = pb.Offer(replica="a", url="http://a", kind=1, ttl_s=3)
    message.held.CopyFrom(pb.HeldLease(job="j", epoch=1, left_s=float("nan")))
    report = pb.NodeReport(node="n", offers=pb.Offers(offers=[message]))
    event = wire.event_of(report, 1)
    assert isinstance(event, Offered)
    assert not event.held
    assert len(event.refused) == 1


# ---- renewals ----


GUESTS = ("g0", "g1", "g2", "g3")


def leased(*, takes_renewals: bool) -> CoreBench:
    """Four replicas of one node, granted a little apart from each other."""
    bench = CoreBench().with_job()
    bench.step(Attached("n0", 1, takes_renewals=takes_renewals))
    for count in range(1, len(GUESTS) + 1):
        bench.now_s += 0.1
        bench.offered(*map(offer, GUESTS[:count]))
    return bench


def told(bench: CoreBench, seconds: float) -> list[list[str]]:
    """Replicas of each command with renewals, in turn."""
    commands = []
    until_s = bench.now_s + seconds
    while bench.now_s < until_s:
        bench.at(bench.now_s + 0.1)
        commands += bench.commands()
        bench.offered(*map(offer, GUESTS))
        commands += bench.commands()
    return [
        [lease.replica for lease in command.renewals.leases] or [command.lease.replica]
        for command in commands
        if command.HasField("renewals") or command.HasField("lease")
    ]


def test_all_leases_of_a_node_are_renewed_in_one_command() -> None:
    bench = leased(takes_renewals=True)
    first, *others = told(bench, 5.0)
    assert set(first) == set(GUESTS), "also those that are due a little later"
    assert 3 <= len(others) <= 5
    assert all(set(names) == set(GUESTS) for names in others)
    assert len(bench.core.status(bench.now_s).leases) == len(GUESTS)
    assert min(e.expires_in_s for e in bench.core.status(bench.now_s).leases) > 3.5


def test_another_node_is_told_each_renewal_by_itself() -> None:
    bench = leased(takes_renewals=False)
    renewals = told(bench, 5.0)
    assert all(len(names) == 1 for names in renewals)
    assert 4 * 4 <= len(renewals) <= 4 * 5


def test_a_lease_that_is_granted_comes_by_itself() -> None:
    bench = CoreBench().with_job()
    bench.step(Attached("n0", 1, takes_renewals=True))
    bench.step(Offered(1, (offer("g0"), offer("g1"))))
    assert bench.kinds().count("lease") == 2


def test_a_node_obeys_each_renewal_and_leaves_out_the_one_that_it_refuses(
    tmp_path: Path,
) -> None:
    taken: list[str] = []

    def obey(command: pb.NodeCommand) -> None:
        if command.lease.replica == "g1":
            raise RefusedError("no such model")
        taken.append(command.lease.replica)

    events = EventLog(tmp_path, "node")
    session = SchedulerSession("127.0.0.1:1", NodeIdentity("n0"), list, obey, events)
    leases = [pb.Lease(replica=name, epoch=1, ttl_s=5.0) for name in GUESTS]
    for order in _apart(pb.NodeCommand(renewals=pb.Renewals(leases=leases))):
        session._take(order)
    events.close()
    assert taken == ["g0", "g2", "g3"]


def test_a_node_that_was_told_something_gets_no_heartbeat_besides(tmp_path: Path) -> None:
    service = SchedulerService(CoreBench().core, InMemoryStore(), EventLog(tmp_path, "scheduler"))
    told, silent = service._queues[1], service._queues[2] = CommandQueue(), CommandQueue()
    service._tell(Command(1, pb.NodeCommand(relays=pb.Relays())))
    service._beat()
    assert (told.waiting, silent.waiting) == (1, 1)
    service._beat()
    assert (told.waiting, silent.waiting) == (2, 2), "never two beats of silence"


@pytest.mark.parametrize("command", [pb.NodeCommand(), pb.NodeCommand(relays=pb.Relays())])
def test_other_commands_stay_as_they_are(command: pb.NodeCommand) -> None:
    assert [*_apart(command)] == [command]


# ---- nodes that are away ----


WALL_S = 1.7e9


def away(bench: CoreBench) -> dict[str, float]:
    return {row.node: row.away_s for row in bench.core.status(bench.now_s).away}


def leased_before() -> CoreBench:
    bench = CoreBench().with_job()
    bench.step(Tick(WALL_S))
    bench.attach()
    bench.offered(offer())
    return bench


def test_a_lost_node_is_away_until_it_is_back() -> None:
    bench = leased_before()
    assert away(bench) == {}
    bench.step(Detached(1))
    bench.at(bench.now_s + 4.0)
    assert away(bench) == {"n0": 4.0}
    bench.attach(stream=2)
    assert away(bench) == {}


def test_a_new_leader_knows_where_the_one_before_had_leases() -> None:
    bench = CoreBench(store=leased_before().store)
    bench.step(Tick(WALL_S + 60.0))
    bench.at(bench.now_s + 1.0)
    assert away(bench) == {"n0": 1.0}
    bench.attach()
    assert away(bench) == {}


def test_a_node_that_was_taken_away_for_good_is_forgotten() -> None:
    bench = CoreBench(store=leased_before().store)
    bench.step(Tick(WALL_S + FORGOTTEN_S + 1.0))
    assert away(bench) == {}
    bench = leased_before()
    bench.step(Detached(1))
    bench.at(bench.now_s + FORGOTTEN_S)
    assert away(bench) == {}


# ---- relays ----


class Told:
    """The last order of each stream."""

    def __init__(self) -> None:
        self.core = SchedulerCore(load(()))
        self.relays: dict[int, list[str]] = {}

    def step(self, event: Attached | Detached | RatesMeasured | Tick, now_s: float) -> None:
        for action in self.core.step(event, now_s):
            if isinstance(action, Command) and action.command.HasField("relays"):
                self.relays[action.stream] = list(action.command.relays.urls)


def test_neighbours_of_one_label_are_told_of_each_other_and_nobody_else() -> None:
    told = Told()
    told.step(Attached("a", 1, "lon", "http://a"), 0.0)
    told.step(Attached("b", 2, "lon", "http://b"), 0.0)
    told.step(Attached("c", 3, "fra", "http://c"), 0.0)
    told.step(Attached("d", 4, "lon", ""), 0.0)
    both = ["http://a", "http://b"]
    assert told.relays == {1: both, 2: both, 3: ["http://c"], 4: both}


def test_who_is_silent_or_gone_is_left_out_until_it_speaks() -> None:
    told = Told()
    told.step(Attached("a", 1, "lon", "http://a"), 0.0)
    told.step(Attached("b", 2, "lon", "http://b"), 0.0)
    told.step(RatesMeasured(1, pb.Telemetry()), LAPSED_S - 1)
    told.step(Tick(), LAPSED_S + 0.1)
    assert told.relays == {1: ["http://a"], 2: ["http://a"]}
    told.step(RatesMeasured(2, pb.Telemetry()), LAPSED_S + 0.2)
    assert told.relays[1] == ["http://a", "http://b"]
    told.step(Detached(1), LAPSED_S + 0.3)
    assert told.relays[2] == ["http://b"], "a broken stream ends it at once"


def test_nothing_is_said_twice() -> None:
    told = Told()
    told.step(Attached("a", 1, "", "http://a"), 0.0)
    told.relays.clear()
    told.step(RatesMeasured(1, pb.Telemetry()), 0.5)
    told.step(Tick(), 0.6)
    assert told.relays == {}


def test_a_replica_is_leased_from_the_node_whose_offer_lives_not_from_a_silent_one() -> None:
    bench = CoreBench()
    bench.attach(1, "n0")
    bench.attach(2, "n1")
    bench.offered(offer("g0", node="n0"), stream=1)
    bench.at(104.0)
    bench.offered(offer("g0", node="n1"), stream=2)
    bench.with_job()
    assert bench.kinds(1) == []
    assert bench.lease(2).replica == "g0"
