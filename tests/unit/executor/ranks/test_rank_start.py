"""A guest's start over several ranks: the first asks the gate, the others sleep meanwhile."""

import multiprocessing
import multiprocessing.queues
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed

import executor.rank_group as rank_group
from executor import ControlPage, Grant, GrantMode
from executor.guest.gate_client import EXIT_BROKEN, GrantLiveness, StartGate, Watchdog
from tests.harness.seated_host import SeatedHost

RANKS, BUSY_S, PASSES = 2, 1.5, 3
SPAWN = multiprocessing.get_context("spawn")


def start(rank: int, page: str, meeting: str, told: "multiprocessing.queues.Queue[object]") -> None:
    """Go through the passes of one rank's start."""
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    group = torch.distributed.group.WORLD
    rank_group.GATE_NEWS_S = 0.2  # type: ignore[misc]
    gate = StartGate(ControlPage.open(Path(page)))
    torch.distributed.barrier()
    told.put("ready")
    began_s, computed_s = time.monotonic(), time.process_time()
    for _ in range(PASSES):
        rank_group.wait_together(gate, rank_group.RankGroup(rank, RANKS, group))
    ended_s = time.monotonic()
    told.put((rank, gate.passes, ended_s - began_s, time.process_time() - computed_s))
    torch.distributed.barrier()


def test_all_ranks_wait_for_the_first_and_none_computes_meanwhile(tmp_path: Path) -> None:
    told: multiprocessing.queues.Queue[object] = SPAWN.Queue()
    with ControlPage.create(tmp_path / "page") as page:
        host = SeatedHost(page)
        ranks = [
            SPAWN.Process(
                target=start,
                args=(rank, str(page.path), str(tmp_path / "meeting"), told),
                daemon=True,
            )
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        assert [told.get(timeout=60) for _ in ranks] == ["ready"] * RANKS

        def beat(seconds: float, running: int) -> None:
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                now_ns = time.monotonic_ns()
                host.tell(running=running)
                page.grant.write(
                    Grant(GrantMode.RUN, 512, 16, expiry_ns=now_ns + 10**9, heartbeat_ns=now_ns)
                )
                time.sleep(0.01)

        beat(BUSY_S, running=1)
        assert told.empty()
        beat(0.3, running=0)
        reports = sorted(told.get(timeout=30) for _ in ranks)  # type: ignore[type-var]
        for rank in ranks:
            rank.join(30)
            assert rank.exitcode == 0
    for number, (rank, passes, took_s, computed_s) in enumerate(reports):  # type: ignore[misc]
        assert (rank, passes) == (number, PASSES)
        assert took_s >= BUSY_S - 0.1
        assert computed_s < 0.3 * took_s, "it sleeps while it waits"


@pytest.mark.parametrize("victim", range(3))
def test_a_guest_ends_whole_with_its_first_rank(tmp_path: Path, victim: int) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    ranks = [subprocess.Popen(sleeper) for _ in range(3)]
    codes: list[int] = []
    with ControlPage.create(tmp_path / "page") as page:
        orphan = GrantLiveness(time.monotonic_ns(), 60 * 10**9)
        pids = [rank.pid for rank in ranks]
        watchdog = Watchdog(page, orphan, lambda _: None, codes.append, 0.001, pids)
        watchdog.start()
        time.sleep(0.05)
        assert not codes
        ranks[victim].kill()
        watchdog.join(10)
    assert codes == [EXIT_BROKEN]
    assert [rank.wait(10) for rank in ranks] == [-9] * 3


def test_no_rank_outlives_an_orphaned_guest(tmp_path: Path) -> None:
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    codes: list[int] = []
    with ControlPage.create(tmp_path / "page") as page:
        orphan = GrantLiveness(time.monotonic_ns(), 10**7)
        Watchdog(page, orphan, lambda _: None, codes.append, 0.001, [rank.pid]).run()
    assert len(codes) == 1
    assert rank.wait(10) == -9
