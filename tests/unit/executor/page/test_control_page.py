"""The control page: who may map it, torn writes, killed writers, and the ring of latencies."""

import logging
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

import executor.control_page.page
from executor import (
    ControlPage,
    Grant,
    GrantMode,
    GuestState,
    HostState,
    LatencyRecord,
    PageError,
    PageUnreadable,
)
from executor.control_page.latency_ring import CAPACITY, LANES, RING_BYTES, SLOT_BYTES, START
from executor.control_page.page import (
    IN_MEMORY,
    LAYOUT_VERSION,
    PAGE_BYTES,
    file_system_type,
    on_disk,
)
from tests.harness.examples import times

HOST_AT = 64
RING_AT = PAGE_BYTES - RING_BYTES
KILLS = times(1)
SEED = 20_260
log = logging.getLogger(__name__)


WRITER = """
import sys
from executor import ControlPage, Grant, GuestState, HostState, LatencyRecord
page, n = ControlPage.open(sys.argv[1]), int(sys.argv[2])
lane = page.take_lane()
print("ready", flush=True)
while True:
    n += 1
    page.host.write(HostState(*[n] * 12))
    page.grant.write(Grant(1, n, n, n, float(n), n, n, n, str(n)))
    page.guest.write(GuestState(*[n] * 14, str(n)))
    lane.append(LatencyRecord(n, n, n, n, n, n, str(n)))
"""


def patch(path: Path, offset: int, raw: bytes) -> None:
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, raw, offset)
    os.close(fd)


def tear_host(page: ControlPage) -> None:
    """Leave the host section as a writer killed in the middle of a write does."""
    patch(page.path, HOST_AT, struct.pack("=Q", page.host.sequence + 1))
    patch(page.path, HOST_AT + 20, b"\xff" * 30)


def record(number: int) -> LatencyRecord:
    return LatencyRecord(number, 2, 3, 4, 5, 6, f"r{number}")


def ids(records: Iterable[LatencyRecord]) -> list[str]:
    return [record.request_id for record in records]


def test_a_page_is_private_and_starts_unwritten(page: ControlPage) -> None:
    assert page.path.stat().st_mode & 0o777 == 0o600
    assert page.owner_pid == os.getpid()
    assert (page.host.read(), page.grant.read(), page.guest.read()) == (None, None, None)
    assert page.latency.drain() == ([], START, 0)
    assert [p.name for p in page.path.parent.iterdir()] == ["page"]


def test_another_mapping_reads_what_the_writer_wrote(page: ControlPage, tmp_path: Path) -> None:
    with pytest.raises(PageError, match="exists"):
        ControlPage.create(page.path)
    for path in (page.path, tmp_path / "made by whoever starts first"):
        with ControlPage.ensure(path) as one, ControlPage.ensure(path) as other:
            for step in range(5):
                one.host.write(HostState(step_seq=step, running=step))
                assert other.host.read() == HostState(step_seq=step, running=step)
            other.grant.write(Grant(GrantMode.RUN, reason="leased"))
            assert one.grant.read() == Grant(GrantMode.RUN, reason="leased")
    assert page.host.read() == HostState(step_seq=4, running=4), "a page is never replaced"


@pytest.mark.parametrize(
    ("offset", "raw", "message"),
    [
        (0, b"SOMETHNG", "not a control page"),
        (8, struct.pack("=I", LAYOUT_VERSION + 1), f"this build speaks {LAYOUT_VERSION}"),
        (32, b"another boot id!", "before the last boot"),
    ],
)
def test_a_foreign_page_is_refused(
    page: ControlPage, offset: int, raw: bytes, message: str
) -> None:
    patch(page.path, offset, raw)
    with pytest.raises(PageError, match=message):
        ControlPage.open(page.path)


