"""Nodes confirm the modes that they are told, and the scheduler says who has not."""

import pytest
from core_cases import CoreBench
from test_scheduler_capacity import apply, closed, modes

from elastic_scheduler import HarvestMode
from rose.rpc import rose_pb2 as pb
from rose.scheduler import wire
from rose.scheduler.core.messages import Attached, HarvestSet, Obeyed, RatesMeasured


def attach(bench: CoreBench, *, obeys: bool = True) -> list[pb.NodeCommand]:
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
    bench = closed()
    apply(bench)
    attach(bench)
    for took_s in (0.04, 0.25):
        told = stop(bench)
        assert (told.mode, confirmed_s(bench)) == (pb.HARVEST_MODE_OFF, None)
        bench.now_s += took_s
        bench.step(Obeyed(1, told.order))
        assert confirmed_s(bench) == pytest.approx(took_s)


def test_a_word_about_an_earlier_order_confirms_nothing() -> None:
    bench = closed()
    apply(bench)
    attach(bench)
    first = stop(bench)
    again = stop(bench)
    assert again.order > first.order
    bench.step(Obeyed(1, first.order))
    assert confirmed_s(bench) is None


def test_only_the_last_of_several_commands_is_answered() -> None:
    bench = closed()
    apply(bench)
    bench.step(HarvestSet(HarvestMode.HOLD, "g0", opens=False))
    orders = [each.harvest.order for each in attach(bench) if each.HasField("harvest")]
    assert [order > 0 for order in orders] == [False, True]


def test_a_node_that_never_confirms_is_not_asked_and_not_expected_to() -> None:
    bench = closed()
    apply(bench)
    told = attach(bench, obeys=False)
    assert modes(told) == [pb.HARVEST_MODE_ACTIVE]
    assert all(not each.harvest.order for each in told)
    assert not row(bench).obeys


def test_a_snapshot_says_of_which_release_and_how_silent_each_node_is() -> None:
    bench = closed()
    attach(bench)
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
    bench = closed()
    apply(bench, watermarks={"high": 0.8, "low": 0.7})
    attach(bench)
    for share, limits in ((0.83, ["watermarks.high (kv 83% > 80%) (p)"]), (0.8, [])):
        host = pb.HostTelemetry(node="n0", kv_share=share)
        bench.step(RatesMeasured(1, pb.Telemetry(host=host)))
        [found] = bench.core.explained("n0", 0.0)
        assert list(found.limits) == limits
        assert found.kv_share == share
