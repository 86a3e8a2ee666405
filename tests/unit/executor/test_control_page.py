"""The control page: who may map it, torn writes, dead writers, concurrent readers."""

import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

import executor.control_page.page
from executor import ControlPage, Grant, GrantMode, HostState, LatencyRecord, PageError
from executor.control_page.latency_ring import CAPACITY, LANES, RING_BYTES, SLOT_BYTES, START
from executor.control_page.page import (
    IN_MEMORY,
    LAYOUT_VERSION,
    PAGE_BYTES,
    file_system_type,
    on_disk,
)
from executor.errors import PageUnreadable

HOST_AT = 64


@pytest.fixture
def page(tmp_path: Path) -> Iterator[ControlPage]:
    with ControlPage.create(tmp_path / "page") as made:
        yield made


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


def test_a_page_is_private_and_starts_unwritten(page: ControlPage) -> None:
    assert page.path.stat().st_mode & 0o777 == 0o600
    assert page.owner_pid == os.getpid()
    assert (page.host.read(), page.grant.read(), page.guest.read()) == (None, None, None)
    assert page.latency.drain() == ([], START, 0)
    assert [p.name for p in page.path.parent.iterdir()] == ["page"]


def test_another_mapping_reads_what_the_writer_wrote(page: ControlPage) -> None:
    with ControlPage.open(page.path) as other:
        for step in range(5):
            page.host.write(HostState(step_seq=step, running=step))
            assert other.host.read() == HostState(step_seq=step, running=step)
        other.grant.write(Grant(GrantMode.RUN, reason="leased"))
        assert page.grant.read() == Grant(GrantMode.RUN, reason="leased")


def test_a_page_is_never_replaced_under_its_users(page: ControlPage) -> None:
    with pytest.raises(PageError, match="exists"):
        ControlPage.create(page.path)
    page.host.write(HostState(step_seq=3))
    with ControlPage.ensure(page.path) as same:
        assert same.host.read() == HostState(step_seq=3)


def test_whoever_starts_first_makes_the_page(tmp_path: Path) -> None:
    with ControlPage.ensure(tmp_path / "p") as first, ControlPage.ensure(tmp_path / "p") as second:
        first.host.write(HostState(step_seq=1))
        assert second.host.read() == HostState(step_seq=1)


@pytest.mark.parametrize(
    ("offset", "raw", "message"),
    [
        (0, b"SOMETHNG", "not a control page"),
        (
            8,
            struct.pack("=I", LAYOUT_VERSION + 1),
            f"this build speaks {LAYOUT_VERSION}",
        ),
        (32, b"another boot id!", "before the last boot"),
    ],
)
def test_a_foreign_page_is_refused(
    page: ControlPage, offset: int, raw: bytes, message: str
) -> None:
    patch(page.path, offset, raw)
    with pytest.raises(PageError, match=message):
        ControlPage.open(page.path)


def test_a_page_that_others_can_open_is_refused(page: ControlPage) -> None:
    page.path.chmod(0o640)
    with pytest.raises(PageError, match=r"mode 640.*chmod 600"):
        ControlPage.open(page.path)


def test_a_page_is_shared_with_the_group_that_is_named_and_nobody_else(tmp_path: Path) -> None:
    group = str(os.getegid())
    with ControlPage.ensure(tmp_path / "p", group) as page:
        assert page.path.stat().st_mode & 0o777 == 0o660
        ControlPage.ensure(page.path, group).close()
        with pytest.raises(PageError, match="name its group"):
            ControlPage.open(page.path)
        with pytest.raises(PageError, match="open to other users"):
            ControlPage.open(page.path, str(os.getegid() + 1))
        page.path.chmod(0o666)
        with pytest.raises(PageError, match="open to other users"):
            ControlPage.open(page.path, group)


def test_a_group_that_nobody_knows_is_named(tmp_path: Path) -> None:
    with pytest.raises(PageError, match="there is no group no-such-group"):
        ControlPage.ensure(tmp_path / "p", "no-such-group")
    assert list(tmp_path.iterdir()) == []


def test_missing_short_and_linked_pages_are_refused(page: ControlPage, tmp_path: Path) -> None:
    with pytest.raises(PageError, match="No such file"):
        ControlPage.open(tmp_path / "none")
    with pytest.raises(PageError, match="cannot create"):
        ControlPage.ensure(tmp_path / "no" / "folder")
    (tmp_path / "link").symlink_to(page.path)
    with pytest.raises(PageError, match="cannot open"):
        ControlPage.open(tmp_path / "link")
    os.truncate(page.path, PAGE_BYTES - 1)
    with pytest.raises(PageError, match="cut short"):
        ControlPage.open(page.path)


def test_a_torn_write_is_unreadable_until_the_next_writer(page: ControlPage) -> None:
    page.host.write(HostState(step_seq=1))
    tear_host(page)
    with pytest.raises(PageUnreadable, match="HostState section stays torn"):
        page.host.read()
    assert page.host.peek() is None
    with ControlPage.open(page.path) as successor:
        successor.host.write(HostState(step_seq=2))
    assert page.host.read() == HostState(step_seq=2)


