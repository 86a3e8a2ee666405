"""The ladder against processes that really hold memory, and say true and untrue things of it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from executor import GuestState
from executor.kv.reclaim_ladder import Finished, ReclaimLevel, ReclaimOutcome
from rose.errors import RefusedError, UnavailableError
from rose.logs.eventlog import EventLog
from rose.node.guest.memory_gauges import KERNEL, HostMemory
from rose.node.guest.reclaimer import NO_SLEEP, UNSEEN, Reclaimer
from rose.node.replica_client import ReplicaAnswer, ReplicaClient
from rose.process.procfs import group_bytes
from tests.harness.waiting import PATIENCE_S, until_async

MIB = 1 << 20
SIZE, KV = 160, 64
GRANULE = 4 * MIB


@dataclass
class Rig:
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
    sleep_bytes: int | None = None

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
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
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
        yield Rig(process, events, tmp_path / "events-node.jsonl")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        events.close()


def outcomes(finished: Finished) -> dict[ReclaimLevel, ReclaimOutcome]:
    return {report.level: report.outcome for report in finished.levels}


async def test_what_the_kernel_counts_is_what_a_group_holds(rig: Rig) -> None:
    before = rig.memory
    assert before is not None
    assert SIZE * MIB < before < (SIZE + 64) * MIB
    rig.say("free", 100)
    wanted = before - 100 * MIB
    await until_async(lambda: abs((rig.memory or 0) - wanted) < MIB, PATIENCE_S, "100 MiB are gone")
    rig.kill("")
    assert rig.memory == 0


async def test_the_balloon_gives_no_more_than_is_wanted(rig: Rig) -> None:
    finished = await rig.reclaimer().reclaim(30 * MIB, 30.0, "test")
    assert finished.enough
    assert finished.in_time
    assert list(outcomes(finished)) == [ReclaimLevel.FREEZE, ReclaimLevel.BALLOON]
    assert rig.state.granules_mapped == (KV - 30) * MIB // GRANULE
    assert rig.holds == [0, 8, None], "frozen, ballooned, free again"
    assert rig.process.poll() is None


@pytest.mark.parametrize("rig", [0.06], indirect=True)
async def test_release_returned_early(rig: Rig) -> None:
    finished = await rig.reclaimer().reclaim(30 * MIB, 5.0, "test")
    assert outcomes(finished)[ReclaimLevel.BALLOON] is ReclaimOutcome.FREED, (
        "waited for, and not believed before"
    )
    assert rig.process.poll() is None
    assert finished.freed_bytes >= 30 * MIB


async def test_sleep_reported_success_but_memory_stayed_held(rig: Rig) -> None:
    async def sleep() -> None:
        rig.say("lie", 90)

    finished = await rig.reclaimer(sleep).reclaim(120 * MIB, 8.0, "test")
    assert outcomes(finished)[ReclaimLevel.SLEEP] is ReclaimOutcome.HELD
    assert outcomes(finished)[ReclaimLevel.KILL] is ReclaimOutcome.FREED
    assert (finished.enough, finished.in_time, rig.memory) == (True, True, 0)
    levels = {e["level"]: e for e in rig.noted() if e["event"] == "reclaim_level"}
    assert levels["sleep"]["outcome"] == "held"
    assert levels["sleep"]["claimed_bytes"] > 0
    assert abs(levels["sleep"]["freed_bytes"]) < 2 * MIB


async def test_a_balloon_that_only_says_so_is_found_out(rig: Rig) -> None:
    rig.kv_word = "lie"
    finished = await rig.reclaimer().reclaim(30 * MIB, 8.0, "test")
    assert outcomes(finished)[ReclaimLevel.BALLOON] is ReclaimOutcome.HELD
    assert finished.levels[-1].level is ReclaimLevel.KILL
    assert rig.memory == 0


async def test_an_engine_that_really_slept_has_no_weights_and_is_ended(rig: Rig) -> None:
    """Others' known pain: it answers that it is well, and turns routed there never end."""

    async def sleep() -> None:
        rig.say("free", 90)

    finished = await rig.reclaimer(sleep).reclaim(120 * MIB, 8.0, "test")
    assert list(outcomes(finished))[-1] is ReclaimLevel.SLEEP
    assert finished.enough
    assert rig.process.poll() is not None


