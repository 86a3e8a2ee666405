"""A guest is behind everybody else as far as is permitted, unless it owes memory."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rose.node.guest.cpu_placement import (
    IDLE,
    NICE,
    PLAIN,
    CgroupRefusedError,
    CpuBoost,
    CpuPlacement,
    guest_cgroup,
    weigh,
)
from rose.process import launcher

UNTOUCHED = NICE if os.getpriority(os.PRIO_PROCESS, 0) > 0 else PLAIN
# Errors in a container without the right to change scheduling.
FORBIDDEN = """
import os, runpy, sys
def refuse(*_): raise PermissionError(1, "not permitted")
for name in sys.argv[1].split(","):
    setattr(os, name, refuse)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@contextmanager
def waiting(*argv: str, **options: Any) -> Iterator[int]:
    """A program that was started so and waits; yields its process."""
    program = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(
        [sys.executable, *argv, "--", *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        **options,
    ) as process:
        assert process.stdout
        process.stdout.readline()
        yield process.pid
        process.kill()


def placed(*argv: str) -> CpuPlacement:
    with waiting(*argv) as pid:
        found = CpuPlacement.of(pid)
    assert found
    return found


@pytest.mark.parametrize(
    ("refused", "options", "share", "oom_score_adj"),
    [
        ("nothing", ["share=background"], IDLE, 1000),
        ("sched_setscheduler", ["share=background"], NICE, 1000),
        ("sched_setscheduler,setpriority", ["share=background"], UNTOUCHED, 1000),
        # On a GPU: a step whose launches wait for an idle core would end in its host's time.
        ("nothing", ["share=aside"], NICE, 1000),
        ("nothing", [], UNTOUCHED, None),
    ],
)
def test_a_guest_is_placed_behind_others_as_far_as_is_permitted(
    refused: str, options: list[str], share: str, oom_score_adj: int | None
) -> None:
    found = placed("-c", FORBIDDEN, refused, str(launcher.__file__), *options)
    assert found.share == share
    assert oom_score_adj in (None, found.oom_score_adj)


def test_nothing_is_said_of_a_process_that_is_gone() -> None:
    assert CpuPlacement.of(2**22 + 1) is None


@pytest.mark.parametrize(("knob", "value"), [("cpu.idle", "1"), ("cpu.weight", "1")])
def test_a_delegated_cgroup_gets_a_group_of_the_least_weight(
    tmp_path: Path, knob: str, value: str
) -> None:
    """On files that stand in for a cgroup v2 folder with the cpu controller."""
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory")
    (tmp_path / "guest").mkdir()
    (tmp_path / "guest" / knob).write_text("100")
    (tmp_path / "guest" / "cgroup.procs").write_text("")
    group = guest_cgroup(tmp_path, "guest")
    assert (group / knob).read_text() == value
    process = subprocess.Popen(
        [sys.executable, str(launcher.__file__), f"cgroup={group}", "--", "true"]
    )
    process.wait()
    assert (group / "cgroup.procs").read_text() == str(process.pid)


def test_a_folder_that_is_no_cgroup_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CgroupRefusedError, match="delegate a cgroup v2 folder"):
        guest_cgroup(tmp_path, "guest")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("knobs", [("cpu.idle", "cpu.weight"), ("cpu.weight",)])
@pytest.mark.parametrize(("share", "weight"), [("aside", "10"), (None, "100")])
def test_a_group_that_stands_aside_has_a_tenth_of_the_weight(
    tmp_path: Path, knobs: tuple[str, ...], share: launcher.Share | None, weight: str
) -> None:
    """On files that stand in for a cgroup v2 folder."""
    for knob in knobs:
        (tmp_path / knob).write_text("1")
    weigh(tmp_path, share)
    assert (tmp_path / "cpu.weight").read_text() == weight
    assert "cpu.idle" not in knobs or (tmp_path / "cpu.idle").read_text() == "0"


# ---- the boost ----


ENDED = 2**22 + 1
may_raise = pytest.mark.skipif(os.geteuid() != 0, reason="raising a process needs a privilege")


@pytest.fixture
def guest() -> Iterator[int]:
    """A process group in the background."""
    with waiting(str(launcher.__file__), "share=background", process_group=0) as pid:
        yield pid


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
