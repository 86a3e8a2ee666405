"""A guest whose daemon died: adopted in time, or gone in time."""

import asyncio
import os
import signal
import stat

import pytest
from node_bench import NodeBench

from rose.cli.main import main as rose
from rose.node.guest.guest_record import running_guests
from rose.process.child import group_alive
from tests.harness.waiting import until_async

ORPHAN_S = 1.0
# Delay that a busy machine may cause.
LATE_S = 10.0


BENCH = {"orphan_s": ORPHAN_S}
patient = pytest.mark.parametrize("bench", [{"orphan_s": 20.0}], indirect=True)


async def leased_guest(bench: NodeBench) -> int:
    await bench.until("leased", lambda row: row.leased)
    await bench.until_noted("lease_taken")
    return int(bench.calls("start")[-1]["pid"])


async def killed(bench: NodeBench) -> int:
    """Return the process group of a leased guest whose daemon was killed."""
    daemon = bench.spawn()
    pid = await leased_guest(bench)
    daemon.end()
    return pid


async def until_gone(pid: int) -> None:
    await until_async(lambda: not group_alive(pid), LATE_S, "it is gone")


@patient
async def test_the_next_daemon_adopts_the_guest_and_its_version_but_not_its_lease(
    bench: NodeBench,
) -> None:
    first = bench.spawn()
    pid = await leased_guest(bench)
    standby = bench.spawn("--standby")
    await bench.publish(1)
    before = await bench.until("caught up", lambda row: row.policy_version == 1)
    assert standby.poll() is None
    first.end()
    adopted = await bench.until_noted("engine_adopted")
    assert adopted["pid"] == pid
    after = await bench.until(
        "leased anew", lambda row: row.leased and row.lease_epoch > before.lease_epoch
    )
    await bench.until_noted("lease_taken", times=2)
    assert after.policy_version == 1
    assert [call["version"] for call in bench.calls("apply")] == [1], "it had proven that one"
    assert before.lease_epoch in [call["epoch"] for call in bench.calls("drain")]
    assert len(bench.calls("start")) == 1
    assert bench.calls("stranger") == [], "it found the secret of that engine again"
    record = bench.run_dir / "guests" / "r0.json"
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    standby.terminate()
    assert standby.wait(15) == 0
    assert not group_alive(pid), "who adopts a guest ends it too"
    assert running_guests(bench.run_dir) == {}


async def test_a_guest_that_nobody_adopts_is_gone_when_its_time_is_over(bench: NodeBench) -> None:
    pid = await killed(bench)
    await asyncio.sleep(ORPHAN_S / 2)
    assert group_alive(pid), "the next daemon may still come"
    took_s = ORPHAN_S / 2 + await until_async(
        lambda: not group_alive(pid), ORPHAN_S + LATE_S, "it is so"
    )
    assert took_s < ORPHAN_S + LATE_S


async def test_a_guest_killed_with_its_daemon_leaves_nothing(bench: NodeBench) -> None:
    daemon = bench.spawn()
    pid = await leased_guest(bench)
    os.kill(pid, signal.SIGKILL)  # The leader alone: the rest of its group is the keeper's to end.
    daemon.end()
    await until_gone(pid)


@patient
async def test_a_guest_of_other_settings_is_not_adopted(bench: NodeBench) -> None:
    pid = await killed(bench)
    bench.settings["replicas"][0]["max_model_len"] = 1024
    bench.spawn()
    refused = await bench.until_noted("engine_not_adopted")
    assert (refused["pid"], refused["reason"]) == (pid, "it was started with other settings")
    await until_gone(pid)
    await bench.until_noted("lease_taken", times=2)
    assert len(bench.calls("start")) == 2


@patient
async def test_a_record_cut_short_is_not_believed(bench: NodeBench) -> None:
    await killed(bench)
    record = bench.run_dir / "guests" / "r0.json"
    record.write_bytes(record.read_bytes()[:20])
    bench.spawn()
    await bench.until_noted("node_started", times=2)
    assert bench.noted("engine_adopted") == []


async def test_a_second_daemon_of_the_same_node_is_refused(bench: NodeBench) -> None:
    first = bench.spawn()
    await leased_guest(bench)
    second = bench.spawn()
    assert second.wait(15) == 2
    assert f"held by process {first.pid}" in (bench.folder / "daemon.log").read_text()


@patient
async def test_the_kill_file_works_with_the_daemon_dead_and_bars_the_next_one(
    bench: NodeBench,
) -> None:
    pid = await killed(bench)
    (bench.run_dir / "KILL").touch()
    await until_gone(pid)
    bench.spawn()
    await bench.until_noted("node_started", times=2)
    await asyncio.sleep(0.5)
    assert len(bench.calls("start")) == 1
    (bench.run_dir / "KILL").unlink()
    await bench.until_noted("lease_taken", times=2)


@patient
async def test_a_signal_kills_the_guest_and_keeps_it_away(bench: NodeBench) -> None:
    daemon = bench.spawn()
    pid = await leased_guest(bench)
    await bench.server.stop(0)
    daemon.send_signal(signal.SIGUSR1)
    await until_gone(pid)
    await until_async((bench.run_dir / "KILL").exists, LATE_S, "the file")
    assert daemon.poll() is None
    await bench.until_noted("kill_switch_set")


@patient
@pytest.mark.parametrize("keeper", ["runs", "is stopped"])
async def test_rose_kill_sees_the_guest_gone_though_the_daemon_is_stopped(
    bench: NodeBench, capsys: pytest.CaptureFixture[str], keeper: str
) -> None:
    """The command ends the guest itself if all that should have done so is stopped."""
    daemon = bench.spawn()
    pid = await leased_guest(bench)
    daemon.send_signal(signal.SIGSTOP)
    if keeper == "is stopped":
        os.killpg(pid, signal.SIGSTOP)
    assert await asyncio.to_thread(rose, ["kill", str(bench.run_dir)]) == 0
    assert not group_alive(pid)
    assert f"r0 (process {pid}) is gone after " in capsys.readouterr().out
    daemon.send_signal(signal.SIGCONT)


@patient
async def test_a_stopped_daemon_that_wakes_up_with_an_old_lease_grants_nothing(
    bench: NodeBench,
) -> None:
    daemon = bench.spawn()
    await leased_guest(bench)
    old = (await bench.until("leased", lambda row: row.leased)).lease_epoch
    daemon.send_signal(signal.SIGSTOP)
    await asyncio.sleep(0.7)  # Longer than a grant lives, not as long as the lease does.
    daemon.send_signal(signal.SIGCONT)
    taken = await bench.until_noted("lease_taken_back")
    assert (taken["epoch"], taken["reason"]) == (old, "daemon_stalled")
    await bench.until_noted("lease_taken", times=2)
    stalled = next(g["t_s"] for g in bench.noted("grant") if g["reason"] == "daemon_stalled")

    def ran() -> list[float]:
        grants = bench.noted("grant")
        return [g["t_s"] for g in grants if g["mode"] == "run" and g["t_s"] > stalled]

    await until_async(ran, LATE_S, "it runs again")
    granted = bench.scheduled("lease_granted")[-1]
    assert granted["epoch"] > old
    assert min(ran()) >= granted["t_s"]
