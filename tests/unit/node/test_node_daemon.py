"""A whole node over real gRPC and HTTP: a real scheduler, a stand-in engine."""

import os
import signal
from pathlib import Path

import pytest
from node_bench import NodeBench

from executor import PageError
from rose.node import NodeDaemon
from rose.process.child import group_alive
from rose.rpc import rose_pb2 as pb

BENCH = {"kind": "dedicated", "runs": True}


async def test_a_lease_opens_admission_and_a_stop_drains_and_ends_the_engine(
    bench: NodeBench,
) -> None:
    row = await bench.until("leased", lambda row: row.leased)
    await bench.until_noted("lease_taken")
    assert bench.calls("admit")[0]["epoch"] == row.lease_epoch
    pid = bench.calls("start")[0]["pid"]
    bench.node.stop()
    await bench.until_noted("node_stopped")
    assert [call["epoch"] for call in bench.calls("drain")] == [row.lease_epoch]
    assert not group_alive(pid)


async def test_a_killed_engine_comes_back_under_a_new_lease_and_caught_up(bench: NodeBench) -> None:
    await bench.publish(1)
    await bench.publish(2)
    first = await bench.until("caught up", lambda row: row.leased and row.policy_version == 2)
    os.kill(bench.calls("start")[0]["pid"], signal.SIGKILL)
    again = await bench.until(
        "leased anew",
        lambda row: row.lease_epoch > first.lease_epoch and row.policy_version == 2,
    )
    assert again.healthy
    await bench.until_noted("lease_taken", times=2)
    second_pid = bench.calls("start")[1]["pid"]
    applied = [call["steps"] for call in bench.calls("apply") if call["pid"] == second_pid]
    assert applied == [[1, 2]], "the new engine starts from the base, and takes the chain at once"
    admitted = [call["epoch"] for call in bench.calls("admit") if call["pid"] == second_pid]
    assert min(admitted) > first.lease_epoch, "and never serves under the old lease"
    assert bench.noted("chunk_rejected"), "the publisher corrupts chunks, which are fetched again"


async def test_an_engine_that_cannot_prove_a_version_is_ended_and_rebased(bench: NodeBench) -> None:
    unproven = bench.folder / "unproven"
    unproven.touch()
    await bench.publish(1)
    await bench.until_noted("quarantined")
    unproven.unlink()
    await bench.until("proven", lambda row: row.healthy and row.policy_version == 1)
    assert len(bench.calls("start")) == 2


async def test_a_replica_without_a_page_is_measured_all_the_same(bench: NodeBench) -> None:
    async def measured() -> pb.GuestTelemetry | None:
        guests = (await bench.stub.Snapshot(pb.SnapshotRequest())).guests
        return guests[0] if guests and guests[0].tokens_total else None

    guest = await bench.awaited("its tokens", measured)
    assert (guest.running, guest.tokens_total, guest.mode) == (2, 7, "none")


async def test_a_revoked_lease_is_drained_and_granted_anew(bench: NodeBench) -> None:
    first = await bench.until("leased", lambda row: row.leased)
    await bench.stub.Revoke(pb.RevokeRequest(replica="r0", reason="drill"))
    await bench.until("leased anew", lambda row: row.lease_epoch > first.lease_epoch)
    ended = await bench.until_noted("lease_ended")
    assert (ended["epoch"], ended["reason"]) == (first.lease_epoch, "drill")


async def test_a_lost_scheduler_ends_the_lease_by_silence(bench: NodeBench) -> None:
    await bench.until("leased", lambda row: row.leased)
    await bench.server.stop(0)
    taken = await bench.until_noted("lease_taken_back")
    assert taken["reason"] == "expired"
    await bench.until_noted("lease_ended")
    assert bench.calls("drain")


@pytest.mark.parametrize("bench", [{"runs": True}], indirect=True)
async def test_off_ends_the_guest_after_its_turns_and_active_brings_it_back(
    bench: NodeBench,
) -> None:
    await bench.until("leased", lambda row: row.leased)
    await bench.until_noted("lease_taken")
    await bench.stub.SetHarvest(pb.SetHarvestRequest(mode=pb.HARVEST_MODE_OFF))
    await bench.until_noted("engine_ended")
    assert bench.calls("drain"), "its turns were handed back first"
    assert len(bench.calls("start")) == 1
    await bench.stub.SetHarvest(pb.SetHarvestRequest(mode=pb.HARVEST_MODE_ACTIVE))
    await bench.until("leased anew", lambda row: row.leased)
    assert len(bench.calls("start")) == 2


async def test_an_engine_that_never_admits_is_replaced(
    bench: NodeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.node.lease.RETRY_PAUSE_S", 0.01)
    (bench.folder / "closed").touch()
    await bench.until_noted("engine_unwanted")
    (bench.folder / "closed").unlink()
    await bench.until_noted("lease_taken")
    assert len(bench.calls("start")) == 2


async def test_metrics_are_served_beside_the_daemon(bench: NodeBench) -> None:
    await bench.until("leased", lambda row: row.leased)
    text = "\n".join(await bench.scraped(""))
    assert 'rose_engine_state{replica="r0",state="healthy"} 1.0' in text
    assert 'rose_engine_starts_total{how="started",replica="r0"} 1.0' in text
    assert 'share="plain"' in text or 'share="nice"' in text


async def test_a_second_daemon_is_refused_the_page_of_the_first(tmp_path: Path) -> None:
    config = NodeBench(tmp_path, "guest").config
    first = NodeDaemon(config)
    elsewhere = {"run_dir": tmp_path / "run2", "log_dir": tmp_path / "logs2", "node": "n2"}
    with pytest.raises(PageError, match="has a node daemon already; stop that one"):
        NodeDaemon(config.model_copy(update=elsewhere))
    del first
