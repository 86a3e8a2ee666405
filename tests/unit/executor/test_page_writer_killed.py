"""Writers of every section are killed in the middle of their writes; no reader sees half a record.

Each writer writes records whose fields all say the same number, as fast as it can, and dies by
SIGKILL at a random moment. Readers read all the time, and the next writer takes over.
"""

import logging
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from executor import ControlPage, Grant, GuestState, HostState, PageUnreadable
from executor.control_page.latency_ring import CAPACITY, RING_BYTES, SLOT_BYTES, START
from executor.control_page.page import PAGE_BYTES
from tests.harness.examples import times

log = logging.getLogger(__name__)
KILLS = times(1)
SEED = 20_260
SLOT_AT = PAGE_BYTES - RING_BYTES + 64

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


class Checker:
    """Reads everything and asserts that each record is whole."""

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


@pytest.fixture
def page(tmp_path: Path) -> Iterator[ControlPage]:
    with ControlPage.create(tmp_path / "page") as made:
        yield made


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


def test_a_ring_slot_cut_off_is_lost_and_nothing_else(page: ControlPage) -> None:
    from executor import LatencyRecord

    lane = page.take_lane()
    for n in range(CAPACITY + 3):
        lane.append(LatencyRecord(n, n, n, n, n, n, str(n)))
    with page.path.open("r+b") as file:
        file.seek(SLOT_AT + 5 * SLOT_BYTES)
        file.write(struct.pack("=Q", 2 * (CAPACITY + 5) + 1) + b"\xff" * 40)
    drained = page.latency.drain((3, *START[1:]))
    assert drained.lost == 1
    assert "5" not in {record.request_id for record in drained.records}
    assert len(drained.records) == CAPACITY - 1
