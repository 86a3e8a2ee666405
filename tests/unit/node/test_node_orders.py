"""A scheduler's word can neither end a node nor lend it for longer than a lease lives."""

import asyncio
import math
from pathlib import Path
from typing import Any, cast

import pytest
from node_bench import NodeBench, attached, events_in

from executor.grant_controller import UNCAPPED, HarvestCaps
from rose.clock import Stall
from rose.errors import RoseError
from rose.logs.eventlog import EventLog
from rose.node.lease import EngineUp, LeaseAgent
from rose.node.orders import STALE_AFTER_S, SchedulerCaps, check_order
from rose.node.replica_client import ReplicaClient
from rose.node.scheduler_session import STALL_S
from rose.node.weight_updates import STEPS_KEPT, AnnouncedVersions, KnownVersion
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.messages import JobRegistered, VersionAnnounced
from rose.security.audit_log import audit_file, opened, read, verify
from tests.harness.waiting import HandClock

BENCH = {"kind": "dedicated"}
GOOD = [
    pb.NodeCommand(lease=pb.Lease(replica="g0", epoch=7, ttl_s=5.0)),
    pb.NodeCommand(version=pb.Version(job="j", version=2, parent=1, url="http://t:1")),
    pb.NodeCommand(relays=pb.Relays(urls=["http://n0:1", "https://n1:2"])),
    pb.NodeCommand(harvest=pb.Harvest(mode=pb.HARVEST_MODE_OFF)),
    pb.NodeCommand(),
]
BAD = [
    pb.NodeCommand(lease=pb.Lease(replica="g0", epoch=2**64 - 1, ttl_s=5.0)),
    *(
        pb.NodeCommand(lease=pb.Lease(replica="g0", epoch=1, ttl_s=ttl_s))
        for ttl_s in (math.nan, math.inf, -1.0, 0.0, 1e9)
    ),
    pb.NodeCommand(version=pb.Version(job="j", version=2**64 - 1, url="http://t")),
    pb.NodeCommand(version=pb.Version(job="j", version=1, parent=2, url="http://t")),
    *(
        pb.NodeCommand(version=pb.Version(job="j", version=1, url=url))
        for url in ("", "http://a..b", "http://" + "a" * 64, "ftp://host/job")
    ),
    pb.NodeCommand(relays=pb.Relays(urls=["http://n0:1", "http://."])),
    pb.NodeCommand(relays=pb.Relays(urls=["http://n0:1"] * 5_000)),
    *(
        pb.NodeCommand(caps=caps)
        for caps in (
            pb.Caps(compute=2.0),
            pb.Caps(slack_share=math.nan),
            pb.Caps(stale_after_s=0.1),
            pb.Caps(stale_after_s=math.inf),
            pb.Caps(reclaim_deadline_s=1e9),
        )
    ),
]


@pytest.mark.parametrize("command", GOOD, ids=str)
def test_an_order_that_means_something_is_obeyed(command: pb.NodeCommand) -> None:
    check_order(command)


@pytest.mark.parametrize("command", BAD, ids=lambda command: str(command)[:60])
def test_an_order_that_means_nothing_is_refused_in_a_line(command: pb.NodeCommand) -> None:
    with pytest.raises(RoseError) as caught:
        check_order(command)
    assert str(caught.value).isprintable()
    assert not command.HasField("caps") or "stay as they were" in str(caught.value)


async def test_orders_that_cannot_be_obeyed_are_noted_and_the_next_ones_count(
    tmp_path: Path,
) -> None:
    async def attach(reports: Any, context: Any) -> None:
        for command in [*BAD, pb.NodeCommand(release=pb.Release(replica="x")), *GOOD]:
            await context.write(command)
        await asyncio.sleep(60)

    obeyed: asyncio.Queue[str | None] = asyncio.Queue()

    def obey(command: pb.NodeCommand) -> None:
        if command.HasField("release"):
            raise ValueError("unheard of")
        obeyed.put_nowait(command.WhichOneof("command"))

    async with attached(attach, obey, tmp_path) as running:
        told = [await obeyed.get() for _ in GOOD]
        assert told == ["lease", "version", "relays", "harvest", None]
        assert not running.done()
    assert events_in(tmp_path) == ["command_refused"] * (len(BAD) + 1)


async def test_a_mode_that_is_told_with_a_number_is_confirmed_once_it_is_obeyed(
    tmp_path: Path,
) -> None:
    said: asyncio.Queue[pb.NodeReport] = asyncio.Queue()
    modes = (
        pb.Harvest(mode=pb.HARVEST_MODE_ACTIVE),
        pb.Harvest(mode=pb.HARVEST_MODE_HOLD, order=6),
        pb.Harvest(mode=pb.HARVEST_MODE_OFF, order=7),
    )

    async def attach(reports: Any, context: Any) -> None:
        for mode in modes:
            await context.write(pb.NodeCommand(harvest=mode))
        async for report in reports:
            said.put_nowait(report)

    told: list[int] = []

    def obey(command: pb.NodeCommand) -> None:
        if command.harvest.order == 6:
            raise ValueError("a stop that is not in force is not confirmed")
        told.append(command.harvest.mode)

    async with attached(attach, obey, tmp_path):
        hello = (await said.get()).hello
        assert hello.obeys
        assert hello.release
        confirmed = await said.get()
    assert (confirmed.node, confirmed.obeyed.order) == ("n0", 7)
    assert told == [pb.HARVEST_MODE_ACTIVE, pb.HARVEST_MODE_OFF]


