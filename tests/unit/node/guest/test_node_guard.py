"""Whatever a page holds or a disk takes, the guard goes on, and grants by what makes sense."""

import errno
import os
import random
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor import ControlPage, GrantMode, GuardConfig, GuestState, HostState
from executor.control_page.latency_ring import LANE_BYTES, RING_BYTES, SLOT_BYTES
from executor.control_page.page import PAGE_BYTES
from executor.control_page.seqlock_records import HEADER_BYTES, PageSection, SeatState
from rose.logs.eventlog import EventLog, JsonlLog
from rose.logs.rotating_jsonl import LogThread
from rose.node.guest.guard import SAMPLE_EVERY_TICKS, DutyMeter, GuardThread
from tests.fakes.guarded_guest import LeasedGuest, guard_thread
from tests.harness.examples import times
from tests.harness.seated_host import SeatedHost
from tests.harness.waiting import PATIENCE_S

# ---- bytes of a page ----


RING_AT = PAGE_BYTES - RING_BYTES
EDGES = (0, 1, -1, 2**31, 2**62 - 1, 2**62, 2**63 - 1, -(2**63))


class GuardRig:
    def __init__(self, folder: Path) -> None:
        self.page = ControlPage.create(folder / "page")
        self.now_ns = 10**12
        self.host = SeatedHost(self.page, lambda: self.now_ns)
        self.log = EventLog(folder, "n")
        self.guard = guard_thread(
            self.page,
            folder,
            config=GuardConfig(512, 64, kv_base_bytes=1 << 20),
            events=self.log,
            clock_ns=lambda: self.now_ns,
        )
        self.watch = self.guard._watch

    def scribble(self, at: int, raw: bytes) -> None:
        with self.page.path.open("r+b") as file:
            file.seek(at)
            file.write(raw)

    def ticks(self) -> GrantMode:
        """Tick until everything on the page was read."""
        for _ in range(SAMPLE_EVERY_TICKS):
            self.now_ns += 20_000_000
            grant = self.guard.tick()
        return grant.mode

    def reset(self) -> None:
        self.page.guest.write(GuestState(granules_total=9, granule_bytes=1 << 16))
        self.host.tell()

    def close(self) -> None:
        self.host.close()
        self.page.close()
        self.log.close()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardRig]:
    made = GuardRig(tmp_path_factory.mktemp("hostile"))
    yield made
    made.close()


def sections(page: ControlPage) -> dict[str, PageSection]:  # type: ignore[type-arg]
    return {"host": page.host, "guest": page.guest, "grant": page.grant, "seat": page.seat}


def test_a_guard_without_a_scheduler_is_cut_off_from_none(rig: GuardRig) -> None:
    rig.guard._caps.stale_after_s = 0.0
    rig.reset()
    assert rig.ticks() is GrantMode.RUN
    rig.guard._caps.lost()
    assert rig.ticks() is GrantMode.FREEZE
    rig.guard._caps.heard()


@pytest.mark.parametrize("name", ["host", "seat", "guest", "grant"])
def test_random_bytes_in_a_section_end_no_guard_and_freeze_where_they_are_the_hosts(
    rig: GuardRig, name: str
) -> None:
    chance = random.Random(7)
    section = sections(rig.page)[name]
    for _ in range(50):
        rig.reset()
        assert rig.ticks() is GrantMode.RUN
        rig.scribble(section.start - HEADER_BYTES, chance.randbytes(HEADER_BYTES + 64))
        mode = rig.ticks()
        assert name not in ("host", "seat") or mode is GrantMode.FREEZE


def test_random_bytes_in_the_ring_are_counted_as_lost(rig: GuardRig) -> None:
    chance = random.Random(9)
    for _ in range(20):
        rig.reset()
        lost = rig.watch.lost
        lane = RING_AT + chance.randrange(8) * LANE_BYTES
        rig.scribble(lane, chance.randbytes(8))
        rig.scribble(lane + 64, chance.randbytes(20 * SLOT_BYTES))
        assert rig.ticks() is GrantMode.RUN, "latencies are nobody's right to run"
        assert rig.watch.lost > lost


NUMBERS = st.one_of(st.sampled_from(EDGES), st.integers(-(2**63), 2**63 - 1))


@settings(max_examples=times(1.5))
@given(st.sampled_from(["host", "guest", "seat"]), st.lists(NUMBERS, min_size=20, max_size=20))
def test_whole_records_of_any_numbers_end_no_guard(
    rig: GuardRig, name: str, numbers: list[int]
) -> None:
    kinds: dict[str, type[HostState | GuestState | SeatState]] = {
        "host": HostState, "guest": GuestState, "seat": SeatState,
    }  # fmt: skip
    kind = kinds[name]
    rig.reset()
    raw = struct.pack("=20q", *numbers)[: kind.LAYOUT.size]
    # Bytes that pass for a whole record.
    sections(rig.page)[name].write_packed(raw)
    mode = rig.ticks()
    rig.reset()
    if name == "host" and min(numbers[1:12]) < 0:
        assert mode is GrantMode.FREEZE