def test_a_page_is_shared_with_the_group_that_is_named_and_nobody_else(tmp_path: Path) -> None:
    group, other = str(os.getegid()), str(os.getegid() + 1)
    with ControlPage.ensure(tmp_path / "p", group) as page:
        assert page.path.stat().st_mode & 0o777 == 0o660
        ControlPage.ensure(page.path, group).close()
        for mode, named, message in (
            (0o660, "", "name its group"),
            (0o660, other, "open to other users"),
            (0o666, group, "open to other users"),
            (0o640, "", r"mode 640.*chmod 600"),
        ):
            page.path.chmod(mode)
            with pytest.raises(PageError, match=message):
                ControlPage.open(page.path, named)


def test_a_page_that_cannot_be_had_is_refused_and_none_is_left(
    page: ControlPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "link").symlink_to(page.path)
    (tmp_path / "empty").mkdir()
    for path, group, message in (
        ("none/page", "", "cannot create"),
        ("link", "", "cannot open"),
        ("empty/page", "no-such-group", "there is no group no-such-group"),
    ):
        with pytest.raises(PageError, match=message):
            ControlPage.ensure(tmp_path / path, group)
    with pytest.raises(PageError, match="No such file"):
        ControlPage.open(tmp_path / "none")
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(PageError, match="No space left"):
            ControlPage.create(tmp_path / "empty" / "page")
    assert list((tmp_path / "empty").iterdir()) == []
    own = os.geteuid()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: own + 1)
        with pytest.raises(PageError, match=f"belongs to uid {own}"):
            ControlPage.open(page.path)
    os.truncate(page.path, PAGE_BYTES - 1)
    with pytest.raises(PageError, match="cut short"):
        ControlPage.open(page.path)


@pytest.mark.parametrize("before", [None, 1], ids=["the first write ever", "a later one"])
def test_a_torn_write_is_unreadable_until_the_next_writer(
    page: ControlPage, before: int | None
) -> None:
    if before is not None:
        page.host.write(HostState(step_seq=before))
    tear_host(page)
    with pytest.raises(PageUnreadable, match="HostState section stays torn"):
        page.host.read()
    assert page.host.peek() is None
    with ControlPage.open(page.path) as successor:
        successor.host.write(HostState(step_seq=2))
    assert page.host.read() == HostState(step_seq=2)


def test_damage_under_a_whole_sequence_and_a_later_version_are_unreadable(
    page: ControlPage,
) -> None:
    page.host.write(HostState(step_seq=1))
    patch(page.path, HOST_AT + 16, b"\x05")
    assert page.host.peek() is None, "the CRC catches it"
    object.__setattr__(grant := Grant(), "mode", 42)
    page.grant.write(grant)
    assert page.grant.peek() is None


@pytest.mark.parametrize("at", range(0, HostState.LAYOUT.size + 16, 8))
def test_a_write_cut_off_at_any_word_is_unreadable_and_then_healed(
    page: ControlPage, at: int
) -> None:
    """Every moment of a write, one by one: what was not reached still holds the old bytes."""
    page.host.write(HostState(*[7] * 12))
    with page.path.open("r+b") as file:
        file.seek(64)
        before = file.read(16 + HostState.LAYOUT.size)
        page.host.write(HostState(*[8] * 12))
        file.seek(64)
        after = file.read(len(before))
        sequence = struct.unpack_from("=Q", before)[0] + 1
        halfway = struct.pack("=Q", sequence) + after[8 : 8 + at] + before[8 + at :]
        file.seek(64)
        file.write(halfway[: len(before)])
    assert page.host.peek() is None
    page.host.write(HostState(*[9] * 12))
    assert page.host.read() == HostState(9, True, *[9] * 10)


