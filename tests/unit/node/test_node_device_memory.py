"""A guest's memory of a GPU: by the driver, else no more is freed than was measured."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from executor import GuestState
from rose.node.guest import memory_gauges
from rose.node.guest.memory_gauges import DRIVER, PAGE, DeviceMemory
from rose.nvml import Client
from tests.fakes.nvml import CARD, StandInReader

MIB, GIB = 1 << 20, 1 << 30
WEIGHTS, KV = 16 * GIB, 8 * GIB


@dataclass
class Rig:
    """A group of one process, and what driver and page say of it."""

    process: subprocess.Popen[bytes]
    reader: StandInReader = field(default_factory=lambda: StandInReader(CARD))
    state: GuestState | None = field(default_factory=lambda: GuestState(bytes_mapped=KV))

    def __post_init__(self) -> None:
        self.gauge = DeviceMemory(self.reader, CARD, lambda: self.process.pid, lambda: self.state)

    def lists(self, *clients: tuple[int, int | None]) -> None:
        self.reader.listed = tuple(Client(pid, held) for pid, held in clients)

    def maps(self, amount: int) -> None:
        assert self.state is not None
        self.state = replace(self.state, bytes_mapped=amount)

    def frees(self, amount: int) -> None:
        assert self.reader.free is not None
        self.reader.free += amount

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def held(self) -> int | None:
        return self.gauge.held_bytes()


@pytest.fixture
def rig() -> Iterator[Rig]:
    program = [sys.executable, "-S", "-c", "print(flush=True); input()"]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
    ) as process:
        assert process.stdout
        process.stdout.readline()
        yield Rig(process)
        process.kill()


@pytest.fixture
def contained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_gauges, "in_first_pid_namespace", lambda: False)


@pytest.fixture
def on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_gauges, "in_first_pid_namespace", lambda: True)


@pytest.mark.usefixtures("on_the_machine")
def test_the_driver_tells_what_its_processes_hold_and_others_do_not_count(rig: Rig) -> None:
    rig.lists((rig.process.pid, WEIGHTS + KV), (1, 60 * GIB))
    assert rig.held == WEIGHTS + KV
    assert (rig.gauge.by, rig.gauge.sees_all) == (DRIVER, True)
    rig.maps(0)
    assert rig.held == WEIGHTS + KV, "the guest's word is nothing beside the driver's"
    rig.lists((rig.process.pid, WEIGHTS))
    assert rig.held == WEIGHTS


@pytest.mark.usefixtures("on_the_machine")
def test_a_dead_process_is_counted_until_the_driver_has_its_memory_back(rig: Rig) -> None:
    """Others' known pain: release returned early."""
    rig.lists((rig.process.pid, WEIGHTS))
    assert rig.held == WEIGHTS
    rig.end()
    assert rig.held == WEIGHTS
    rig.lists()
    assert rig.held == 0


@pytest.mark.usefixtures("on_the_machine")
def test_a_process_that_lives_and_is_no_longer_listed_is_not_taken_for_freed(rig: Rig) -> None:
    rig.lists((rig.process.pid, WEIGHTS))
    assert rig.held == WEIGHTS
    rig.lists((1, GIB))
    assert rig.held is None
    rig.lists((rig.process.pid, None))
    assert rig.held is None
    rig.reader.listed = None
    assert rig.held is None, "a driver that does not answer says nothing"


@pytest.mark.usefixtures("contained")
@pytest.mark.parametrize(
    "listed",
    [
        pytest.param(lambda pid: (), id="an empty list"),
        pytest.param(lambda pid: ((2**22 + 1, 24 * GIB),), id="numbers of another namespace"),
        pytest.param(lambda pid: ((pid, None),), id="its number without its memory"),
        pytest.param(
            lambda pid: ((pid, GIB), (2**22 + 1, 24 * GIB)), id="its number is another's there"
        ),
    ],
)
def test_in_a_container_pages_count_as_far_as_the_card_has_more_free(
    rig: Rig, listed: object
) -> None:
    assert callable(listed)
    rig.lists(*listed(rig.process.pid))
    assert rig.held == KV
    assert (rig.gauge.by, rig.gauge.sees_all) == (PAGE, False)
    rig.maps(2 * GIB)
    assert rig.held == KV, "it says that it gave 6 GiB back, and the card has no more than before"
    rig.frees(4 * GIB)
    assert rig.held == 4 * GIB
    rig.frees(40 * GIB)
    assert rig.held == 2 * GIB, "what others gave back is not its own"


@pytest.mark.usefixtures("contained")
def test_the_driver_is_believed_in_a_container_that_sees_all_it_lists(rig: Rig) -> None:
    rig.lists((rig.process.pid, WEIGHTS), (os.getpid(), GIB), (0, GIB))
    assert rig.held == WEIGHTS
    assert rig.gauge.by == DRIVER


@pytest.mark.usefixtures("contained")
def test_memory_that_a_neighbour_took_at_once_is_not_counted_as_freed(rig: Rig) -> None:
    assert rig.held == KV
    rig.maps(0)
    rig.frees(-GIB)
    assert rig.held == KV


@pytest.mark.usefixtures("contained")
def test_a_guest_that_ended_holds_nothing_whoever_has_the_memory_now(rig: Rig) -> None:
    assert rig.held == KV
    rig.end()
    assert rig.held == 0


@pytest.mark.usefixtures("contained")
def test_without_driver_and_page_nothing_is_known(rig: Rig) -> None:
    rig.state = None
    assert rig.held is None
    rig.state = GuestState(bytes_mapped=KV)
    rig.reader.free = None
    assert rig.held is None


@pytest.mark.usefixtures("contained")
def test_what_is_measured_one_way_is_not_compared_with_the_other(rig: Rig) -> None:
    assert rig.held == KV
    rig.lists((rig.process.pid, WEIGHTS))
    assert rig.held == KV
    assert rig.gauge.by == PAGE


def test_no_process_holds_nothing() -> None:
    gauge = DeviceMemory(StandInReader(CARD), CARD, lambda: None, lambda: None)
    assert gauge.held_bytes() == 0