async def test_a_stored_version_that_cannot_be_fetched_ends_no_daemon_at_any_start(
    bench: NodeBench, standins: None
) -> None:
    # An older scheduler stored these; today's would refuse them.
    stored = JobRegistered("job", 1), VersionAnnounced("job", 1, 0, "http://" + "a" * 64 + "/")
    for event in stored:
        bench.service._step(event)
    for life in (1, 2):
        async with bench.running():
            await bench.until_noted("command_refused", times=life)
            await bench.until("healthy", lambda row: row.leased)
    # Both lives are one chain.
    audited = audit_file(bench.config.log_dir, bench.config.node)
    assert verify(audited).wrong == ""
    said = [opened(line).event for _, line in read(audited)]
    assert said.count("node_started") == said.count("node_stopped") == 2
    assert {"lease_taken", "lease_ended", "command_refused"} <= set(said)


# ---- caps ----


def test_caps_replace_those_before_and_what_is_left_out_is_not_bounded() -> None:
    told = SchedulerCaps()
    told.take(pb.Caps(compute=0.5, kv_bytes=1 << 30, stale_after_s=2.0, reclaim_deadline_s=3.0))
    assert told.harvest == HarvestCaps(compute=0.5, kv_bytes=1 << 30)
    assert told.lease_ttl_s(5.0) == 2.0
    assert (told.reclaim_s(5.0), told.reclaim_s(1.0)) == (3.0, 1.0)
    told.take(pb.Caps())
    assert told.harvest == UNCAPPED
    assert (told.lease_ttl_s(5.0), told.reclaim_s(5.0)) == (STALE_AFTER_S, 5.0)


def test_a_node_is_cut_off_when_no_scheduler_was_heard_for_stale_after() -> None:
    clock = HandClock()
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


# ---- a node that stood still ----


def grant(epoch: int) -> pb.NodeCommand:
    return pb.NodeCommand(lease=pb.Lease(replica="g0", epoch=epoch, ttl_s=5.0))


async def test_a_grant_that_waited_for_a_node_that_stood_still_is_not_obeyed(
    tmp_path: Path,
) -> None:
    clock = HandClock()
    # Content of the node's streams. The grant under epoch 8 was sent before the stall ended.
    streams = iter([[grant(7), grant(8)], [grant(9)]])

    async def attach(reports: Any, context: Any) -> None:
        for command in next(streams):
            await context.write(command)
        await asyncio.Event().wait()

    obeyed: asyncio.Queue[int] = asyncio.Queue()

    def obey(command: pb.NodeCommand) -> None:
        obeyed.put_nowait(command.lease.epoch)
        if command.lease.epoch == 7:
            clock.now_s += 30.0

    async with attached(attach, obey, tmp_path, clock=clock):
        assert [await obeyed.get() for _ in range(2)] == [7, 9]
    assert events_in(tmp_path) == ["session_stalled"]


def test_only_a_gap_between_two_looks_is_a_stall() -> None:
    clock = HandClock()
    stall = Stall(STALL_S, clock)
    for _ in range(10):
        clock.now_s += STALL_S
        assert not stall.look()
    clock.now_s += 3.0
    assert stall.look() == 3.0
    assert not stall.look()


def test_leases_and_silence_count_the_time_of_a_suspended_machine(tmp_path: Path) -> None:
    clock, events = HandClock(), EventLog(tmp_path, "n0")
    caps = SchedulerCaps(clock)
    client = cast(ReplicaClient, None)
    agent = LeaseAgent("g0", client, events, lambda word: None, lambda reason: None, clock)
    agent.happened(EngineUp())
    assert agent.grant(7, 5.0)
    assert agent.lease_epoch() == 7
    clock.now_s += 6.0
    assert agent.lease_epoch() is None
    assert agent.held() is None
    assert caps.cut_off
    events.close()


# ---- announced versions ----


def chain_of(job: str, *versions: int, chain: AnnouncedVersions | None = None) -> AnnouncedVersions:
    chain = chain or AnnouncedVersions()
    for version in versions:
        chain.add(KnownVersion(job, version, version - 1, "http://127.0.0.1:1"))
    return chain


def test_a_late_joiner_walks_the_chain_from_its_own_version() -> None:
    chain = chain_of("job", 3, 1, 2)
    walked = [known.version for at in range(3) if (known := chain.after(at))]
    assert walked == [1, 2, 3]
    assert (newest := chain.newest_of("job"))
    assert newest.version == 3
    assert chain.after(3) is None, "one that is up to date has nothing to do"


def test_versions_of_one_job_are_not_anothers() -> None:
    chain = chain_of("a", 2)
    assert chain.only_job == "a"
    chain_of("b", 1, chain=chain)
    assert chain.only_job == ""
    assert [chain.newest_of(job).version for job in ("a", "b")] == [2, 1]  # type: ignore[union-attr]
    assert chain.after(1, "a").version == 2  # type: ignore[union-attr]
    assert chain.after(1, "b") is None


def test_a_node_keeps_so_many_steps_of_a_chain() -> None:
    chain = chain_of("job", *range(1, STEPS_KEPT + 3))
    assert chain.after(1) is None
    assert chain.after(2) is not None
