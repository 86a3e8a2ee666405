"""A fleet too large to be regulated whole at every event: decisions wait, safety does not."""

from core_cases import JOB, CoreBench, offer

from elastic_scheduler import HarvestMode, Offer
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.leasing import PACE_S, SMALL_FLEET
from rose.scheduler.core.messages import Detached, HarvestSet, Offered, RevokeAsked, TakenBack

NODES = 5
EACH = SMALL_FLEET // NODES + 1


def offers_of(number: int) -> list[Offer]:
    node = f"n{number}"
    return [offer(f"{node}.g{each}", node=node, ttl_s=3.0) for each in range(EACH)]


def leased_fleet() -> CoreBench:
    bench = CoreBench().with_job()
    for number in range(NODES):
        bench.attach(number, f"n{number}")
    play(bench, 10)
    assert len(bench.core.status(bench.now_s).leases) == NODES * EACH > SMALL_FLEET
    return bench


def play(bench: CoreBench, tenths: int, nodes: int = NODES) -> None:
    for _ in range(tenths):
        bench.at(bench.now_s + 0.1)
        for number in range(nodes):
            bench.step(Offered(number, tuple(offers_of(number))))


def leases(bench: CoreBench) -> dict[str, pb.LeaseView]:
    return {lease.replica: lease for lease in bench.core.status(bench.now_s).leases}


def leased(bench: CoreBench) -> set[str]:
    return {row.id for row in bench.table.replicas if row.leased}


def test_every_lease_of_a_large_fleet_is_renewed_long_before_it_runs_out() -> None:
    bench = leased_fleet()
    for _ in range(80):
        play(bench, 1)
        assert min(lease.expires_in_s for lease in leases(bench).values()) > 3.5
    assert len(leased(bench)) == NODES * EACH


def test_a_lease_runs_out_at_the_next_event_of_a_large_fleet_whatever_it_is() -> None:
    bench = leased_fleet()
    bench.now_s += 5.0
    bench.step(Offered(0, ()))
    assert not leases(bench)
    assert not leased(bench)


def test_a_silent_node_of_a_large_fleet_loses_its_leases_in_time() -> None:
    bench = leased_fleet()
    play(bench, 52, nodes=NODES - 1)
    silent = {each.replica for each in offers_of(NODES - 1)}
    # Offers live for three seconds, and what is not offered is not renewed.
    assert silent.isdisjoint(leased(bench))
    play(bench, 30, nodes=NODES - 1)
    assert silent.isdisjoint(leases(bench))
    assert len(leased(bench)) == (NODES - 1) * EACH


def test_a_stop_releases_all_guests_of_a_large_fleet_at_once() -> None:
    bench = leased_fleet()
    bench.step(HarvestSet(HarvestMode.HOLD_AND_DRAIN, None))
    assert bench.answer() == NODES * EACH
    assert {lease.state for lease in leases(bench).values()} == {"releasing"}


def test_revocations_in_a_large_fleet_reach_gateways_within_its_pace() -> None:
    bench = leased_fleet()
    for each in offers_of(0):
        bench.step(TakenBack(0, each.replica, leases(bench)[each.replica].epoch, "burst"))
        assert each.replica not in leases(bench)
    bench.at(bench.now_s + PACE_S)
    assert len(leased(bench)) == (NODES - 1) * EACH


def test_a_lost_node_of_a_large_fleet_takes_its_leases_along_at_once() -> None:
    bench = leased_fleet()
    bench.step(Detached(0))
    assert len(leases(bench)) == (NODES - 1) * EACH
    bench.at(bench.now_s + PACE_S)
    assert len(leased(bench)) == (NODES - 1) * EACH


def test_what_a_large_fleet_gets_back_is_leased_again() -> None:
    bench = leased_fleet()
    name = offers_of(0)[0].replica
    bench.step(RevokeAsked(name, "by hand"))
    assert name not in leases(bench)
    play(bench, 20)
    assert leases(bench)[name].job == JOB
    assert name in leased(bench)


def test_a_large_fleet_is_told_of_no_table_while_its_nodes_say_the_same() -> None:
    bench = leased_fleet()
    play(bench, 10)
    revision = bench.table.revision
    play(bench, 50)
    assert bench.table.revision <= revision + 6
