"""A scheduler's word can neither end a node nor lend it for longer than a lease lives."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from node_bench import Bench, standin_spec

from rose.engines import launch
from rose.errors import RoseError
from rose.logs.eventlog import EventLog
from rose.node import NodeDaemon
from rose.node.guest import supervisor
from rose.node.orders import check_order
from rose.node.scheduler_session import NodeIdentity, SchedulerSession
from rose.node.weight_updates import STEPS_KEPT, AnnouncedVersions, KnownVersion
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_server
from rose.rpc.rose_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server
from rose.scheduler.core.messages import JobRegistered, VersionAnnounced
from rose.security.audit_log import audit_file, opened, read, verify
from tests.harness.waiting import PATIENCE_S

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
        for url in ("", "http://a..b", "http://" + "a" * 64, "file:///etc/passwd")
    ),
    pb.NodeCommand(relays=pb.Relays(urls=["http://n0:1", "http://."])),
    pb.NodeCommand(relays=pb.Relays(urls=["http://n0:1"] * 5_000)),
]


@pytest.mark.parametrize("command", GOOD, ids=str)
def test_an_order_that_means_something_is_obeyed(command: pb.NodeCommand) -> None:
    check_order(command)


@pytest.mark.parametrize("command", BAD, ids=lambda command: str(command)[:60])
def test_an_order_that_means_nothing_is_refused_in_a_line(command: pb.NodeCommand) -> None:
    with pytest.raises(RoseError) as caught:
        check_order(command)
    assert str(caught.value).isprintable()


async def test_orders_that_cannot_be_obeyed_are_noted_and_the_next_ones_count(
    tmp_path: Path,
) -> None:
    class Scheduler(SchedulerServicer):
        async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
            for command in [*BAD, pb.NodeCommand(release=pb.Release(replica="x")), *GOOD]:
                await context.write(command)
            await asyncio.sleep(60)

    server = make_server()
    add_SchedulerServicer_to_server(Scheduler(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    obeyed: asyncio.Queue[str | None] = asyncio.Queue()

    def obey(command: pb.NodeCommand) -> None:
        if command.HasField("release"):
            raise ValueError("unheard of")
        obeyed.put_nowait(command.WhichOneof("command"))

    events = EventLog(tmp_path, "n0")
    session = SchedulerSession(f"127.0.0.1:{port}", NodeIdentity("n0"), list, obey, events)
    running = asyncio.create_task(session.run())
    async with asyncio.timeout(PATIENCE_S):
        told = [await obeyed.get() for _ in GOOD]
    assert told == ["lease", "version", "relays", "harvest", None]
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop(0)
    events.close()
    lines = (tmp_path / "events-n0.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["command_refused"] * (len(BAD) + 1)


async def test_a_mode_that_is_told_with_a_number_is_confirmed_once_it_is_obeyed(
    tmp_path: Path,
) -> None:
    said: asyncio.Queue[pb.NodeReport] = asyncio.Queue()
    modes = (
        pb.Harvest(mode=pb.HARVEST_MODE_ACTIVE),
        pb.Harvest(mode=pb.HARVEST_MODE_HOLD, order=6),
        pb.Harvest(mode=pb.HARVEST_MODE_OFF, order=7),
    )

    class Scheduler(SchedulerServicer):
        async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
            for mode in modes:
                await context.write(pb.NodeCommand(harvest=mode))
            async for report in request_iterator:
                said.put_nowait(report)

    server = make_server()
    add_SchedulerServicer_to_server(Scheduler(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    told: list[int] = []

    def obey(command: pb.NodeCommand) -> None:
        if command.harvest.order == 6:
            raise ValueError("a stop that is not in force is not confirmed")
        told.append(command.harvest.mode)

    events = EventLog(tmp_path, "n0")
    session = SchedulerSession(f"127.0.0.1:{port}", NodeIdentity("n0"), list, obey, events)
    running = asyncio.create_task(session.run())
    async with asyncio.timeout(PATIENCE_S):
        hello = (await said.get()).hello
        assert hello.obeys
        assert hello.release
        confirmed = await said.get()
    assert (confirmed.node, confirmed.obeyed.order) == ("n0", 7)
    assert told == [pb.HARVEST_MODE_ACTIVE, pb.HARVEST_MODE_OFF]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop(0)
    events.close()


def test_a_node_keeps_so_many_steps_of_a_chain() -> None:
    chain = AnnouncedVersions()
    for version in range(1, STEPS_KEPT + 3):
        chain.add(KnownVersion("job", version, version - 1, "http://t"))
    assert chain.after(1) is None
    assert chain.after(2) is not None


async def test_a_stored_version_that_cannot_be_fetched_ends_no_daemon_at_any_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, "dedicated")
    monkeypatch.setattr(launch, "process_spec", standin_spec(bench.journal))
    monkeypatch.setattr(launch, "POLL_INTERVAL_S", 0.02)
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.02)
    await bench.start()
    # An older scheduler stored these; today's would refuse them.
    stored = JobRegistered("job", 1), VersionAnnounced("job", 1, 0, "http://" + "a" * 64 + "/")
    for event in stored:
        bench.service._step(event)
    try:
        for life in (1, 2):
            node = NodeDaemon(bench.config)
            running = asyncio.create_task(node.run())
            await bench.until_noted("command_refused", times=life)
            await bench.until("healthy", lambda row: row.leased)
            assert not running.done()
            node.stop()
            await running
    finally:
        await bench.close()
    # Both lives are one chain.
    audited = audit_file(bench.config.log_dir, bench.config.node)
    assert verify(audited).wrong == ""
    said = [opened(line).event for _, line in read(audited)]
    assert said.count("node_started") == said.count("node_stopped") == 2
    assert {"lease_taken", "lease_ended", "command_refused"} <= set(said)