@given(st.integers(0, 2**64 - 1), st.lists(NUMBERS, min_size=6, max_size=6), st.binary(max_size=80))
def test_whole_latencies_of_any_numbers_end_no_guard(
    rig: GuardRig, total: int, numbers: list[int], name: bytes
) -> None:
    rig.reset()
    number = total - 1 if total else 0
    sequence = (2 * number + 2) % 2**64
    payload = struct.pack("=6q80s", *numbers, name)
    record = struct.pack("=QQ", sequence, zlib.crc32(payload, sequence & 0xFFFFFFFF)) + payload
    rig.scribble(RING_AT, struct.pack("=Q", total))
    rig.scribble(RING_AT + 64 + number % 512 * SLOT_BYTES, record)
    rig.ticks()


def test_a_file_that_goes_away_under_the_guard_freezes(tmp_path: Path) -> None:
    rig = GuardRig(tmp_path)
    rig.reset()
    assert rig.ticks() is GrantMode.RUN
    rig.page.path.rename(tmp_path / "away")
    assert rig.ticks() is GrantMode.FREEZE
    rig.close()


# ---- duty ----


@pytest.mark.parametrize(
    ("guest_at", "duty"),
    [
        (lambda tick: GuestState(step_seq=tick, yielded_ns=tick * 50_000_000), 0.5),
        (lambda _: GuestState(step_seq=7), 0.0),
        (lambda _: None, 0.0),
    ],
    ids=["held back half of the time", "without a step", "no guest"],
)
def test_duty_is_the_share_of_time_in_which_a_guest_may_step(
    guest_at: Callable[[int], GuestState | None], duty: float
) -> None:
    meter = DutyMeter()
    for tick in range(11):
        meter.update(tick * 100_000_000, guest_at(tick))
    assert meter.value == pytest.approx(duty)


# ---- a disk that hangs, a fault, no descriptors ----


def guard_of(folder: Path, guest: LeasedGuest | None = None, **options: Any) -> GuardThread:
    """A guard with a host that is idle and a lease that lasts."""
    page = ControlPage.create(folder / "page")
    page.host.write(HostState(heartbeat_ns=time.monotonic_ns()))
    return guard_thread(
        page, folder, guest, config=GuardConfig(64, 8), host_pid=os.getpid(), **options
    )


def test_a_disk_that_hangs_delays_no_grant(tmp_path: Path) -> None:
    """Whatever the guard writes waits in a queue; what has no room there is dropped."""
    hangs, thread = threading.Event(), LogThread("test", waiting=4)
    thread.put(lambda: hangs.wait(60))
    samples = JsonlLog(tmp_path / "guest.jsonl", thread=thread)
    guard = guard_of(tmp_path, thread=thread, samples=samples)
    guard.start()
    try:
        until_s = time.monotonic() + PATIENCE_S
        while samples.dropped < 7 and time.monotonic() < until_s:
            time.sleep(0.02)
        assert samples.dropped >= 7
        assert guard.granted > 25, "five grants for each sample, all through the outage"
    finally:
        guard.stop()
        hangs.set()
        thread.close(PATIENCE_S)


def test_a_guard_that_breaks_says_why(tmp_path: Path) -> None:
    def breaks() -> int:
        raise KeyError("a fault of the program")

    broken = threading.Event()
    guard = guard_of(tmp_path, guest=LeasedGuest("g0", breaks, on_broken=broken.set))
    guard.start()
    assert broken.wait(PATIENCE_S)
    guard.stop()
    assert guard.broke.startswith("KeyError: 'a fault of the program', test_node_guard.py:")
    assert '"event":"guard_broke"' in (tmp_path / "events-n0.jsonl").read_text()


def test_a_guard_without_descriptors_goes_on_once_it_has_some(tmp_path: Path) -> None:
    looks = iter([1, OSError(errno.EMFILE, "Too many open files")])
    again = threading.Event()

    def lease_epoch() -> int:
        if isinstance(look := next(looks, None), OSError):
            raise look
        if look is None:
            again.set()
        return 1

    broken = threading.Event()
    guard = guard_of(tmp_path, guest=LeasedGuest("g0", lease_epoch, on_broken=broken.set))
    guard.start()
    assert again.wait(PATIENCE_S)
    guard.stop()
    assert not broken.is_set()
    assert '"event":"guard_held_up"' in (tmp_path / "events-n0.jsonl").read_text()
