"""A guest that owes memory is put among the normal processes until it has paid, then back."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose.node.guest.cpu_placement import IDLE, NICE, CpuBoost, CpuPlacement
from rose.process import launcher

ENDED = 2**22 + 1
may_raise = pytest.mark.skipif(os.geteuid() != 0, reason="raising a process needs a privilege")


@pytest.fixture
def guest() -> Iterator[int]:
    """A process group in the background."""
    program = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(
        [sys.executable, str(launcher.__file__), "share=background", "--", *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
    ) as process:
        assert process.stdout
        process.stdout.readline()
        yield process.pid
        process.kill()


def share(pid: int) -> str:
    place = CpuPlacement.of(pid)
    assert place
    return place.share


@may_raise
def test_it_has_a_core_while_it_is_boosted_and_only_then(guest: int) -> None:
    boost = CpuBoost()
    shares = []
    for boosted in (False, True, True, False, True, False):
        boost.set(guest if boosted else None)
        shares.append(share(guest) in (IDLE, NICE))
    assert shares == [True, False, False, True, False, True]


def test_a_group_that_ended_meanwhile_and_its_successor_are_left_alone(guest: int) -> None:
    boost = CpuBoost()
    boost.set(ENDED)
    boost.set(None)
    assert share(guest) in (IDLE, NICE)


@pytest.mark.parametrize(("knob", "values"), [("cpu.idle", "01"), ("cpu.weight", ["100", "1"])])
def test_its_cgroup_is_weighed_with_it(tmp_path: Path, knob: str, values: str) -> None:
    """On a file that stands in for a cgroup v2 folder."""
    (tmp_path / knob).write_text("1")
    boost = CpuBoost(tmp_path)
    for group, value in zip((ENDED, None), values, strict=True):
        boost.set(group)
        assert (tmp_path / knob).read_text() == value


def test_a_cgroup_that_may_not_be_written_costs_no_grant(tmp_path: Path) -> None:
    CpuBoost(tmp_path / "gone").set(ENDED)


@may_raise
def test_one_that_stands_aside_is_put_back_aside(guest: int) -> None:
    os.sched_setscheduler(guest, os.SCHED_OTHER, os.sched_param(0))
    boost = CpuBoost(share="aside")
    boost.set(guest)
    boost.set(None)
    assert share(guest) == NICE
    assert os.getpriority(os.PRIO_PROCESS, guest) == launcher.ASIDE_NICE
