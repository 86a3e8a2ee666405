"""Hosts in a shared folder: who is there, who came and left, and what is no host."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from found_hosts import FolderHost

import executor.control_page.page
from executor import ControlPage
from executor.control_page.page import PAGE_BYTES
from rose.cli.machine import doctor
from rose.node import discovery
from rose.node.config import DiscoverConfig, HostConfig
from rose.node.discovery import (
    DEAD_LOOKS,
    GONE_LOOKS,
    FolderScan,
    FoundHost,
    HostBook,
    HostFound,
    HostLost,
    PageDead,
    PageRefused,
    look,
    sweep,
)
from rose.node.host import HostProcess
from rose.process.procfs import pid_namespace
from tests.harness.waiting import PATIENCE_S, until


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    hosts.clear()
    yield tmp_path
    for host in hosts:
        host.close()


hosts: list[FolderHost] = []


def host(folder: Path, name: str, *devices: str) -> FolderHost:
    hosts.append(FolderHost(folder, name, *devices))
    return hosts[-1]


def ended(host: FolderHost) -> None:
    hosts.remove(host)
    host.close()


def said(seen: FolderScan) -> str:
    (reason,) = seen.unusable.values()
    return reason


# ---- the folder ----


def test_a_host_is_found_with_what_it_says_of_itself(folder: Path) -> None:
    host(folder, "a", "GPU-0a")
    pod = folder / "5f1c"
    pod.mkdir()
    host(pod, "b", "GPU-0b", "GPU-0c")
    seen = look(folder)
    assert not seen.unusable
    discover = DiscoverConfig(folder=folder, tpot_target_s=0.2, headroom_bytes=7)
    one, several = (seen.hosts[name].config(discover) for name in "ab")
    assert (one.name, one.page, one.gpus) == ("a", folder / "a.page", ("GPU-0a",))
    assert (one.ttft_target_s, one.tpot_target_s) == (0.5, 0.2), "its own where it names one"
    assert one.headroom_bytes == 7
    assert several.gpus == ("GPU-0b", "GPU-0c")


def test_only_a_living_process_makes_a_host(folder: Path) -> None:
    ended(host(folder, "a"))
    seen = look(folder)
    assert (seen.hosts, seen.unusable) == ({}, {}), "its page and its description are still there"


def test_pages_that_nobody_uses_are_swept_and_no_others(folder: Path) -> None:
    for name in "abc":
        ended(host(folder, name))
    (folder / "d.page").write_text("notes of somebody")
    dead = dict(look(folder).dead)
    assert sorted(dead) == [folder / f"{name}.page" for name in "abc"]
    with ControlPage.open(folder / "b.page") as page:
        lane = page.take_lane()  # as an API process whose engine core is still to come
        assert not sweep(folder / "b.page", dead[folder / "b.page"])
        lane.close()
    again = host(folder, "c")
    assert sweep(folder / "a.page", dead[folder / "a.page"])
    assert not sweep(folder / "a.page", dead[folder / "a.page"])
    assert not sweep(again.path, dead[again.path])
    assert sorted(path.name for path in folder.glob("[ac].*")) == ["c.json", "c.page"]
    assert (folder / "d.page").exists()


def test_a_page_is_dead_after_many_looks_at_the_same_file() -> None:
    book, page = HostBook(8), Path("p.page")
    for inode in ((0, 1), (0, 2)):
        acts = [book.step(FolderScan(dead={page: inode})) for _ in range(DEAD_LOOKS + 5)]
        assert [act for each in acts for act in each] == [PageDead(page, inode)]
        assert acts[DEAD_LOOKS - 1]


def test_a_description_of_an_earlier_life_is_none(folder: Path) -> None:
    earlier = host(folder, "a", "GPU-0a")
    left_behind = earlier.said
    ended(earlier)
    later = host(folder, "a")
    assert look(folder).hosts["a"].said == later.said
    replace(left_behind, seated_ns=left_behind.seated_ns - 1).write(later.path)
    seen = look(folder)
    assert not seen.hosts
    assert "has not described itself since it started" in said(seen)
    later.path.with_suffix(".json").unlink()
    assert "ROSE_HOST_DIR" in said(look(folder)), "as of a plugin that is older than this"


def scribble(host: FolderHost, at: int, raw: bytes) -> None:
    with host.path.open("r+b") as file:
        file.seek(at)
        file.write(raw)


UNUSABLE: dict[str, tuple[Callable[[FolderHost], object], str]] = {
    "no page": (lambda host: scribble(host, 0, b"NOROSE"), "is not a control page"),
    "cut": (lambda host: os.truncate(host.path, 100), "layout|cut short"),
    "cut at its end": (lambda host: os.truncate(host.path, PAGE_BYTES - 1), "cut short"),
    "open to others": (lambda host: host.path.chmod(0o666), "open to other users"),
    "torn description": (
        lambda host: host.path.with_suffix(".json").write_text('{"model": "ch'),
        "describes no host",
    ),
    "torn seat": (
        lambda host: scribble(host, host.page.seat.start, b"\xff" * 16),
        "has not described itself",
    ),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_what_cannot_be_used_is_no_host_and_the_others_are(folder: Path, what: str) -> None:
    damage, reason = UNUSABLE[what]
    host(folder, "good")
    damage(host(folder, "bad"))
    seen = look(folder)
    assert list(seen.hosts) == ["good"]
    assert list(seen.unusable) == [folder / "bad.page"]
    assert re.search(reason, said(seen))
    assert "\n" not in said(seen)


def test_what_only_looks_like_a_page_is_left_alone(folder: Path) -> None:
    found = host(folder, "a")
    (folder / "b.page").symlink_to(found.path)
    (folder / "c.page").mkdir()
    os.mkfifo(folder / "d.page")
    (folder / "e").symlink_to(folder)
    (folder / ".f.page").touch()
    (folder / "g\n.page").touch()
    (folder / "notes.txt").touch()
    seen = look(folder)
    assert list(seen.hosts) == ["a"]
    assert not {folder / "e" / "a.page", folder / "d.page"} & seen.unusable.keys()


def test_a_folder_that_cannot_be_read_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "cannot be read" in said(look(folder / "none"))
    (folder / "of-root").mkdir()
    host(folder, "a")
    scan = os.scandir

    def refused(path: Path) -> Any:
        if path.name == "of-root":
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    seen = look(folder)
    assert list(seen.hosts) == ["a"]
    assert "of-root cannot be read: Permission denied" in said(seen)


def test_only_so_many_entries_are_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "MOST_ENTRIES", 3)
    for number in range(9):
        (folder / f"{number}.page").touch()
    assert len(list(discovery._pages(folder, {}))) == 3


def test_of_two_hosts_of_one_name_the_second_is_named(folder: Path) -> None:
    host(folder, "a")
    pod = folder / "pod"
    pod.mkdir()
    host(pod, "a")
    seen = look(folder)
    assert seen.hosts["a"].page == folder / "a.page"
    assert "there is a host a at" in said(seen)


def test_two_hosts_on_one_gpu_are_told_apart_from_those_that_are_alone(folder: Path) -> None:
    for name, devices in (("a", ["GPU-0"]), ("b", ["GPU-1", "GPU-0"]), ("c", ["GPU-2"]), ("d", [])):
        host(folder, name, *devices)
    alone = {name: found.alone for name, found in look(folder).hosts.items()}
    assert alone == {"a": False, "b": False, "c": True, "d": True}


IN_A_POD = """
import sys
from pathlib import Path
from tests.unit.node.host.found_hosts import FolderHost
host = FolderHost(Path(sys.argv[1]), "pod")
host.host.seat.start()
print("seated", flush=True)
sys.stdin.read()
"""


def test_a_host_in_a_process_namespace_of_its_own_lives_and_dies_for_all_to_see(
    folder: Path,
) -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine makes no process namespaces")
    pod = subprocess.Popen(
        [*unshare, sys.executable, "-c", IN_A_POD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert pod.stdout
    assert pod.stdout.readline() == b"seated\n"
    page = look(folder).hosts["pod"].page
    with ControlPage.open(page) as seen:
        view = seen.host_view()
        assert view.seat
        assert view.seat.pid_namespace != pid_namespace(), "its number means nothing here"
        assert HostProcess(None).doubt(view.seat) is None
        assert view.believed(time.monotonic_ns()), "a guest may run by it"
        pod.kill()
        pod.communicate()
        until(lambda: not seen.host_view().seated, PATIENCE_S, "the kernel gives up its seat")
    assert look(folder).hosts == {}


# ---- the state machine ----


@pytest.fixture
def found(folder: Path) -> FoundHost:
    host(folder, "a")
    return look(folder).hosts["a"]


def seeing(*hosts: FoundHost) -> FolderScan:
    return FolderScan({each.name: each for each in hosts})


def test_a_host_comes_once_and_leaves_when_it_stays_away(found: FoundHost) -> None:
    book = HostBook(8)
    assert book.step(seeing(found)) == [HostFound(found, 0)]
    assert book.step(seeing(found)) == []
    for _ in range(GONE_LOOKS - 1):
        assert book.step(FolderScan()) == []
    assert book.step(seeing(found)) == [], "a page that could not be read just then"
    acts = [book.step(FolderScan()) for _ in range(GONE_LOOKS)]
    assert acts == [[], [], [HostLost("a")]]
    assert book.step(FolderScan()) == []
    assert book.status() == []


def test_another_life_of_a_host_is_another_host(found: FoundHost) -> None:
    book = HostBook(8)
    book.step(seeing(found))
    for later in (
        replace(found, said=replace(found.said, seated_ns=found.said.seated_ns + 1)),
        replace(found, inode=(0, 1)),
        replace(found, alone=False),
    ):
        assert book.step(seeing(later)) == [HostLost("a"), HostFound(later, 0)]


def test_slots_are_used_again_and_one_host_too_many_waits(found: FoundHost) -> None:
    a, b, c = (replace(found, name=name, page=Path(f"{name}.page")) for name in "abc")
    book = HostBook(2)
    assert book.step(seeing(c, b, a)) == [HostFound(a, 0), HostFound(b, 1)]
    (refused,) = book.step(seeing(c, b, a))
    assert isinstance(refused, PageRefused)
    assert "at_most" in refused.reason
    assert book.step(seeing(a, b, c)) == [], "which is said once"
    assert book.refused == 1, "which stays so for as long as it is"
    gone = [book.step(seeing(b, c)) for _ in range(GONE_LOOKS)][-1]
    assert gone == [HostLost("a"), HostFound(c, 0)]
    assert book.refused == 0


def test_a_reason_is_said_once_and_again_when_it_is_another(found: FoundHost) -> None:
    book, page = HostBook(8), Path("p.page")
    torn, old = (FolderScan({}, {page: reason}) for reason in ("torn", "old"))
    said = [book.step(seen) for seen in (torn, torn, torn, old, old, FolderScan(), old, old)]
    was_torn, was_old = [PageRefused(page, "torn")], [PageRefused(page, "old")]
    assert said == [[], was_torn, [], [], was_old, [], [], was_old]


def test_what_lasts_for_one_look_is_no_refusal(found: FoundHost) -> None:
    # A host's page is there a moment before the host has described itself.
    book = HostBook(8)
    nameless = FolderScan({}, {found.page: "its host describes itself nowhere"})
    assert book.step(nameless) == []
    assert book.refused == 0
    assert book.step(seeing(found)) == [HostFound(found, 0)]
    assert book.step(FolderScan({}, {found.page: "its host describes itself nowhere"})) == []


def test_a_host_that_could_not_be_taken_in_comes_again(found: FoundHost) -> None:
    book = HostBook(8)
    book.step(seeing(found))
    assert book.untaken(found, "has a daemon") == [PageRefused(found.page, "has a daemon")]
    assert book.refused == 1
    assert book.step(seeing(found)) == [HostFound(found, 0)]
    assert book.refused == 0
    assert book.untaken(found, "has a daemon") == [], "which is said once"
    book.step(FolderScan())
    book.step(seeing(found))
    assert book.untaken(found, "has a daemon") == [PageRefused(found.page, "has a daemon")]


def test_a_folder_on_a_disk_has_no_hosts_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor.control_page.page, "file_system_type", lambda _: 0xEF53)
    assert "on a disk" in look(tmp_path).unusable[tmp_path]
    finding = doctor._page(HostConfig(page=tmp_path / "h.page", ttft_target_s=1, tpot_target_s=1))
    assert "WRONG" in str(finding)
    assert "below /dev/shm" in finding.do
