"""With the control plane up a stop ends a node's guest each time, proved by what is measured."""

import json

import pytest
from node_bench import NodeBench

from executor import FreezeReason
from executor.kv.lending import LEAST_CAP
from executor.kv.shrink_plan import NO_CAP
from rose.process.child import group_alive
from rose.process.procfs import group_bytes
from rose.rpc import rose_pb2 as pb
from tests.harness.waiting import PATIENCE_S, until_async

# With those of test_node_kill_switch.py these are a hundred in a night.
TRIALS = [3, pytest.param(25, marks=pytest.mark.nightly)]


async def stop(bench: NodeBench, mode: "pb.HarvestMode.ValueType") -> None:
    await bench.stub.SetHarvest(pb.SetHarvestRequest(mode=mode, stop_alone=True))


async def proved(bench: NodeBench) -> pb.GuestTelemetry:
    """The guest as the node says it is, once nothing of it is left."""

    async def empty() -> pb.GuestTelemetry | None:
        for guest in (await bench.stub.Snapshot(pb.SnapshotRequest())).guests:
            held = guest.held_bytes or not guest.HasField("held_bytes")
            if not held and guest.state in ("stopped", "backoff"):
                return guest
        return None

    return await bench.awaited("proved", empty)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("trials", TRIALS)
async def test_the_stop_of_the_control_plane_ends_the_guest_each_time(
    bench: NodeBench, trials: int
) -> None:
    bench.spawn()
    for trial in range(trials):
        await bench.until("leased", lambda row: row.leased and row.healthy)
        group = bench.calls("start")[trial]["pid"]
        earlier = len(bench.noted("stop_proved"))
        await stop(bench, pb.HARVEST_MODE_OFF)
        await stop(bench, pb.HARVEST_MODE_OFF)
        guest = await proved(bench)
        assert guest.duty == 0.0
        assert not group_alive(group)
        assert group_bytes(group) == 0
        await until_async(
            lambda done=earlier: len(bench.noted("stop_proved")) > done, PATIENCE_S, "the proof"
        )
        await stop(bench, pb.HARVEST_MODE_ACTIVE)
    assert len(bench.noted("engine_reclaimed")) == trials
    # Orders that are told in two words may be proved twice.
    proofs = bench.noted("stop_proved")
    assert len(proofs) >= trials
    assert all(proof["in_time"] for proof in proofs)
    assert bench.noted("command_ignored") == [], "a heartbeat is no order"


async def test_a_dropped_file_is_proved_too(bench: NodeBench) -> None:
    bench.spawn()
    await bench.until("leased", lambda row: row.leased and row.healthy)
    (bench.run_dir / "KILL").touch()
    proof = await bench.until_noted("stop_proved")
    assert (proof["held_bytes"], proof["duty"], proof["in_time"]) == (0, 0.0, True)


async def test_turns_that_are_not_handed_back_do_not_outlive_the_deadline(bench: NodeBench) -> None:
    (bench.folder / "deaf").touch()
    bench.settings["replicas"][0]["reclaim_s"] = 1.0
    bench.spawn()
    await bench.until("leased", lambda row: row.leased and row.healthy)
    await bench.until_noted("lease_taken")
    await stop(bench, pb.HARVEST_MODE_OFF)
    await proved(bench)
    assert bench.noted("engine_reclaimed")[0]["reason"] == "harvest is off"


async def test_caps_of_a_policy_reach_the_grant_and_silence_ends_it(bench: NodeBench) -> None:
    bench.spawn()
    await bench.until("leased", lambda row: row.leased and row.healthy)
    await bench.until_granted("uncapped", lambda grant: grant.kv_granule_cap == NO_CAP)
    said = {"name": "p", "mode": "Active", "maxHarvest": {"memory": "1Ki"}, "staleAfter": "2s"}
    await bench.stub.ApplyPolicy(pb.ApplyPolicyRequest(policy=json.dumps(said)))
    await bench.until_granted("capped", lambda grant: grant.kv_granule_cap == LEAST_CAP)
    assert (await bench.row() or pb.Replica()).leased
    del said["maxHarvest"]
    await bench.stub.ApplyPolicy(pb.ApplyPolicyRequest(policy=json.dumps(said)))
    await bench.until_granted("free again", lambda grant: grant.kv_granule_cap == NO_CAP)
    await bench.server.stop(0)
    await bench.until_granted("cut off", lambda grant: grant.reason == FreezeReason.CUT_OFF)
    await bench.until_granted("without memory", lambda grant: grant.kv_granule_cap == LEAST_CAP)
