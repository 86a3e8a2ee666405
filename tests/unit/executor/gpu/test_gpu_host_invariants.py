"""A lending host on a GPU under random load, guests, deaths and failures: what never happens."""

import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gpu_host_cases import BLOCKS, STEP_NS, DriverGuest, GpuHostRig, HandleGuest, gpu_host
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_cases import undisturbed
from vllm.v1.request import RequestStatus

import executor.vllm.host.scheduler
from executor.control_page.page import PAGE_FOLDER
from executor.errors import DeviceError, DeviceMemoryShort
from executor.kv.lending import LendingLimits
from tests.fakes.cuda.driver import PAGE, StandInDevice

KV_PAGES = 32
# The KV cache, an alias page of the host's and one of the window through which it zeroes pages.
DEVICE_PAGES = KV_PAGES + 2
CALLS = ("create", "map", "unmap", "set_access", "fill", "release", "export_handle")

ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 480), st.integers(1, 120)),
        st.tuples(st.just("turn"), st.integers(1, 30)),
        st.tuples(st.just("grow"), st.integers(1, 40)),
        st.tuples(st.just("obey")),
        st.tuples(st.just("die")),
        st.tuples(st.just("abort"), st.integers(0, 100)),
        st.tuples(st.just("fail"), st.sampled_from(CALLS), st.integers(0, 6), st.booleans()),
    ),
    min_size=10,
    max_size=40,
)


class LendingWorld:
    """One host, at most one guest, and what must hold between any two of their acts."""

    def __init__(self, rig: GpuHostRig, device: StandInDevice, *, by_handle: bool) -> None:
        self.rig = rig
        self._device = device
        self._by_handle = by_handle
        self.dead: set[int] = set()
        self.guest: DriverGuest | None = None
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self._rng = random.Random(7)

    def act(self, name: str, *arguments: Any) -> None:
        getattr(self, name)(*arguments)
        self.check()

    def add(self, tokens: int, count: int) -> None:
        if len(self.prompts) >= 12:
            return
        name = f"r{len(self.prompts)}"
        prompt = [self._rng.randrange(96) for _ in range(tokens)]
        self.prompts[name] = (prompt, min(count, 511 - tokens))
        self.rig.add(name, *self.prompts[name])

    def turn(self, count: int) -> None:
        for _ in range(count):
            self.rig.turn()
            self.check()

    def grow(self, most: int) -> None:
        if self.guest is None and not self.dead:
            if self._by_handle and not isinstance(
                self._source, executor.cuda.page_server.PageServer
            ):
                return
            kind = HandleGuest if self._by_handle else DriverGuest
            self.guest = kind(self._device, self.rig)
        if self.guest is not None:
            self.guest.grow(most)

    def obey(self) -> None:
        if self.guest is not None:
            self.guest.obey()

    def die(self) -> None:
        if self.guest is None:
            return
        self.rig.driver.fails = lambda _name, _number: None
        if self._by_handle:
            self._source.step()
            self.dead |= {borrower.process for borrower in self._source._borrowers}
        self.guest.die()
        self.guest = None
        if self._by_handle:
            self._source.step()
            self.dead.clear()

    def abort(self, number: int) -> None:
        if self.prompts:
            victim = f"r{number % len(self.prompts)}"
            self.rig.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)

    def fail(self, call: str, after: int, short: bool) -> None:
        """The host's driver refuses one call, once."""
        left = [self.rig.driver.calls[call] + after]

        def fails(name: str, number: int) -> None:
            if left and name == call and number == left[0]:
                left.clear()
                raise (DeviceMemoryShort if short else DeviceError)(f"{call} fails by script")

        self.rig.driver.fails = fails

    def check(self) -> None:
        self.rig.check()
        if self.guest is not None:
            theirs = self.guest.memory()
            ours = set(map(id, self.rig.own_memory()))
            assert not ours & set(map(id, theirs)), "a page is in two hands"
            assert len(set(map(id, theirs))) == len(theirs)

    @property
    def _source(self) -> Any:
        return self.rig.reservation.source


@contextmanager
def world(*, by_handle: bool, depth: int = 1, caching: bool = True) -> Iterator[LendingWorld]:
    with (
        tempfile.TemporaryDirectory(dir=PAGE_FOLDER) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        device = StandInDevice(DEVICE_PAGES * PAGE)
        limits = LendingLimits(calm_ns=5 * STEP_NS, cold_ns=20 * STEP_NS)
        patch.setattr(executor.vllm.host.scheduler, "lending_limits", lambda _settings: limits)
        patch.setattr(time, "sleep", never)
        with gpu_host(
            Path(folder), device, by_handle=by_handle, depth=depth, caching=caching
        ) as rig:
            made = LendingWorld(rig, device, by_handle=by_handle)
            patch.setattr("executor.cuda.page_server.has_ended", made.dead.__contains__)
            yield made
            made.rig.driver.fails = lambda _name, _number: None
            made.die()


def never(seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """Refuse to wait in the host's thread; threads that an earlier test left sleep on."""
    if threading.current_thread() is threading.main_thread():
        raise AssertionError("a host waits")
    sleep(seconds)


@pytest.mark.parametrize("depth", [1, 2], ids=["one step in flight", "two steps in flight"])
@pytest.mark.parametrize("by_handle", [False, True], ids=["by the driver", "by handle"])
@settings(suppress_health_check=list(HealthCheck))
@given(acts=ACTS, caching=st.booleans())
def test_no_page_is_in_two_hands_and_no_block_without_one_whatever_happens(
    by_handle: bool, depth: int, acts: list[tuple[Any, ...]], caching: bool
) -> None:
    with world(by_handle=by_handle, depth=depth, caching=caching) as made:
        for act in acts:
            made.act(*act)
        # The guest goes, as the ladder sees to: everything comes back, and every request ends.
        made.die()
        rig = made.rig
        rig.driver.fails = lambda _name, _number: None
        for _ in range(3_000):
            if not rig.scheduler.has_requests() and not rig.in_flight:
                break
            made.turn(1)
        else:
            raise AssertionError("the host is stuck")
        for name, (prompt, count) in made.prompts.items():
            assert rig.outputs[name] == undisturbed(prompt, count)[: len(rig.outputs[name])]
            aborted = "abort" in rig.ends.get(name, "abort")
            assert aborted or len(rig.outputs[name]) == count
        all_is_back(rig)


def all_is_back(rig: GpuHostRig) -> None:
    rig.scheduler.stop_lending()
    for _ in range(200):
        if rig.lender is None:
            break
        rig.now_ns += 10 * STEP_NS
        rig.scheduler.schedule()
    assert rig.lender is None
    assert len(rig.own_memory()) == KV_PAGES
    assert rig.blocks.num_gpu_blocks == BLOCKS
    assert rig.blocks.get_num_free_blocks() == BLOCKS - 1
    assert type(rig.blocks.free_block_queue).__module__.startswith("vllm.")
