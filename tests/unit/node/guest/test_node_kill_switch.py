"""A node's guests end at once by file and by signal, with everything else alive or dead."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from rose.cli.main import main
from rose.errors import RefusedError
from rose.main.node import main as node_main
from rose.node.guest.guest_record import FOLDER, running_guests
from rose.node.guest.kill_switch import (
    ANSWER_S,
    EndedGuest,
    KillSwitch,
    Measured,
    StopProof,
    end_guests,
)
from rose.node.orders import HarvestSwitch
from rose.process.child import group_alive
from rose.process.filelock import HeldFile
from rose.process.procfs import ProcessIdentity, group_bytes, group_members
from rose.rpc import rose_pb2 as pb
from tests.harness.waiting import PATIENCE_S, until

# A guest of two processes with some memory, which ignores what can be ignored.
GUEST = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
held = bytearray(8 << 20)
os.fork()
open(sys.argv[1] + str(os.getpid()), "w").close()
while True:
    time.sleep(0.01)
"""
# With those of test_node_stop.py these are a hundred.
TRIALS = [3, pytest.param(25, marks=pytest.mark.nightly)]


class RunFolder:
    """A run folder with a guest and its keeper, as a daemon that then died left them."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder
        self.kill_file = folder / "KILL"
        (folder / FOLDER).mkdir()
        self._claim = HeldFile.take(folder / FOLDER / "guest.json")
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self) -> int:
        """A new life of the guest; returns its group."""
        mark = f"{self.run_dir}/up{len(self._children)}-"
        launcher = [sys.executable, "-S", "-m", "rose.process.launcher"]
        claim = self._claim.descriptor
        options = [f"claim={claim}", "orphan_s=600", f"kill_file={self.kill_file}"]
        argv = [*launcher, *options, "--", sys.executable, "-S", "-c", GUEST, mark]
        child = subprocess.Popen(argv, pass_fds=[claim], start_new_session=True)
        self._children.append(child)
        found = mark.rsplit("/", 1)[1] + "*"
        until(lambda: len(list(self.run_dir.glob(found))) == 2, PATIENCE_S, "both processes")
        identity = ProcessIdentity.of(child.pid)
        assert identity is not None
        record = {"identity": asdict(identity), "spec": "s", "secret": "x"}
        self._claim.write(json.dumps(record).encode())
        return child.pid

    def reap(self) -> None:
        self._children[-1].wait(10)

    def close(self) -> None:
        for child in self._children:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait(10)
        self._claim.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunFolder]:
    node = RunFolder(tmp_path)
    yield node
    node.close()


def gone(group: int) -> bool:
    return not group_alive(group)


def by_rose_kill(node: RunFolder, group: int) -> EndedGuest:
    [guest] = end_guests(node.run_dir, node.kill_file).guests
    assert guest.pid == group
    return guest


@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize(
    "order",
    [
        by_rose_kill,
        pytest.param(lambda node, _: node.kill_file.touch(), id="by_file"),
        pytest.param(lambda _, group: os.killpg(group, signal.SIGUSR1), id="by_signal"),
    ],
)
def test_every_guest_is_gone_and_its_memory_back_each_time_with_nothing_else_alive(
    node: RunFolder, order: Callable[[RunFolder, int], object], trials: int
) -> None:
    for _ in range(trials):
        group = node.start()
        held = group_bytes(group)
        assert held is not None
        assert held > 8 << 20
        said = order(node, group)
        node.reap()
        until(partial(gone, group), PATIENCE_S, "the whole group gone")
        assert group_bytes(group) == 0
        if isinstance(said, EndedGuest):
            assert said.in_time
            assert (said.held, said.duty) == (0, 0.0)
            assert said.held_before is not None
            assert said.held_before > 8 << 20
            assert running_guests(node.run_dir) == {}
            again = end_guests(node.run_dir, node.kill_file)
            assert (again.guests, again.barred) == ((), True), (
                "an order given again changes nothing"
            )
            assert node.kill_file.exists()
        node.kill_file.unlink(missing_ok=True)


def test_a_guest_without_a_record_whose_keeper_is_stopped_is_ended_and_named(
    node: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = node.start()
    (node.run_dir / FOLDER / "guest.json").unlink()
    for pid, _ in group_members(group):
        if b"kill_file=" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGSTOP)
    name = f"guest without a record {group} (process {group})"
    monkeypatch.chdir(node.run_dir.parent)
    folder = node.run_dir.name
    assert main(["kill", folder, "--dry-run"]) == 0
    assert name in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr("rose.node.guest.kill_switch.kill_group", lambda group: None)
        patch.setattr(os, "killpg", lambda group, number: None)
        assert main(["kill", folder, "--within", "0.2"]) == 1
    [line] = [line for line in capsys.readouterr().out.splitlines() if name in line]
    assert "still runs" in line
    assert main(["kill", folder]) == 0
    assert f"{name} is gone" in capsys.readouterr().out
    node.reap()


def test_a_run_folder_that_was_removed_under_its_guest_is_killed_all_the_same(
    node: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    group = node.start()
    shutil.rmtree(node.run_dir)
    assert main(["kill", str(node.run_dir), "--dry-run"]) == 0
    assert f"(process {group})" in capsys.readouterr().out
    assert not node.run_dir.exists()
    assert main(["kill", str(node.run_dir)]) == 0
    node.reap()
    assert not group_alive(group)
    assert node.kill_file.exists()
    assert stat.S_IMODE(node.run_dir.stat().st_mode) == 0o700
    shutil.rmtree(node.run_dir)
    assert main(["kill", str(node.run_dir)]) == 2
    assert not node.run_dir.exists(), "a name that is no node's makes no folder"


def test_without_disk_and_daemon_the_guests_are_ended_all_the_same(node: RunFolder) -> None:
    group = node.start()
    ended = end_guests(node.run_dir, node.run_dir / "no" / "KILL")
    node.reap()
    assert [guest.gone for guest in ended.guests] == [True]
    assert not ended.barred, "and it is said that a daemon could start them anew"
    assert not group_alive(group)


@pytest.mark.parametrize(
    ("guest", "in_time"),
    [
        (EndedGuest("g", 1, 0.5, True, 9 << 20, 0), True),
        (EndedGuest("g", 1, 6.0, True, 9 << 20, 0), False),
        (EndedGuest("g", 1, 0.5, True, 9 << 20, 1), False),
        (EndedGuest("g", 1, 0.5, False, 9 << 20, 9 << 20, 0.4), False),
    ],
)
def test_in_time_is_what_was_measured_by_the_deadline(guest: EndedGuest, in_time: bool) -> None:
    assert guest.in_time is in_time
    assert "9.0 MiB before" in guest.outcome
    if guest.duty:
        assert "duty 40%" in guest.outcome


def test_a_switch_knows_for_how_long_a_guest_may_not_exist() -> None:
    now_s = [10.0]
    switch = HarvestSwitch(lambda: now_s[0])
    switch.take(pb.Harvest(mode=pb.HARVEST_MODE_ACTIVE))
    assert switch.off_s("g") == 0.0
    switch.take(pb.Harvest(mode=pb.HARVEST_MODE_OFF))
    assert switch.off("g")
    now_s[0] = 13.0
    switch.take(pb.Harvest(mode=pb.HARVEST_MODE_OFF))
    assert switch.off_s("g") == 3.0, "said again it does not begin anew"
    switch.take(pb.Harvest(mode=pb.HARVEST_MODE_HOLD))
    assert switch.off_s("g") == 0.0


@pytest.mark.parametrize(
    ("seen", "proved"),
    [
        # Once, when nothing is held and nothing runs.
        ([(None, 0.9), (9 << 20, 0.2), (0, 0.2), (0, 0.0), (0, 0.0)], [3]),
        # Again after a stop that another one followed unseen.
        ([(0, 0.0, 5.0, 1.0), (0, 0.0, 5.0, 1.0), (0, 0.0, 5.0, 2.0)], [0, 2]),
    ],
)
def test_a_stop_is_proved_once_by_what_was_measured(seen: list[Any], proved: list[int]) -> None:
    proof, told = StopProof(), []
    assert proof.step(Measured(False, None, 0.9, 5.0), 0.0) == []
    for at, (held, duty, *order) in enumerate(seen):
        said = proof.step(Measured(True, held, duty, *(order or [5.0])), 1.0 + at)
        told.append([(each.event, each.fields["in_time"]) for each in said])
    assert told == [[("stop_proved", True)] if at in proved else [] for at in range(len(seen))]


def test_a_stop_that_takes_too_long_says_what_is_left_and_when_it_is_gone() -> None:
    proof = StopProof()
    assert proof.step(Measured(True, 7, 0.5, 2.0), 0.0) == []
    [late] = proof.step(Measured(True, 7, 0.5, 2.0), 2.1)
    assert late.event == "stop_overdue"
    assert (late.fields["held_bytes"], late.fields["duty"]) == (7, 0.5)
    assert proof.step(Measured(True, None, 0.5, 2.0), 3.0) == []
    [done] = proof.step(Measured(True, 0, 0.0, 2.0), 9.0)
    assert (done.event, done.fields["in_time"]) == ("stop_proved", False)
    proof.step(Measured(False, None, 0.5, 2.0), 10.0)
    assert proof.step(Measured(True, 0, 0.0, 2.0), 20.0)[0].fields["seconds"] == 0.0


class HangingDisk:
    """A kill file whose disk answers when it is let."""

    def __init__(self, parent: Path) -> None:
        self.parent = parent
        self.is_there = False
        self.answers = threading.Event()
        self.asked = threading.Event()

    def exists(self) -> bool:
        self.asked.set()
        assert self.answers.wait(PATIENCE_S)
        return self.is_there


def test_nobody_waits_for_the_disk_of_the_kill_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.node.guest.kill_switch.on_disk", lambda folder: True)
    disk, now_s = HangingDisk(tmp_path), 0.0
    switch = KillSwitch(cast("Path", disk), lambda: now_s)
    assert disk.asked.wait(PATIENCE_S)
    assert not switch.engaged
    assert not switch.checked()
    now_s = ANSWER_S + 0.1
    assert not switch.engaged, "the last answer stands"
    with pytest.raises(OSError, match="the disk does not answer"):
        switch.checked()
    disk.is_there = True
    disk.answers.set()
    until(lambda: switch.engaged, PATIENCE_S, "the file is seen once the disk answers")
    assert switch.checked()


def test_a_kill_file_in_memory_is_seen_at_once(tmp_path: Path) -> None:
    switch = KillSwitch(tmp_path / "later" / "KILL")
    assert not switch.checked()
    switch.engage()
    assert switch.checked(), "a folder that is not there takes no file"
    switch = KillSwitch(tmp_path / "KILL")
    (tmp_path / "KILL").touch()
    assert switch.checked()
    (tmp_path / "KILL").unlink()
    assert not switch.engaged


@pytest.mark.parametrize("disk", [True, False])
def test_a_node_says_that_its_run_folder_is_on_a_disk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    disk: bool,
) -> None:
    config = {
        "node": "n", "scheduler": "127.0.0.1:1", "run_dir": str(tmp_path / "run"),
        "log_dir": str(tmp_path / "logs"), "replicas": [], "unsigned": True,
        "discover": {"folder": str(tmp_path)},
    }  # fmt: skip
    (tmp_path / "node.json").write_text(json.dumps(config))
    monkeypatch.setattr("rose.main.node.on_disk", lambda folder: disk)
    argv = ["--config", str(tmp_path / "node.json")]
    (tmp_path / "run").mkdir()

    async def refuse(path: Path, *, patient: bool) -> HeldFile:
        raise RefusedError("another daemon runs")

    monkeypatch.setattr("rose.main.node._own", refuse)
    assert node_main(argv) == 2
    assert ("is on a disk" in caplog.text) == disk
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    (tmp_path / "run").chmod(0o777)
    os.chown(tmp_path / "run", mine or 12_345, -1)
    capsys.readouterr()
    assert node_main(argv) == 2
    assert "is another user's" in capsys.readouterr().err