def test_the_ring_hands_out_each_record_once_and_says_how_many_it_overwrote(
    page: ControlPage,
) -> None:
    lane = page.take_lane()
    for number in range(4):
        lane.append(record(number))
    first = page.latency.drain()
    assert ids(first.records) == ["r0", "r1", "r2", "r3"]
    for number in range(4, 10):
        lane.append(record(number))
    rest = page.latency.drain(first.cursor)
    assert ids(rest.records) == [f"r{n}" for n in range(4, 10)]
    assert page.latency.drain(rest.cursor) == ([], (10, *START[1:]), 0)
    assert page.latency.cursor == rest.cursor
    assert len(page.latency.drain((500,) * LANES).records) == 10, "a cursor of an earlier page"
    for number in range(10, CAPACITY + 7):
        lane.append(record(number))
    drained = page.latency.drain((2, *START[1:]))
    assert (drained.lost, drained.cursor[0]) == (5, CAPACITY + 7)
    assert ids(drained.records) == [f"r{n}" for n in range(7, CAPACITY + 7)]


def test_a_new_ring_writer_goes_on_where_a_dead_one_stopped(page: ControlPage) -> None:
    lane = page.take_lane()
    for number in range(3):
        lane.append(record(number))
    lane.close()
    patch(page.path, RING_AT, struct.pack("=Q", 2))  # Died between slot 2 and the counter, …
    patch(page.path, RING_AT + 64 + 3 * SLOT_BYTES, struct.pack("=Q", 7))  # … or inside slot 3.
    with ControlPage.open(page.path) as successor:
        successor.take_lane().append(record(3))
        assert successor.latency.cursor == (4, *START[1:])
    assert ids(page.latency.drain().records) == ["r0", "r1", "r2", "r3"]


def test_several_api_processes_write_into_lanes_of_their_own(page: ControlPage) -> None:
    lanes = [page.take_lane() for _ in range(LANES)]
    for number in range(3 * LANES):
        lanes[number % LANES].append(record(number))
    drained = page.latency.drain()
    assert {r.request_id for r in drained.records} == {f"r{n}" for n in range(3 * LANES)}
    assert drained.lost == 0
    with pytest.raises(PageError, match=f"latencies of {LANES} processes, no more"):
        page.take_lane()
    lanes[5].close()
    page.take_lane().append(record(99))
    assert page.latency.drain(drained.cursor).records == [record(99)]


@pytest.mark.parametrize(
    ("offset", "raw"),
    [
        (20, b"zzz"),
        (8, b"\0\0\0\0"),
        (16 + 8, struct.pack("=q", -1)),
        (0, struct.pack("=Q", 2 * CAPACITY + 3) + b"\xff" * 40),
    ],
    ids=["text", "crc", "an impossible number", "cut off"],
)
def test_a_record_that_is_not_whole_is_skipped_and_counted(
    page: ControlPage, offset: int, raw: bytes
) -> None:
    lane = page.take_lane()
    for number in range(3):
        lane.append(record(number))
    patch(page.path, RING_AT + 64 + SLOT_BYTES + offset, raw)
    lane.append(replace(record(3), ttft_ns=-1))
    lane.append(record(4))
    drained = page.latency.drain()
    assert (ids(drained.records), drained.lost) == (["r0", "r2", "r4"], 2)


def test_a_page_owns_all_its_blocks_from_the_start(page: ControlPage) -> None:
    """A write to a sparse mapping on a full disk ends the writer (SIGBUS): the host, at worst."""
    assert page.path.stat().st_blocks * 512 >= PAGE_BYTES


