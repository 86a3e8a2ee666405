"""The ladder and its gauges, against processes and cards that say true and untrue things of it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from executor import GuestState
from executor.kv.reclaim_ladder import Finished, ReclaimLevel, ReclaimOutcome
from rose.errors import RefusedError, UnavailableError
from rose.logs.eventlog import EventLog
from rose.node.guest import memory_gauges
from rose.node.guest import reclaimer as reclaimer_module
from rose.node.guest.memory_gauges import DRIVER, KERNEL, PAGE, DeviceMemory, HostMemory, Measuring
from rose.node.guest.reclaimer import NO_SLEEP, UNSEEN, Reclaimer
from rose.node.replica_client import ReplicaAnswer, ReplicaClient
from rose.nvml import Client
from rose.process.procfs import group_bytes
from tests.fakes.cuda.nvml import CARD, StandInReader
from tests.harness.waiting import PATIENCE_S, until_async


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each figure waited for: a busy machine needs more than a quarter of a second."""
    monkeypatch.setattr(reclaimer_module, "Measuring", partial(Measuring, patience_s=PATIENCE_S))


# ---- a guest of this machine's memory ----


MIB = 1 << 20
SIZE, KV = 160, 64
GRANULE = 4 * MIB


@dataclass
class MemoryGuest:
    """A guest of SIZE MiB, KV of them for its KV cache."""

    process: subprocess.Popen[str]
    events: EventLog
    log: Path
    kv_word: str = "free"
    state: GuestState = field(
        default_factory=lambda: GuestState(
            bytes_mapped=KV * MIB, granules_total=16, granules_mapped=16, granule_bytes=GRANULE
        )
    )
    holds: list[int | None] = field(default_factory=list)
    name = "guest"
    sleep_bytes = None

    def gauge(self) -> HostMemory:
        return HostMemory(lambda: self.process.pid)

    @property
    def memory(self) -> int | None:
        return group_bytes(self.process.pid)

    def say(self, word: str, mib: int) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{word} {mib}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def hold(self, cap: int | None) -> None:
        self.holds.append(cap)
        if cap and cap < self.state.granules_mapped:
            self.say(self.kv_word, (self.state.granules_mapped - cap) * GRANULE // MIB)
            self.state = replace(self.state, granules_mapped=cap, bytes_mapped=cap * GRANULE)

    def kill(self, _: str) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def reclaimer(self, sleep: Callable[[], Any] | None = None, **changes: Any) -> Reclaimer:
        self.sleep, self.can_sleep = sleep, sleep is not None
        vars(self).update(changes)
        return Reclaimer(self, self.events)  # type: ignore[arg-type]

    def noted(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MemoryGuest]:
    delay_s = str(getattr(request, "param", 0.0))
    script = Path(__file__).with_name("memory_holder.py")
    process = subprocess.Popen(
        [sys.executable, "-S", str(script), str(SIZE), delay_s],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    events = EventLog(tmp_path, "node")
    try:
        yield MemoryGuest(process, events, tmp_path / "events-node.jsonl")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        events.close()


Levels = dict[ReclaimLevel, ReclaimOutcome]
FREEZE, BALLOON, _kv, SLEEP, KILL = ReclaimLevel
FREED, TOO_LITTLE, HELD, _late, UNSUPPORTED = ReclaimOutcome


def outcomes(finished: Finished) -> Levels:
    return {report.level: report.outcome for report in finished.levels}


async def test_what_the_kernel_counts_is_what_a_group_holds(rig: MemoryGuest) -> None:
    before = rig.memory
    assert before is not None
    assert SIZE * MIB < before < (SIZE + 64) * MIB
    rig.say("free", 100)
    wanted = before - 100 * MIB
    await until_async(lambda: abs((rig.memory or 0) - wanted) < MIB, PATIENCE_S, "100 MiB are gone")
    rig.kill("")
    assert rig.memory == 0


@pytest.mark.parametrize("rig", [0.0, 0.06], indirect=True, ids=["at once", "returned early"])
async def test_the_balloon_gives_no_more_than_is_wanted_and_is_waited_for(rig: MemoryGuest) -> None:
    finished = await rig.reclaimer().reclaim(30 * MIB, 30.0, "test")
    assert outcomes(finished) == {FREEZE: TOO_LITTLE, BALLOON: FREED}
    assert (finished.enough, finished.in_time) == (True, True)
    assert finished.freed_bytes >= 30 * MIB
    assert rig.state.granules_mapped == (KV - 30) * MIB // GRANULE
    assert rig.holds == [0, 8, None], "frozen, ballooned, free again"
    assert rig.process.poll() is None
    assert next(e for e in rig.noted() if e["event"] == "reclaim_begun")["measured_by"] == KERNEL


async def refused(rig: MemoryGuest) -> None:
    raise RefusedError("HTTP 404")


async def silent(rig: MemoryGuest) -> None:
    raise UnavailableError("no answer")


async def lies(rig: MemoryGuest) -> None:
    rig.say("lie", 90)


async def sleeps(rig: MemoryGuest) -> None:
    rig.say("free", 90)


@pytest.mark.parametrize(
    ("kv_word", "sleep", "wanted", "reached", "why"),
    [
        ("lie", None, 30, {BALLOON: HELD, KILL: FREED}, NO_SLEEP),
        ("free", lies, 120, {SLEEP: HELD, KILL: FREED}, None),
        ("free", sleeps, 120, {SLEEP: FREED}, None),
        ("free", None, SIZE, {SLEEP: UNSUPPORTED, KILL: FREED}, NO_SLEEP),
        ("free", refused, SIZE, {SLEEP: UNSUPPORTED, KILL: FREED}, "HTTP 404"),
        ("lie", silent, SIZE, {KILL: FREED}, None),
    ],
)
async def test_a_guest_gives_what_is_measured_and_is_ended_for_what_it_only_says(
    rig: MemoryGuest, kv_word: str, sleep: Any, wanted: int, reached: Levels, why: str | None
) -> None:
    rig.kv_word = kv_word
    asleep = sleep and partial(sleep, rig)
    finished = await rig.reclaimer(asleep).reclaim(wanted * MIB, 4.0, "test")
    assert reached.items() <= outcomes(finished).items()
    assert finished.levels[-1].level is list(reached)[-1]
    assert (finished.enough, finished.in_time, rig.memory) == (True, True, 0)
    levels = {e["level"]: e for e in rig.noted() if e["event"] == "reclaim_level"}
    names = {level.name.lower(): str(outcome) for level, outcome in reached.items()}
    assert {name: levels[name]["outcome"] for name in names} == names
    if why is not None:
        assert levels["sleep"]["why"] == why
    if sleep is lies:
        assert levels["sleep"]["claimed_bytes"] > 0
        assert abs(levels["sleep"]["freed_bytes"]) < 2 * MIB


async def test_what_cannot_be_measured_is_not_taken_for_reclaimed(rig: MemoryGuest) -> None:
    gauge = SimpleNamespace(by=KERNEL, sees_all=True, held_bytes=lambda: None)
    finished = await rig.reclaimer(gauge=lambda: gauge).reclaim(30 * MIB, 1.0, "test")
    assert finished.levels[-1].level is KILL
    assert not finished.enough
    assert rig.process.poll() is not None


async def test_a_debt_that_is_paid_meanwhile_ends_the_climb(rig: MemoryGuest) -> None:
    reclaimer = rig.reclaimer()
    reclaimer.begin(SIZE * MIB, 5.0, "test", settled=lambda: len(rig.holds) > 1)
    finished = await reclaimer.reclaim(0, 0.0, "joins")
    assert finished.enough
    assert rig.process.poll() is None
    assert rig.holds[-1] is None
    assert "reclaim_settled" in [event["event"] for event in rig.noted()]


async def test_a_reclaim_that_breaks_has_killed_before(rig: MemoryGuest) -> None:
    reclaimer = rig.reclaimer(state=object())
    with pytest.raises(AttributeError, match="no attribute"):
        await reclaimer.reclaim(30 * MIB, 5.0, "test")
    assert rig.process.poll() is not None
    assert rig.noted()[-1]["event"] == "reclaim_broke"


async def test_a_driver_that_hangs_delays_no_kill(
    rig: MemoryGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reclaimer_module, "Measuring", Measuring)
    gauge, answers = HostMemory(lambda: rig.process.pid), threading.Event()

    def held_bytes() -> int | None:
        assert answers.wait(PATIENCE_S)
        return rig.memory

    gauge.held_bytes = held_bytes  # type: ignore[method-assign]
    reclaimer = rig.reclaimer(gauge=lambda: gauge)
    task = asyncio.create_task(reclaimer.reclaim(30 * MIB, 1.0, "test"))
    while rig.process.poll() is None:
        await asyncio.sleep(0.01)
        assert not task.done()
    answers.set()
    finished = await task
    assert finished.levels[-1].level is KILL


@pytest.mark.parametrize(
    ("status", "error"), [(404, RefusedError), (500, UnavailableError), (503, UnavailableError)]
)
async def test_an_engine_that_broke_while_it_fell_asleep_is_not_one_that_cannot_sleep(
    status: int, error: type[Exception]
) -> None:
    class BrokenReplica(ReplicaClient):
        async def _call(self, *_: object, **__: object) -> ReplicaAnswer:
            return ReplicaAnswer(
                status, b'{"error":{"message":"Memory usage increased after sleeping."}}'
            )

    client = BrokenReplica(cast(Any, None), "http://engine")
    with pytest.raises(error, match=f"HTTP {status}"):
        await client.sleep()


async def test_while_it_lasts_the_guest_may_not_be_started(rig: MemoryGuest) -> None:
    reclaimer = rig.reclaimer()
    assert reclaimer.holding is None
    reclaimer.begin(30 * MIB, 5.0, "test")
    assert reclaimer.holding
    finished = await reclaimer.reclaim(10 * MIB, 5.0, "joins the one under way")
    assert finished.wanted_bytes == 30 * MIB
    assert reclaimer.holding is None


# ---- a guest on a GPU, by what a stand-in for its driver says ----


GIB = 1 << 30
CARD_GRANULE = 2 << 20
CONTEXT, CARD_WEIGHTS, CARD_KV = 1 * GIB, 16 * GIB, 8 * GIB


@dataclass
class CardGuest:
    """A process and what a driver would say it has: context, weights and CARD_KV pages.

    listed: whether the driver tells by process. gives: whether pages that it says it gave back are.
    """

    process: subprocess.Popen[bytes]
    events: EventLog
    listed: bool = True
    gives: bool = True
    weights: int = CARD_WEIGHTS
    sleeps: str = "well"
    name = "g0"
    can_sleep, sleep_bytes = True, CARD_WEIGHTS
    reader: StandInReader = field(default_factory=lambda: StandInReader(CARD))
    state: GuestState = field(
        default_factory=lambda: GuestState(
            bytes_mapped=CARD_KV,
            granule_bytes=CARD_GRANULE,
            granules_mapped=CARD_KV // CARD_GRANULE,
            granules_total=CARD_KV // CARD_GRANULE,
        )
    )

    def __post_init__(self) -> None:
        self.kv = CARD_KV
        self.reader.free = 40 * GIB
        self.all_free = self.reader.free + CONTEXT + CARD_WEIGHTS + CARD_KV
        self.tell()

    def tell(self) -> None:
        alive = self.process.poll() is None
        held = CONTEXT + self.weights + self.kv if alive else 0
        self.reader.free = self.all_free - held
        seen = self.listed and alive
        self.reader.listed = (Client(self.process.pid, held),) if seen else ()

    def hold(self, cap: int | None) -> None:
        if cap and cap < self.state.granules_mapped:
            mapped = cap * CARD_GRANULE
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
        return await Reclaimer(self, self.events).reclaim(wanted, PATIENCE_S, "test")  # type: ignore[arg-type]

    def gauge(self) -> DeviceMemory:
        return DeviceMemory(self.reader, [CARD], lambda: self.process.pid, lambda: self.state)


@pytest.fixture
def on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_gauges, "in_first_pid_namespace", lambda: True)


@pytest.fixture
def guest(
    tmp_path: Path,
    process: "subprocess.Popen[bytes]",
    on_the_machine: None,
    request: pytest.FixtureRequest,
) -> Iterator[CardGuest]:
    events = EventLog(tmp_path, "node")
    yield CardGuest(process, events, **getattr(request, "param", {}))
    events.close()


@pytest.mark.parametrize(
    ("listed", "by", "held"),
    [(True, DRIVER, CONTEXT + CARD_WEIGHTS + CARD_KV), (False, PAGE, CARD_KV)],
)
async def test_the_balloon_gives_what_is_wanted_of_the_card(
    guest: CardGuest, tmp_path: Path, listed: bool, by: str, held: int
) -> None:
    guest.listed = listed
    guest.tell()
    finished = await guest.reclaim(3 * GIB)
    assert outcomes(finished) == {FREEZE: TOO_LITTLE, BALLOON: FREED}
    assert (finished.enough, finished.freed_bytes) == (True, 3 * GIB)
    assert guest.process.poll() is None
    lines = (tmp_path / "events-node.jsonl").read_text().splitlines()
    begun = next(e for e in map(json.loads, lines) if e["event"] == "reclaim_begun")
    assert (begun["measured_by"], begun["held_bytes"]) == (by, held)


@pytest.mark.parametrize(
    ("listed", "reached", "freed"),
    [
        (True, {BALLOON: HELD, SLEEP: HELD}, CONTEXT + CARD_WEIGHTS + CARD_KV),
        (False, {BALLOON: HELD}, CARD_KV),
    ],
)
async def test_pages_that_the_card_did_not_get_back_are_not_freed(
    guest: CardGuest, listed: bool, reached: Levels, freed: int
) -> None:
    guest.listed, guest.gives, guest.sleeps = listed, False, "lies"
    guest.tell()
    finished = await guest.reclaim(3 * GIB)
    assert reached.items() <= outcomes(finished).items()
    assert finished.levels[-1].level is KILL
    assert finished.freed_bytes == freed


@pytest.mark.parametrize(
    ("guest", "wanted", "reached", "freed"),
    [
        ({}, CARD_KV + CARD_WEIGHTS + CONTEXT, {SLEEP: TOO_LITTLE, KILL: FREED}, CARD_WEIGHTS),
        # Without its weights it is ended. vLLM answers 500 when a neighbour took memory meanwhile.
        ({}, CARD_KV + CARD_WEIGHTS // 2, {SLEEP: FREED}, CARD_WEIGHTS),
        ({"sleeps": "breaks"}, CARD_KV + CARD_WEIGHTS // 2, {SLEEP: FREED}, CARD_WEIGHTS),
        # Nobody could confirm that it sleeps.
        ({"listed": False}, CARD_KV + GIB, {SLEEP: UNSUPPORTED, KILL: FREED}, 0),
    ],
    indirect=["guest"],
    ids=["weights and no more", "ended without weights", "ended after an error", "unseen"],
)
async def test_a_guest_that_owes_more_than_its_kv_sleeps(
    guest: CardGuest, wanted: int, reached: Levels, freed: int
) -> None:
    finished = await guest.reclaim(wanted)
    assert reached.items() <= outcomes(finished).items()
    assert guest.process.poll() is not None
    report = next(report for report in finished.levels if report.level is SLEEP)
    assert report.freed_bytes == freed
    if report.outcome is TOO_LITTLE:
        assert report.claimed_bytes == CARD_WEIGHTS
    if not guest.listed:
        assert (report.why, guest.weights) == (UNSEEN, CARD_WEIGHTS)
        assert finished.freed_bytes == CARD_KV, "no more than was measured"


# ---- what a guest holds of a GPU ----


@dataclass
class CardRig:
    """A group of one process, and what driver and page say of it."""

    process: subprocess.Popen[bytes]
    reader: StandInReader = field(default_factory=lambda: StandInReader(CARD))
    state: GuestState | None = field(default_factory=lambda: GuestState(bytes_mapped=CARD_KV))

    def __post_init__(self) -> None:
        self.gauge = DeviceMemory(self.reader, [CARD], lambda: self.process.pid, lambda: self.state)

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
def card(process: "subprocess.Popen[bytes]") -> CardRig:
    return CardRig(process)


@pytest.fixture
def contained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_gauges, "in_first_pid_namespace", lambda: False)


@pytest.mark.usefixtures("on_the_machine")
def test_the_driver_tells_what_its_processes_hold_and_others_do_not_count(card: CardRig) -> None:
    card.lists((card.process.pid, CARD_WEIGHTS + CARD_KV), (1, 60 * GIB))
    assert card.held == CARD_WEIGHTS + CARD_KV
    assert (card.gauge.by, card.gauge.sees_all) == (DRIVER, True)
    card.maps(0)
    assert card.held == CARD_WEIGHTS + CARD_KV, "the guest's word is nothing beside the driver's"
    card.lists((card.process.pid, CARD_WEIGHTS))
    assert card.held == CARD_WEIGHTS


@pytest.mark.usefixtures("on_the_machine")
def test_a_dead_process_is_counted_until_the_driver_has_its_memory_back(card: CardRig) -> None:
    """Others' known pain: release returned early."""
    card.lists((card.process.pid, CARD_WEIGHTS))
    assert card.held == CARD_WEIGHTS
    card.end()
    assert card.held == CARD_WEIGHTS
    card.lists()
    assert card.held == 0


@pytest.mark.usefixtures("on_the_machine")
def test_a_process_that_lives_and_is_no_longer_listed_is_not_taken_for_freed(card: CardRig) -> None:
    card.lists((card.process.pid, CARD_WEIGHTS))
    assert card.held == CARD_WEIGHTS
    card.lists((1, GIB))
    assert card.held is None
    card.lists((card.process.pid, None))
    assert card.held is None
    card.reader.listed = None
    assert card.held is None, "a driver that does not answer says nothing"


@pytest.mark.usefixtures("contained")
@pytest.mark.parametrize(
    "listed",
    [
        lambda pid: (),
        lambda pid: ((2**22 + 1, 24 * GIB),),
        lambda pid: ((pid, None),),
        lambda pid: ((pid, GIB), (2**22 + 1, 24 * GIB)),
    ],
    ids=["nothing", "numbers of another namespace", "no memory", "another's number"],
)
def test_in_a_container_pages_count_as_far_as_the_card_has_more_free(
    card: CardRig, listed: Callable[[int], Sequence[tuple[int, int | None]]]
) -> None:
    card.lists(*listed(card.process.pid))
    assert card.held == CARD_KV
    assert (card.gauge.by, card.gauge.sees_all) == (PAGE, False)
    card.maps(2 * GIB)
    assert card.held == CARD_KV, (
        "it says that it gave 6 GiB back, and the card has no more than before"
    )
    card.frees(4 * GIB)
    assert card.held == 4 * GIB
    card.frees(40 * GIB)
    assert card.held == 2 * GIB, "what others gave back is not its own"


@pytest.mark.usefixtures("contained")
def test_the_driver_is_believed_in_a_container_that_sees_all_it_lists(card: CardRig) -> None:
    card.lists((card.process.pid, CARD_WEIGHTS), (os.getpid(), GIB), (0, GIB))
    assert card.held == CARD_WEIGHTS
    assert card.gauge.by == DRIVER


@pytest.mark.usefixtures("contained")
def test_memory_that_a_neighbour_took_at_once_is_not_counted_as_freed(card: CardRig) -> None:
    assert card.held == CARD_KV
    card.maps(0)
    card.frees(-GIB)
    assert card.held == CARD_KV


@pytest.mark.usefixtures("contained")
def test_a_guest_that_ended_holds_nothing_whoever_has_the_memory_now(card: CardRig) -> None:
    assert card.held == CARD_KV
    card.end()
    assert card.held == 0


@pytest.mark.usefixtures("contained")
def test_without_driver_and_page_nothing_is_known(card: CardRig) -> None:
    card.state = None
    assert card.held is None
    card.state = GuestState(bytes_mapped=CARD_KV)
    card.reader.free = None
    assert card.held is None


@pytest.mark.usefixtures("contained")
def test_what_is_measured_one_way_is_not_compared_with_the_other(card: CardRig) -> None:
    assert card.held == CARD_KV
    card.lists((card.process.pid, CARD_WEIGHTS))
    assert card.held == CARD_KV
    assert card.gauge.by == PAGE


def test_no_process_holds_nothing() -> None:
    gauge = DeviceMemory(StandInReader(CARD), [CARD], lambda: None, lambda: None)
    assert gauge.held_bytes() == 0
