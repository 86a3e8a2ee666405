"""Nodes that are known and not attached are named: what they hold nobody can prove."""

from rose.scheduler.core.fleet import FORGOTTEN_S
from rose.scheduler.core.messages import Detached, Tick
from tests.unit.scheduler.core_cases import CoreBench, offer

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
