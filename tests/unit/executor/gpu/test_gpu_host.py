"""A host that lends a GPU's memory: what it keeps, what an arrival costs, and what comes back."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_host_cases import (
    BLOCKS,
    GRANULE_BLOCKS,
    STEP_NS,
    DriverGuest,
    GpuHostRig,
    HandleGuest,
    gpu_host,
)
from kv_cases import prompt_of, undisturbed
from vllm.v1.request import RequestStatus

from executor import GuestState
from executor.errors import DeviceError
from executor.host.kv_lender import HOLD_NS, MOST_BYTES_A_CALL, RETIRE_NS
from executor.kv.lending import lent_bytes, owed_bytes
from executor.kv.reclaim_ladder import OverdueTimer
from tests.fakes.cuda.driver import PAGE, StandInDevice, scripted

KV_PAGES = 32
GRANULES = BLOCKS // GRANULE_BLOCKS
RESERVE = 7
"""A fifth of the granules."""
WAYS = pytest.mark.parametrize("by_handle", [False, True], ids=["by the driver", "by handle"])


class LenderAndGuest:
    """A host that lent what it could, and a guest that has all of it."""

    def __init__(self, rig: GpuHostRig, guest: DriverGuest) -> None:
        self.rig = rig
        self.guest = guest
        for _ in range(40):
            rig.turn()
            guest.grow()

    @property
    def lent(self) -> int:
        return self.rig.published.granules_lent

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.rig.turn()
            self.rig.check()


@pytest.fixture
def pair(
    by_handle: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[LenderAndGuest]:
    depth = getattr(request, "param", 1)
    # No page is to spare: what the guest has the host cannot find elsewhere.
    device = StandInDevice((KV_PAGES + 1 + by_handle) * PAGE)
    with gpu_host(tmp_path, device, by_handle=by_handle, depth=depth) as rig:
        guest = (HandleGuest if by_handle else DriverGuest)(device, rig)
        yield LenderAndGuest(rig, guest)
        guest.die()


@WAYS
def test_an_idle_host_keeps_its_reserve_on_pages_and_guests_get_the_rest(
    pair: LenderAndGuest,
) -> None:
    state, stock = pair.rig.published, pair.rig.blocks
    # The reserve is 7 of 32 granules, and that of the null block is not whole.
    assert state.granules_lent == GRANULES - RESERVE - 1
    assert state.bytes_lent == len(pair.guest.pages) * PAGE == state.granules_lent * PAGE
    assert (state.kv_used, state.kv_total) == (0, BLOCKS - 1), "lent is not used"
    assert state.reserve_missing == 0
    assert state.idle
    assert stock.get_num_free_blocks() == BLOCKS - 1 - state.granules_lent * GRANULE_BLOCKS
    assert stock.get_usage() == 0
    assert pair.rig.scheduler.reset_prefix_cache()
    pair.rig.check()


@WAYS
def test_an_arrival_that_the_reserve_covers_makes_no_call_to_the_driver(
    pair: LenderAndGuest,
) -> None:
    pair.rig.driver.calls.clear()
    pair.rig.add("small", prompt_of(0, 60), 8)
    pair.turns(8)
    assert not pair.rig.driver.calls, "neither does a step that serves it"
    assert pair.rig.outputs["small"] == undisturbed(prompt_of(0, 60), 8)


def test_a_call_of_the_host_has_a_bound_on_what_it_asks_of_the_driver(tmp_path: Path) -> None:
    most = MOST_BYTES_A_CALL // PAGE
    device = StandInDevice(100 * PAGE)
    with gpu_host(tmp_path, device, by_handle=False) as rig:
        rig.run_until_idle()
        worst = 0
        rig.driver.calls.clear()
        for step in range(60):
            if step < 4:
                rig.add(f"r{step}", prompt_of(step, 480), 20)
            else:
                rig.turn()
            worst = max(worst, rig.driver.calls["create"])
            assert rig.driver.calls["map"] <= most
            assert rig.driver.calls["unmap"] <= most
            rig.driver.calls.clear()
        assert 0 < worst <= most


@WAYS
@pytest.mark.parametrize("pair", [1, 2], indirect=True, ids=["one in flight", "two in flight"])
def test_a_request_longer_than_what_is_on_pages_waits_in_vllms_queue_and_is_served(
    pair: LenderAndGuest,
) -> None:
    rig = pair.rig
    before = pair.lent
    rig.add("long", prompt_of(1, 400), 60)
    assert rig.published.reserve_missing > 0, "it is asked for when the request comes"
    pair.turns(20)
    assert rig.scheduler.get_request_counts() == (0, 1)
    assert pair.lent == before
    assert not rig.ends
    for _ in range(120):
        pair.guest.obey()
        pair.turns(1)
    assert rig.outputs["long"] == undisturbed(prompt_of(1, 400), 60)
    assert pair.lent < before
    assert rig.published.reserve_missing == 0


@WAYS
def test_a_guest_that_keeps_what_was_asked_back_owes_it_until_the_ladder_ends_it(
    pair: LenderAndGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, debt = pair.rig, OverdueTimer(press_ns=25 * STEP_NS, patience_ns=50 * STEP_NS)
    has = GuestState(granules_total=32, granules_mapped=len(pair.guest.pages), granule_bytes=PAGE)
    assert owed_bytes(0, rig.published, has) == 0, "what is lent may be kept"
    rig.add("long", prompt_of(2, 480), 20)
    climbs = []
    for _ in range(60):
        pair.turns(1)
        climbs.append(debt.step(rig.now_ns, owed_bytes(0, rig.published, has)))
    assert debt.pressed
    assert max(climbs) > 0, "the next level is called for"
    assert not rig.ends
    kill(pair, monkeypatch)
    pair.turns(60)
    assert rig.outputs["long"] == undisturbed(prompt_of(2, 480), 20)


def kill(pair: LenderAndGuest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor.cuda.page_server.has_ended", lambda _process: True)
    pair.guest.die()


def fill(pair: LenderAndGuest) -> dict[str, tuple[list[int], int]]:
    """Requests that the pages that are there admit, and cannot serve to their end."""
    prompts = {f"r{n}": (prompt_of(n, 70), 120) for n in range(3)}
    for name, (prompt, count) in prompts.items():
        pair.rig.add(name, prompt, count)
    return prompts


def preempted(pair: LenderAndGuest) -> int:
    return sum(request.num_preemptions for request in pair.rig.scheduler.requests.values())


@WAYS
@pytest.mark.parametrize("pair", [1, 2], indirect=True, ids=["one in flight", "two in flight"])
def test_running_requests_wait_for_blocks_on_their_way_back_instead_of_being_preempted(
    pair: LenderAndGuest,
) -> None:
    rig, prompts = pair.rig, fill(pair)
    while rig.scheduler.lender.held_back(rig.scheduler.running) == frozenset():
        pair.turns(1)
        assert preempted(pair) == 0
    steps = rig.published.step_seq
    pair.turns(10)
    assert preempted(pair) == 0
    assert len(rig.scheduler.running) == len(prompts), "each keeps what it has"
    pair.guest.obey()
    pair.turns(20)
    assert rig.published.step_seq > steps
    while rig.scheduler.has_requests() or rig.in_flight:
        pair.guest.obey()
        assert preempted(pair) == 0
        pair.turns(1)
    for name, (prompt, count) in prompts.items():
        assert rig.outputs[name] == undisturbed(prompt, count)


@WAYS
def test_a_host_does_not_wait_for_a_guest_for_longer_than_its_bound(pair: LenderAndGuest) -> None:
    rig, prompts = pair.rig, fill(pair)
    waited = most_waited = 0
    for _ in range(1_500):
        before = {name: len(found) for name, found in rig.outputs.items()}
        pair.turns(1)
        moved = before != {name: len(found) for name, found in rig.outputs.items()}
        waited = 0 if moved or not rig.scheduler.running else waited + STEP_NS
        most_waited = max(most_waited, waited)
    # The guest never gives anything back: vLLM preempts as when it is full, and all are served.
    assert most_waited <= HOLD_NS + 2 * STEP_NS
    for name, (prompt, count) in prompts.items():
        assert rig.outputs[name] == undisturbed(prompt, count)


@WAYS
def test_what_comes_back_is_zeroed_and_no_prefix_leads_to_it(pair: LenderAndGuest) -> None:
    rig, guest = pair.rig, pair.guest
    window = guest.driver.reserve(PAGE)
    for handle in guest.pages:
        guest.driver.map(window, PAGE, handle)
        guest.driver.set_access(window, PAGE)
        guest.driver.write(window, b"theirs")
        guest.driver.unmap(window, PAGE)
    held = set(rig.balloon.held)
    cached = {b.block_id for b in rig.blocks.blocks if b.block_hash is not None}
    assert not {block // GRANULE_BLOCKS for block in cached} & held
    rig.scheduler.stop_lending()
    guest.give_all()
    for _ in range(3):
        rig.scheduler.schedule()
    assert rig.lender is None
    for granule in held:
        for block in range(granule * GRANULE_BLOCKS, (granule + 1) * GRANULE_BLOCKS):
            for place in rig.places(block):
                assert rig.driver.read(place, 64) == bytes(64)
    assert rig.blocks.get_num_free_blocks() == BLOCKS - 1


def test_a_cold_prefix_is_forgotten_before_its_memory_is_lent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_HOST_PREFIX_COLD_S", "60")
    with gpu_host(tmp_path, StandInDevice(100 * PAGE), by_handle=False) as rig:
        prompt = prompt_of(4, 400)
        rig.add("first", prompt, 4)
        rig.run_until_idle()
        kept = rig.published.granules_lent
        rig.now_ns += 100 * 10**9
        rig.add("night", prompt_of(5, 8), 1)
        rig.run_until_idle()
        assert rig.published.granules_lent > kept
        rig.check()
        rig.add("again", prompt, 4)
        request = rig.scheduler.requests["again"]
        found = rig.scheduler.kv_cache_manager.get_computed_blocks(request)[1]
        assert found < len(prompt) // 2, "what went is not found any more"
        rig.run_until_idle()
        assert rig.outputs["again"] == rig.outputs["first"] == undisturbed(prompt, 4)


FAILING = (("unmap", 9), ("map", 50), ("set_access", 2))


@pytest.mark.parametrize(
    ("by_handle", "call", "number"),
    # A lender keeps its handles: it releases none.
    [(False, "release", 5), *((way, *call) for way in (False, True) for call in FAILING)],
)
def test_a_driver_that_fails_ends_lending_in_one_line_and_takes_nothing_from_the_host(
    by_handle: bool, call: str, number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with gpu_host(tmp_path, StandInDevice(100 * PAGE), by_handle=by_handle) as rig:
        rig.driver.fails = scripted(call, number, DeviceError)
        rig.run_until_idle()
        for name in ("a", "b"):
            rig.add(name, prompt_of(6, 480), 20)
        rig.settle(120)
        assert rig.outputs["a"] == rig.outputs["b"] == undisturbed(prompt_of(6, 480), 20)
        assert rig.lender is None
        assert rig.blocks.num_gpu_blocks == BLOCKS
        assert len(rig.own_memory()) == KV_PAGES
        assert rig.published.granules_lent == 0
        lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
        assert lines == [
            "KV memory is not lent; the host serves on with its whole pool:"
            f" stand-in: {call} fails by script"
        ]


def test_where_addresses_may_be_without_memory_the_host_serves_on_with_the_others(
    tmp_path: Path,
) -> None:
    with gpu_host(tmp_path, StandInDevice(100 * PAGE), by_handle=False) as rig:
        for _ in range(5):
            rig.turn()
        # A change fails, and putting it back fails as well.
        tries = []

        def fails(name: str, _: int) -> None:
            if name == "map":
                tries.append(name)
                raise DeviceError("stand-in: map fails by script")

        rig.driver.fails = fails
        rig.add("long", prompt_of(7, 400), 20)
        rig.settle(5)
        rig.driver.fails = lambda _name, _number: None
        assert len(tries) == 2
        lost, held = rig.lender, set(rig.balloon.held)
        rig.scheduler.finish_requests("long", RequestStatus.FINISHED_ABORTED)
        rig.add("short", prompt_of(8, 100), 20)
        rig.settle(60)
        assert rig.outputs["short"] == undisturbed(prompt_of(8, 100), 20)
        assert (rig.lender, rig.balloon.held) == (lost, held), "none of them is handed out again"
        assert lent_bytes(rig.published) == 0, "and a guest may have none of it"
        rig.leaks = True


@WAYS
def test_an_idle_host_that_stops_lending_takes_its_pages_back_without_a_request(
    pair: LenderAndGuest,
) -> None:
    scheduler = pair.rig.scheduler
    assert pair.lent
    scheduler.stop_lending()
    for _ in range(400):
        if not scheduler.has_requests():
            break
        pair.rig.turn()
        pair.guest.obey()
    assert not scheduler.has_requests(), "and is idle again"
    assert scheduler.lender is None
    assert pair.rig.blocks.num_gpu_blocks == BLOCKS
    assert pair.rig.published.granules_lent == 0


@pytest.mark.parametrize("by_handle", [True], ids=["by handle"])
def test_an_idle_host_waits_for_pages_that_do_not_come_back_for_a_bounded_time(
    pair: LenderAndGuest,
) -> None:
    scheduler = pair.rig.scheduler
    scheduler.stop_lending()
    assert scheduler.has_requests()
    pair.rig.turn()
    pair.rig.now_ns += RETIRE_NS
    pair.rig.turn()
    assert not scheduler.has_requests()
    pair.guest.give_all()
    pair.rig.add("next", prompt_of(9, 50), 5)
    pair.rig.settle(60)
    assert scheduler.lender is None, "the next request finds them"
