"""A node obeys the caps that its scheduler tells, and none that mean nothing."""

from pathlib import Path

import pytest

from executor import ControlPage, LatencyRecord
from executor.grant_controller import UNCAPPED, HarvestCaps
from rose.errors import RefusedError
from rose.logs.eventlog import JsonlLog
from rose.node.config import HostConfig
from rose.node.host import Host, HostLoad
from rose.node.orders import STALE_AFTER_S, SchedulerCaps, check_order
from rose.rpc import rose_pb2 as pb


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def ns(self) -> int:
        return int(self.now_s * 1e9)


def test_caps_replace_those_before_and_what_is_left_out_is_not_bounded() -> None:
    told = SchedulerCaps()
    told.take(pb.Caps(compute=0.5, kv_bytes=1 << 30, stale_after_s=2.0, reclaim_deadline_s=3.0))
    assert told.harvest == HarvestCaps(compute=0.5, kv_bytes=1 << 30)
    assert told.lease_ttl_s(5.0) == 2.0
    assert (told.reclaim_s(5.0), told.reclaim_s(1.0)) == (3.0, 1.0)
    told.take(pb.Caps())
    assert told.harvest == UNCAPPED
    assert (told.lease_ttl_s(5.0), told.reclaim_s(5.0)) == (STALE_AFTER_S, 5.0)


@pytest.mark.parametrize(
    "caps",
    [
        pb.Caps(compute=2.0),
        pb.Caps(slack_share=float("nan")),
        pb.Caps(stale_after_s=0.1),
        pb.Caps(stale_after_s=float("inf")),
        pb.Caps(reclaim_deadline_s=1e9),
    ],
)
def test_caps_that_mean_nothing_are_refused(caps: pb.Caps) -> None:
    with pytest.raises(RefusedError, match="stay as they were"):
        check_order(pb.NodeCommand(caps=caps))


def test_a_node_is_cut_off_when_no_scheduler_was_heard_for_stale_after() -> None:
    clock = Clock()
    told = SchedulerCaps(clock)
    assert not told.cut_off
    clock.now_s += STALE_AFTER_S + 0.1
    assert told.cut_off, "also when there never was one"
    told.heard()
    clock.now_s += 1_000.0
    assert not told.cut_off, "a stream that is open counts"
    told.lost()
    clock.now_s += 2.0
    told.lost()
    clock.now_s += 2.5
    assert not told.cut_off
    told.take(pb.Caps(stale_after_s=4.0))
    assert told.cut_off


def test_requests_count_by_both_targets(tmp_path: Path) -> None:
    page, log = ControlPage.ensure(tmp_path / "page"), JsonlLog(tmp_path / "latencies")
    config = HostConfig(page=page.path, ttft_target_s=0.5, tpot_target_s=0.1)
    host = Host(config, page, log, page.take_guard())
    lane = page.take_lane()
    for ttft_s, tpot_s in ((0.5, 0.1), (0.6, 0.01), (0.1, 0.2), (0.1, 0.0)):
        lane.append(LatencyRecord(0, int(ttft_s * 1e9), int(tpot_s * 1e9), 0, 1, 1, "r"))
    lane.close()
    host.look()
    assert host.requests == (2, 2)
    host.close()
    log.close()


def test_the_busy_share_is_of_the_last_second_and_unknown_after_a_restart() -> None:
    clock = Clock()
    load = HostLoad(clock.ns)
    assert load.busy_share(0) is None
    clock.now_s += 1.0
    assert load.busy_share(400_000_000) == pytest.approx(0.4)
    clock.now_s += 0.5
    assert load.busy_share(900_000_000) == pytest.approx(0.4), "too soon"
    clock.now_s += 0.5
    assert load.busy_share(1_400_000_000) == pytest.approx(1.0)
    clock.now_s += 1.0
    assert load.busy_share(10) is None
    assert load.busy_share(None) is None