def test_the_first_write_ever_torn_is_not_taken_for_unwritten(page: ControlPage) -> None:
    tear_host(page)
    assert page.host.peek() is None
    page.host.write(HostState(step_seq=9))
    assert page.host.read() == HostState(step_seq=9)


def test_damage_under_a_whole_sequence_is_caught_by_the_crc(page: ControlPage) -> None:
    page.host.write(HostState(step_seq=1))
    patch(page.path, HOST_AT + 16, b"\x05")
    assert page.host.peek() is None


def test_a_mode_of_a_later_version_is_unreadable(page: ControlPage) -> None:
    object.__setattr__(grant := Grant(), "mode", 42)
    page.grant.write(grant)
    assert page.grant.peek() is None


def test_the_ring_hands_out_each_record_once(page: ControlPage) -> None:
    lane = page.take_lane()
    for number in range(4):
        lane.append(record(number))
    first = page.latency.drain()
    assert [r.request_id for r in first.records] == ["r0", "r1", "r2", "r3"]
    for number in range(4, 10):
        lane.append(record(number))
    rest = page.latency.drain(first.cursor)
    assert [r.request_id for r in rest.records] == [f"r{n}" for n in range(4, 10)]
    assert page.latency.drain(rest.cursor) == ([], (10, *START[1:]), 0)
    assert page.latency.cursor == rest.cursor


def test_the_ring_says_how_many_it_overwrote(page: ControlPage) -> None:
    lane = page.take_lane()
    for number in range(CAPACITY + 7):
        lane.append(record(number))
    drained = page.latency.drain((2, *START[1:]))
    assert (drained.lost, drained.cursor[0]) == (5, CAPACITY + 7)
    assert [drained.records[0].request_id, len(drained.records)] == ["r7", CAPACITY]


def test_a_new_ring_writer_goes_on_where_a_dead_one_stopped(page: ControlPage) -> None:
    lane = page.take_lane()
    for number in range(3):
        lane.append(record(number))
    lane.close()
    ring_at = PAGE_BYTES - RING_BYTES
    patch(page.path, ring_at, struct.pack("=Q", 2))  # Died between slot 2 and the counter, …
    patch(page.path, ring_at + 64 + 3 * SLOT_BYTES, struct.pack("=Q", 7))  # … or inside slot 3.
    with ControlPage.open(page.path) as successor:
        successor.take_lane().append(record(3))
        assert successor.latency.cursor == (4, *START[1:])
    assert [r.request_id for r in page.latency.drain().records] == ["r0", "r1", "r2", "r3"]


def test_a_cursor_of_an_earlier_page_starts_over(page: ControlPage) -> None:
    page.take_lane().append(record(0))
    assert page.latency.drain((500,) * LANES).records == [record(0)]


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
    ("offset", "raw"), [(20, b"zzz"), (8, b"\0\0\0\0"), (16 + 8, struct.pack("=q", -1))]
)
def test_a_record_that_is_not_whole_is_skipped_and_counted(
    page: ControlPage, offset: int, raw: bytes
) -> None:
    lane = page.take_lane()
    for number in range(3):
        lane.append(record(number))
    patch(page.path, PAGE_BYTES - RING_BYTES + 64 + SLOT_BYTES + offset, raw)
    drained = page.latency.drain()
    assert [r.request_id for r in drained.records] == ["r0", "r2"]
    assert drained.lost == 1


def test_a_record_of_impossible_numbers_is_skipped_and_counted(page: ControlPage) -> None:
    lane = page.take_lane()
    lane.append(replace(record(0), ttft_ns=-1))
    lane.append(record(1))
    drained = page.latency.drain()
    assert (drained.records, drained.lost) == ([record(1)], 1)


WRITER = """
import sys
from executor import ControlPage, HostState
page = ControlPage.open(sys.argv[1])
print("ready", flush=True)
step = 0
while True:
    step += 1
    page.host.write(HostState(*[step] * 12))
"""


def test_readers_never_see_half_a_write_of_another_process(page: ControlPage) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(page.path)], stdout=subprocess.PIPE
    )
    try:
        assert writer.stdout is not None
        writer.stdout.readline()
        seen = set()
        until_s = time.monotonic() + 0.2
        while time.monotonic() < until_s:
            state = page.host.peek()
            if state is not None:
                seen.add(state.step_seq)
                assert state.running == state.busy_ns == state.heartbeat_ns == state.step_seq
    finally:
        writer.kill()
        writer.wait()
        if writer.stdout is not None:
            writer.stdout.close()
    assert len(seen) > 1
    page.host.write(HostState(step_seq=5))
    assert page.host.read() == HostState(step_seq=5)


def test_a_page_owns_all_its_blocks_from_the_start(page: ControlPage) -> None:
    """A write to a sparse mapping on a full disk ends the writer (SIGBUS): the host, at worst."""
    assert page.path.stat().st_blocks * 512 >= PAGE_BYTES


def test_a_full_disk_makes_no_page_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PageError, match="No space left"):
        ControlPage.create(tmp_path / "page")
    assert list(tmp_path.iterdir()) == []


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


def test_a_page_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ControlPage.create(tmp_path / "page").close()
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(PageError, match=f"belongs to uid {own}"):
        ControlPage.open(tmp_path / "page")