class Unknown(HostMemory):
    """Gauge of a kernel that gives no answer."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def held_bytes(self) -> int | None:
        return None


async def test_what_cannot_be_measured_is_not_taken_for_reclaimed(rig: Rig) -> None:
    reclaimer = rig.reclaimer(gauge=Unknown)
    finished = await reclaimer.reclaim(30 * MIB, 2.0, "test")
    assert finished.levels[-1].level is ReclaimLevel.KILL
    assert not finished.enough
    assert rig.process.poll() is not None


async def test_a_debt_that_is_paid_meanwhile_ends_the_climb(rig: Rig) -> None:
    reclaimer = rig.reclaimer()
    reclaimer.begin(SIZE * MIB, 5.0, "test", settled=lambda: len(rig.holds) > 1)
    finished = await reclaimer.reclaim(0, 0.0, "joins")
    assert finished.enough
    assert rig.process.poll() is None
    assert rig.holds[-1] is None
    assert "reclaim_settled" in [event["event"] for event in rig.noted()]


class Torn:
    """Section of a page that cannot be read."""

    def __getattr__(self, name: str) -> int:
        raise ValueError("a torn name")


async def test_a_reclaim_that_breaks_has_killed_before(rig: Rig) -> None:
    reclaimer = rig.reclaimer(state=Torn())
    with pytest.raises(ValueError, match="torn name"):
        await reclaimer.reclaim(30 * MIB, 5.0, "test")
    assert rig.process.poll() is not None
    assert rig.noted()[-1]["event"] == "reclaim_broke"


async def refused() -> None:
    raise RefusedError("HTTP 404")


@pytest.mark.parametrize(("sleep", "why"), [(None, NO_SLEEP), (refused, "HTTP 404")])
async def test_a_level_the_engine_does_not_have_is_skipped_and_said(
    rig: Rig, sleep: Any, why: str
) -> None:
    finished = await rig.reclaimer(sleep).reclaim(SIZE * MIB, 8.0, "test")
    assert outcomes(finished)[ReclaimLevel.SLEEP] is ReclaimOutcome.UNSUPPORTED
    said = [e for e in rig.noted() if e["event"] == "reclaim_level" and e["level"] == "sleep"]
    assert [e["why"] for e in said] == [why]
    assert rig.memory == 0


class Hangs(HostMemory):
    """Gauge of a driver that answers too late."""

    def __init__(self, group: Callable[[], int | None]) -> None:
        super().__init__(group)
        self.answers = threading.Event()

    def held_bytes(self) -> int | None:
        assert self.answers.wait(PATIENCE_S)
        return super().held_bytes()


async def test_a_driver_that_hangs_delays_no_kill(rig: Rig) -> None:
    gauge = Hangs(lambda: rig.process.pid)
    reclaimer = rig.reclaimer(gauge=lambda: gauge)
    task = asyncio.create_task(reclaimer.reclaim(30 * MIB, 1.0, "test"))
    while rig.process.poll() is None:
        await asyncio.sleep(0.01)
        assert not task.done()
    gauge.answers.set()
    finished = await task
    assert finished.levels[-1].level is ReclaimLevel.KILL


class KvAlone(HostMemory):
    """Gauge of a guest whose KV alone can be measured."""

    sees_all = False


async def test_an_engine_is_not_asked_to_sleep_where_its_weights_are_not_seen(rig: Rig) -> None:
    async def sleep() -> None:
        raise AssertionError("asked for what nobody could confirm")

    gauge = KvAlone(lambda: rig.process.pid)
    reclaimer = rig.reclaimer(sleep, gauge=lambda: gauge)
    finished = await reclaimer.reclaim(SIZE * MIB, 8.0, "test")
    (slept,) = (report for report in finished.levels if report.level is ReclaimLevel.SLEEP)
    assert (slept.outcome, slept.why) == (ReclaimOutcome.UNSUPPORTED, UNSEEN)
    assert finished.enough


async def test_sleep_is_not_held_for_a_liar_over_kv_that_it_does_not_reach(rig: Rig) -> None:
    """On a GPU with reserved KV it gives up weights alone, and says nothing else."""

    async def sleep() -> None:
        rig.say("free", 40)

    reclaimer = rig.reclaimer(sleep, sleep_bytes=40 * MIB)
    finished = await reclaimer.reclaim(SIZE * MIB, 8.0, "test")
    (slept,) = (report for report in finished.levels if report.level is ReclaimLevel.SLEEP)
    assert (slept.outcome, slept.claimed_bytes) == (ReclaimOutcome.TOO_LITTLE, 40 * MIB)
    assert finished.levels[-1].level is ReclaimLevel.KILL
    assert finished.enough


async def test_who_measured_is_written_down(rig: Rig) -> None:
    await rig.reclaimer().reclaim(MIB, 5.0, "test")
    assert next(e for e in rig.noted() if e["event"] == "reclaim_begun")["measured_by"] == KERNEL


@pytest.mark.parametrize(
    ("status", "error"), [(404, RefusedError), (500, UnavailableError), (503, UnavailableError)]
)
async def test_an_engine_that_broke_while_it_fell_asleep_is_not_one_that_cannot_sleep(
    status: int, error: type[Exception]
) -> None:
    class Broken(ReplicaClient):
        async def _call(self, *_: object, **__: object) -> ReplicaAnswer:
            return ReplicaAnswer(
                status, b'{"error":{"message":"Memory usage increased after sleeping."}}'
            )

    client = Broken(cast(Any, None), "http://engine")
    with pytest.raises(error, match=f"HTTP {status}"):
        await client.sleep()


async def test_an_engine_that_does_not_answer_is_killed_before_the_deadline(rig: Rig) -> None:
    async def hangs() -> None:
        raise UnavailableError("no answer")

    rig.kv_word = "lie"
    finished = await rig.reclaimer(hangs).reclaim(SIZE * MIB, 2.0, "test")
    assert finished.enough
    assert finished.in_time


async def test_while_it_lasts_the_guest_may_not_be_started(rig: Rig) -> None:
    reclaimer = rig.reclaimer()
    assert reclaimer.holding is None
    reclaimer.begin(30 * MIB, 5.0, "test")
    assert reclaimer.holding
    finished = await reclaimer.reclaim(10 * MIB, 5.0, "joins the one under way")
    assert finished.wanted_bytes == 30 * MIB
    assert reclaimer.holding is None