KINDS = {
    "tmpfs": (0x01021994, True),
    "ramfs": (0x858458F6, True),
    "ext4": (0xEF53, False),
    "xfs": (0x58465342, False),
    "nfs": (0x6969, False),
    "overlay": (0x794C7630, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_taken_in_memory_alone(
    page: ControlPage, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    magic, taken = KINDS[kind]
    assert file_system_type(page.path) in IN_MEMORY, "folders of tests are in memory"
    monkeypatch.setattr(executor.control_page.page, "file_system_type", lambda _: magic)
    for use in (ControlPage.open, ControlPage.ensure):
        with nullcontext() if taken else pytest.raises(PageError, match="below /dev/shm"):
            use(page.path).close()
    fresh = page.path.with_name("fresh")
    with nullcontext() if taken else pytest.raises(PageError, match="is on a disk"):
        ControlPage.create(fresh).close()
    assert fresh.exists() == taken
    assert on_disk(fresh / "not" / "there") != taken


def test_a_page_that_was_deleted_and_made_anew_is_another_page(page: ControlPage) -> None:
    """A host that still writes to the deleted one says nothing on the new one: that freezes."""
    page.path.unlink()
    with ControlPage.ensure(page.path) as fresh:
        page.host.write(HostState(step_seq=5))
        assert fresh.host.read() is None


class Checker:
    """Reads everything and asserts that each record is whole.

    Each writer writes records whose fields all say the same number, as fast as it can, and dies by
    SIGKILL at a random moment. Readers read all the time, and the next writer takes over.
    """

    def __init__(self, page: ControlPage) -> None:
        self.page = page
        self.cursor = START
        self.newest = 0
        self.unreadable = 0
        self.records = 0

    def look(self) -> None:
        for read in (self._host, self._grant, self._guest):
            try:
                read()
            except PageUnreadable:
                self.unreadable += 1
        drained = self.page.latency.drain(self.cursor)
        self.cursor = drained.cursor
        self.records += len(drained.records)
        for record in drained.records:
            assert record.request_id == str(record.ttft_ns)
            assert record.ttft_ns == record.finished_ns == record.output_tokens

    def _host(self) -> None:
        host = self.page.host.read()
        if host is not None:
            n = host.step_seq
            assert host == HostState(n, bool(n), *[n] * 10)
            self.newest = max(self.newest, n)

    def _grant(self) -> None:
        grant = self.page.grant.read()
        if grant is not None:
            n = grant.epoch
            assert grant == Grant(grant.mode, n, n, n, float(n), n, n, n, str(n))

    def _guest(self) -> None:
        guest = self.page.guest.read()
        if guest is not None:
            n = guest.step_seq
            assert guest == GuestState(n, bool(n), *[n] * 12, str(n))


def torn_sections(page: ControlPage) -> int:
    return sum(section.sequence & 1 for section in (page.host, page.grant, page.guest))


@contextmanager
def writing(page: ControlPage, first: int) -> Iterator[int]:
    """A writer at work; killed at the end of the block."""
    argv = [sys.executable, "-c", WRITER, str(page.path), str(first)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as writer:
        assert writer.stdout
        try:
            writer.stdout.readline()
            yield writer.pid
        finally:
            os.kill(writer.pid, signal.SIGKILL)


def stop_in_a_write(pid: int, page: ControlPage, chance: random.Random) -> None:
    """Chance alone hits a write in a few percent of all kills."""
    for _ in range(5_000):
        # Stopped again before it came to run, it would stand where it stood.
        time.sleep(chance.uniform(0, 2e-4))
        os.kill(pid, signal.SIGSTOP)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0)
        if torn_sections(page):
            return
        os.kill(pid, signal.SIGCONT)
    raise AssertionError("never stopped in the middle of a write")


def test_no_reader_ever_sees_half_a_record_of_a_killed_writer(page: ControlPage) -> None:
    chance, checker, torn = random.Random(SEED), Checker(page), 0
    for life in range(KILLS):
        with writing(page, life * 1_000_000) as pid:
            until_s = time.monotonic() + chance.uniform(0.0, 0.01)
            while time.monotonic() < until_s:
                checker.look()
            if life % 10 == 0:
                stop_in_a_write(pid, page, chance)
        torn += torn_sections(page)
        checker.look()
    log.info("%d kills, %d sections left torn, %d ring records", KILLS, torn, checker.records)
    assert checker.newest >= KILLS // 2 * 1_000_000, "writers took over from those before them"
    assert torn >= KILLS // 10, "some were killed in the middle of a write"
    page.host.write(HostState(step_seq=5))
    assert page.host.read() == HostState(step_seq=5)
