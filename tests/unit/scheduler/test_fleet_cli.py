"""Verbs that look and verbs that stop, against a scheduler with stand-in nodes."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cli_cases import gone, rose, serving, told_off
from service_cases import Bench, FakeNode, running, shows

from elastic_scheduler import HarvestMode
from rose.cli.cluster import stops, top
from rose.cli.main import main
from rose.errors import UnavailableError
from rose.operate.client import SchedulerClient
from rose.rpc import rose_pb2 as pb
from rose.rpc.channel import make_server
from rose.rpc.rose_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server
from tests.fakes.memory_store import InMemoryStore


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with running(Bench(InMemoryStore(), tmp_path)) as bench:
        yield bench


# ---- looking ----


async def test_every_view_shows_one_fleet(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "ONCE_S", 0.0)
    node = await serving(bench)
    for words, cells in {
        ("status",): ("harvest ACTIVE", "serving-0", "guest-0"),
        ("nodes",): ("410 / 500 ms", "200.0 / 150 ms MISSED", "31%", "83%", "3+1", "attached"),
        ("replicas",): ("guest-0", "run", "60%", "2.0 GiB", "900", "ok (its grant holds"),
        ("top",): ("serves 3+1", "███·······", "██████····", "ok (its grant holds"),
    }.items():
        assert await rose(bench, *words) == 0
        out = capsys.readouterr().out
        for cell in cells:
            assert cell in out
    assert await rose(bench, "nodes", "serving-0", "-o", "json") == 0
    [said] = json.loads(capsys.readouterr().out)
    assert (said["hosts"][0]["kv_share"], said["release"]) == (0.83, "0.3.0.dev0")
    await node.leave()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nodes", "servin-0"], "did you mean 'serving-0'?"),
        (["replicas", "--node", "x"], "there is no node 'x'; `rose nodes` lists them"),
        (["replicas", "x"], "there is no replica 'x'; `rose replicas` lists them"),
        (["top", "--node", "x"], "there is no node 'x'"),
        (["policy", "explain", "x"], "no node 'x' is attached"),
        (["revoke", "x", "--dry-run"], "x has no lease"),
        (["jobs", "end", "x", "--dry-run"], "job x is not registered"),
    ],
)
async def test_a_name_that_nothing_has_is_one_line(
    bench: Bench, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    node = await serving(bench)
    assert await rose(bench, *words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
    await node.leave()


async def test_nodes_of_other_releases_and_silent_ones_are_said_first(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.scheduler.service.release", lambda: "0.9.0")
    node = await serving(bench)
    assert await rose(bench, "status") == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("harvest ACTIVE")
    assert second == (
        "1 nodes are not of the scheduler's release (0.9.0): 0.3.0.dev0: serving-0; upgrade them,"
        " or the scheduler"
    )
    await node.leave()


async def test_a_standby_alone_is_told_from_a_scheduler_that_is_not_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Standby(SchedulerServicer):
        leader = ""

        async def Snapshot(self, request: Any, context: Any) -> None:  # type: ignore[override]
            context.set_trailing_metadata((("rose-leader", self.leader),))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this scheduler stands by")

    standby, server = Standby(), make_server()
    add_SchedulerServicer_to_server(standby, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        for leader, hint in (("", "and knows of no leader"), ("127.0.0.1:1", "for 127.0.0.1:1")):
            standby.leader = leader
            client = SchedulerClient(f"127.0.0.1:{port}", timeout_s=0.3)
            with pytest.raises(UnavailableError, match=f"stands by.*{hint}") as caught:
                await asyncio.to_thread(client.snapshot)
            assert "\n" not in str(caught.value)
    finally:
        await server.stop(0)


# ---- stopping ----


async def test_stop_all_says_how_many_held_and_how_long_the_slowest_took(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [await serving(bench, number) for number in range(3)]
    stopping = asyncio.create_task(rose(bench, "stop-all"))
    for number, node in enumerate(nodes):
        await told_off(node)
        gone(node, number)
    assert await stopping == 0
    held, stopped = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"held 3/3 nodes, slowest \d+ ms", held)
    assert stopped.startswith("stopped 3/3 guests in")
    for node in nodes:
        await node.leave()


async def test_stop_all_names_the_nodes_that_confirm_nothing(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await serving(bench, 0)
    mute = FakeNode(bench.stub, "mute", obeys=True)
    monkeypatch.setattr(mute, "say", lambda **_: None)
    await mute.hears("harvest")
    stopping = asyncio.create_task(rose(bench, "stop-all", "--within", "0.3", "-o", "json"))
    await told_off(node)
    gone(node)
    assert await stopping == 3
    said = json.loads(capsys.readouterr().out)
    assert (said["held"], said["nodes"], said["exit_code"]) == (1, 2, 3)
    assert [each["node"] for each in said["unheard"]] == ["mute"]
    await node.leave()
    await mute.leave()


async def test_a_stop_that_was_taken_is_said_though_its_scheduler_dies(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object) -> None:
        raise UnavailableError("no scheduler answers")

    monkeypatch.setattr(stops, "_see_gone", dies)
    assert await rose(bench, "stop-all") == 3
    assert "the stop was taken, and nobody says what is left" in capsys.readouterr().err
    assert bench.core.capacity.stop.mode is HarvestMode.OFF


async def test_dry_runs_of_stops_say_what_would_end_and_change_nothing(
    bench: Bench, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    await bench.stub.RegisterJob(pb.RegisterJobRequest(job="grpo"))
    node = await serving(bench)
    await shows(bench, lambda now: bool(now.leases))
    for words, said in {
        ("hold",): "no new lease would be granted; 1 are kept (guest-0 of grpo)",
        ("drain",): "1 leases would be released (guest-0 of grpo)",
        ("stop-all",): "1 guests end; 1 nodes would be told",
        ("harvest", "off"): "1 leases would be released",
        ("resume",): "1 of 1 nodes would lend",
        ("revoke", "guest-0"): "lease of epoch 1 would be revoked",
        ("jobs", "end", "grpo"): "1 leases would be released",
        ("jobs", "drop", "grpo"): "would be dropped",
    }.items():
        assert await rose(bench, *words, "--dry-run") == 0
        assert said in capsys.readouterr().out
    assert bench.core.capacity.stop.mode is HarvestMode.ACTIVE
    assert len(bench.core.status(0.0).leases) == 1
    assert main(["kill", str(tmp_path), "--dry-run"]) == 0
    assert not (tmp_path / "KILL").exists()
    await node.leave()


async def test_a_stop_of_a_replica_that_is_not_there_is_kept_and_a_typo_is_said(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    node = await serving(bench)
    assert await rose(bench, "hold", "--replica", "gest-0") == 0
    assert "did you mean 'guest-0'?" in capsys.readouterr().err
    assert bench.core.capacity.stop.overrides == {"gest-0": HarvestMode.HOLD}
    await node.leave()
