"""Real engines under load: whoever is killed or stopped, the host's users never notice.

Each test ends with a guest at work again or says that it leaves none; they build on one another,
since a guest takes most of a minute to start. Of `make test` the last of test_memory_lending is
like these; what is a node's alone is tested with stand-ins in tests/unit/node.
"""

import logging
import os
import signal
import time
from collections.abc import Iterator

import pytest
from kill_bench import KillBench

from rose.cli.main import main as rose
from rose.node.config import ReplicaConfig
from rose.node.guest.guest_record import running_guests
from tests.harness.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(600)]

log = logging.getLogger(__name__)
ORPHAN_S = ReplicaConfig.model_fields["orphan_s"].default
FREEZE_S = 0.25
GONE_S = 2.0
# Delay that two shared cores may cause.
LATE_S = 0.1


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillBench]:
    bench = KillBench(tmp_path_factory.mktemp("kill"), ORPHAN_S)
    try:
        bench.start()
        yield bench
    finally:
        bench.close()


@pytest.fixture(autouse=True)
def host_serves_on(bench: KillBench) -> Iterator[None]:
    """All requests of the host's users succeed, before, during and after."""
    before = len(bench.host_load.latencies_s)
    yield
    until(lambda: len(bench.host_load.latencies_s) > before + 5, 30, "the host serves on")
    assert bench.host_load.failures == []
    during = sorted(bench.host_load.latencies_s[before:])
    log.info("host: %d requests, worst %.0f ms", len(during), during[-1] * 1e3)


def assert_frozen(bench: KillBench, moment_ns: int, watch_s: float) -> None:
    frozen_s = bench.last_step_after(moment_ns, watch_s)
    step_s = bench.guest().last_step_ns / 1e9
    log.info("frozen %.0f ms after, a step takes %.0f ms", frozen_s * 1e3, step_s * 1e3)
    assert frozen_s <= FREEZE_S + step_s + LATE_S


def test_a_killed_daemons_standby_adopts_the_working_guest(bench: KillBench) -> None:
    group = bench.at_work()
    standby = bench.spawn("--standby")
    daemon_log = bench.folder / "daemon.log"
    until(lambda: "stands by" in daemon_log.read_text(), 30, "it waits for the lock")
    epoch = bench.noted("lease_taken")[-1]["epoch"]
    bench.daemons[0].kill()
    killed_s = time.monotonic()
    until(lambda: bench.noted("engine_adopted"), ORPHAN_S + 5, "the standby adopts")
    log.info("adopted %.0f ms after", (bench.noted("engine_adopted")[0]["t_s"] - killed_s) * 1e3)
    until(lambda: bench.noted("lease_taken")[-1]["epoch"] > epoch, 30, "it is leased anew")
    log.info("leased anew %.1f s after", time.monotonic() - killed_s)
    assert bench.at_work() == group, "it is the same process"
    assert len(bench.noted("engine_started")) == 1
    bench.daemons[:] = [standby]


def test_a_sigstopped_daemon_that_wakes_up_with_an_old_lease_grants_nothing(
    bench: KillBench,
) -> None:
    bench.at_work()
    daemon, stalls = bench.daemons[-1], len(bench.noted("lease_taken_back"))
    old = bench.noted("lease_taken")[-1]["epoch"]
    daemon.send_signal(signal.SIGSTOP)
    assert_frozen(bench, time.monotonic_ns(), watch_s=0.9)
    frozen = bench.guest().tokens_total
    daemon.send_signal(signal.SIGCONT)
    until(lambda: len(bench.noted("lease_taken_back")) > stalls, 10, "the old lease is void")
    while bench.noted("lease_taken")[-1]["epoch"] == old:
        grant = bench.page.grant.peek()
        assert grant is None or grant.token_budget == 0 or bench.granted_epoch() > old
        time.sleep(0.002)
    assert bench.noted("lease_taken_back")[-1]["reason"] == "daemon_stalled"
    bench.at_work()
    assert bench.guest().tokens_total > frozen


def test_a_sigstopped_guest_is_ended_and_its_memory_is_back(bench: KillBench) -> None:
    group = bench.at_work()
    held = bench.resident_bytes(group)
    os.killpg(group, signal.SIGSTOP)
    gone_s = bench.gone(group, 10.0)
    log.info("a stopped guest of %.1f GiB is gone %.1f s after", held / 2**30, gone_s)
    until(lambda: bench.noted("engine_reclaimed"), 5.0, "it is written down")
    assert "SIGSTOP" in bench.noted("engine_reclaimed")[-1]["reason"]
    assert bench.resident_bytes(group) == 0


def test_a_dead_engine_gets_no_traffic_and_comes_back(bench: KillBench) -> None:
    group = bench.at_work()
    os.kill(bench.engine_core(group), signal.SIGKILL)
    until(lambda: not (row := bench.row()) or not row.leased, 5.0, "no turn is routed there")
    gone_s = bench.gone(group, 10.0)
    log.info("the rest of a guest without its core is gone %.2f s after", gone_s)
    assert bench.at_work() != group


def test_the_kill_switch_ends_the_guest_with_the_daemon_stopped(
    bench: KillBench, capsys: pytest.CaptureFixture[str]
) -> None:
    group = bench.at_work()
    bench.daemons[-1].send_signal(signal.SIGSTOP)
    began_s = time.monotonic()
    assert rose(["kill", str(bench.run_dir)]) == 0
    took_s = time.monotonic() - began_s
    log.info("kill switch: %.2f s, %s", took_s, capsys.readouterr().out.splitlines()[-1])
    assert took_s < GONE_S
    assert bench.resident_bytes(group) == 0
    bench.daemons[-1].send_signal(signal.SIGCONT)
    assert rose(["unkill", str(bench.run_dir)]) == 0


def test_a_killed_daemons_guest_freezes_and_gives_its_memory_back(bench: KillBench) -> None:
    group = bench.at_work()
    held = bench.resident_bytes(group)
    bench.daemons[-1].kill()
    killed_ns = time.monotonic_ns()
    assert_frozen(bench, killed_ns, watch_s=0.9)
    bench.gone(group, 10.0)
    gone_s = (time.monotonic_ns() - killed_ns) / 1e9
    log.info("%.1f GiB are back %.2f s after (orphan_s %.1f)", held / 2**30, gone_s, ORPHAN_S)
    assert gone_s <= GONE_S
    assert bench.resident_bytes(group) == 0


def test_killed_together_daemon_and_guest_leave_nothing(bench: KillBench) -> None:
    daemon = bench.spawn()
    group = bench.at_work()
    daemon.kill()
    os.kill(group, signal.SIGKILL)  # The API process: the core would live on for good.
    gone_s = bench.gone(group, GONE_S)
    log.info("both killed: nothing left %.2f s after", gone_s)
    assert running_guests(bench.run_dir) == {}
