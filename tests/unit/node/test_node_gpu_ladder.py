"""The ladder over a guest on a GPU: levels end by the driver's bytes, told by a stand-in for it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from executor import GuestState
from executor.kv.reclaim_ladder import Finished, ReclaimLevel, ReclaimOutcome
from rose.errors import UnavailableError
from rose.logs.eventlog import EventLog
from rose.node.guest import memory_gauges
from rose.node.guest.memory_gauges import DRIVER, PAGE, DeviceMemory
from rose.node.guest.reclaimer import UNSEEN, Reclaimer
from rose.nvml import Client
from tests.fakes.nvml import CARD, StandInReader

GIB = 1 << 30
GRANULE = 2 << 20
CONTEXT, WEIGHTS, KV = 1 * GIB, 16 * GIB, 8 * GIB


@dataclass
class CardGuest:
    """A process and what a driver would say it has: context, weights and KV pages.

    listed: whether the driver tells by process. gives: whether pages that it says it gave back are.
    """

    process: subprocess.Popen[bytes]
    events: EventLog
    listed: bool = True
    gives: bool = True
    weights: int = WEIGHTS
    sleeps: str = "well"
    name = "g0"
    can_sleep, sleep_bytes = True, WEIGHTS
    reader: StandInReader = field(default_factory=lambda: StandInReader(CARD))
    state: GuestState = field(
        default_factory=lambda: GuestState(
            bytes_mapped=KV,
            granule_bytes=GRANULE,
            granules_mapped=KV // GRANULE,
            granules_total=KV // GRANULE,
        )
    )

    def __post_init__(self) -> None:
        self.kv = KV
        self.reader.free = 40 * GIB
        self.all_free = self.reader.free + CONTEXT + WEIGHTS + KV
        self.tell()

    def tell(self) -> None:
        alive = self.process.poll() is None
        held = CONTEXT + self.weights + self.kv if alive else 0
        self.reader.free = self.all_free - held
        seen = self.listed and alive
        self.reader.listed = (Client(self.process.pid, held),) if seen else ()

    def hold(self, cap: int | None) -> None:
        if cap and cap < self.state.granules_mapped:
            mapped = cap * GRANULE
            self.state = replace(self.state, granules_mapped=cap, bytes_mapped=mapped)
            self.kv = mapped if self.gives else self.kv
        self.tell()

    async def sleep(self) -> None:
        if self.sleeps != "lies":
            self.weights = 0
        self.tell()
        if self.sleeps == "breaks":
            raise UnavailableError("HTTP 500 Memory usage increased after sleeping.")

    def kill(self, _: str) -> None:
        self.process.kill()
        self.process.wait()
        self.tell()

    async def reclaim(self, wanted: int) -> Finished:
        return await Reclaimer(self, self.events).reclaim(wanted, 8.0, "test")  # type: ignore[arg-type]

    def gauge(self) -> DeviceMemory:
        return DeviceMemory(self.reader, CARD, lambda: self.process.pid, lambda: self.state)


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[CardGuest]:
    program = [sys.executable, "-S", "-c", "print(flush=True); input()"]
    events = EventLog(tmp_path, "node")
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
    ) as process:
        assert process.stdout
        process.stdout.readline()
        yield CardGuest(process, events)
        process.kill()
    events.close()


@pytest.fixture(autouse=True)
def namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_gauges, "in_first_pid_namespace", lambda: True)


def outcomes(finished: Finished) -> dict[str, ReclaimOutcome]:
    return {report.level.name: report.outcome for report in finished.levels}


def noted(tmp_path: Path) -> Any:
    lines = (tmp_path / "events-node.jsonl").read_text().splitlines()
    return next(e for e in map(json.loads, lines) if e["event"] == "reclaim_begun")


async def test_the_balloon_gives_what_is_wanted_of_the_card(
    guest: CardGuest, tmp_path: Path
) -> None:
    finished = await guest.reclaim(3 * GIB)
    assert outcomes(finished) == {
        "FREEZE": ReclaimOutcome.TOO_LITTLE,
        "BALLOON": ReclaimOutcome.FREED,
    }
    assert (finished.enough, finished.freed_bytes) == (True, 3 * GIB)
    assert guest.process.poll() is None
    said = noted(tmp_path)
    assert (said["measured_by"], said["held_bytes"]) == (DRIVER, CONTEXT + WEIGHTS + KV)


async def test_a_balloon_that_only_says_so_is_found_out(guest: CardGuest) -> None:
    guest.gives = False
    guest.sleeps = "lies"
    finished = await guest.reclaim(3 * GIB)
    assert outcomes(finished)["BALLOON"] is ReclaimOutcome.HELD
    assert outcomes(finished)["SLEEP"] is ReclaimOutcome.HELD
    assert finished.levels[-1].level is ReclaimLevel.KILL
    assert finished.freed_bytes == CONTEXT + WEIGHTS + KV


async def test_sleep_gives_up_weights_and_no_more_is_expected_of_it(guest: CardGuest) -> None:
    finished = await guest.reclaim(KV + WEIGHTS + CONTEXT)
    slept = next(report for report in finished.levels if report.level is ReclaimLevel.SLEEP)
    assert (slept.outcome, slept.claimed_bytes) == (ReclaimOutcome.TOO_LITTLE, WEIGHTS)
    assert slept.freed_bytes == WEIGHTS
    assert outcomes(finished)["KILL"] is ReclaimOutcome.FREED


@pytest.mark.parametrize("sleeps", ["well", "breaks"])
async def test_an_engine_that_gave_up_its_weights_is_ended_whatever_it_answered(
    guest: CardGuest, sleeps: str
) -> None:
    """vLLM answers 500 when a neighbour took memory meanwhile, and its weights are gone."""
    guest.sleeps = sleeps
    finished = await guest.reclaim(KV + WEIGHTS // 2)
    assert outcomes(finished)["SLEEP"] is ReclaimOutcome.FREED
    assert guest.process.poll() is not None


async def test_where_the_driver_tells_nothing_by_process_kv_is_all_that_is_believed(
    guest: CardGuest, tmp_path: Path
) -> None:
    guest.listed = False
    guest.tell()
    finished = await guest.reclaim(3 * GIB)
    assert outcomes(finished) == {
        "FREEZE": ReclaimOutcome.TOO_LITTLE,
        "BALLOON": ReclaimOutcome.FREED,
    }
    said = noted(tmp_path)
    assert (said["measured_by"], said["held_bytes"]) == (PAGE, KV)


async def test_there_more_than_kv_takes_the_end_of_the_guest(guest: CardGuest) -> None:
    guest.listed = False
    guest.tell()
    finished = await guest.reclaim(KV + GIB)
    slept = next(report for report in finished.levels if report.level is ReclaimLevel.SLEEP)
    assert (slept.outcome, slept.why) == (ReclaimOutcome.UNSUPPORTED, UNSEEN)
    assert outcomes(finished)["KILL"] is ReclaimOutcome.FREED
    assert guest.weights == WEIGHTS, "it was asked for what nobody could confirm"
    assert finished.freed_bytes == KV, "no more than was measured"


async def test_there_pages_that_the_card_did_not_get_back_are_not_freed(
    guest: CardGuest,
) -> None:
    guest.listed = guest.gives = False
    guest.tell()
    finished = await guest.reclaim(3 * GIB)
    assert outcomes(finished)["BALLOON"] is ReclaimOutcome.HELD
    assert finished.levels[-1].level is ReclaimLevel.KILL
