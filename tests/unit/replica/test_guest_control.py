"""A guest's control page: an idle host lets weights in, and owed memory wakes an idle core."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from executor import ControlPage, Grant, GrantMode, GuestState, HostState
from executor.freeze_reason import FreezeReason
from rose.replica.control import GuestControl, HostBusyError, owes_memory
from tests.harness.seated_host import SeatedHost, granted
from tests.harness.waiting import PATIENCE_S

# The wake of a core catches errors of this module: its import must not come with the first wake.
pytest.importorskip("vllm.v1.engine.exceptions")

IDLE_PATIENCE_S = 0.02


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlPage]:
    monkeypatch.setenv("ROSE_ROLE", "guest")
    monkeypatch.setenv("ROSE_CONTROL_PAGE", str(tmp_path / "page"))
    with ControlPage.create(tmp_path / "page") as made:
        yield made


async def wait_host_idle() -> None:
    await GuestControl().wait_host_idle(IDLE_PATIENCE_S)


async def test_an_idle_host_lets_the_switch_begin_at_once(page: ControlPage) -> None:
    SeatedHost(granted(page)).tell()
    await wait_host_idle()


@pytest.mark.parametrize(
    "grant",
    [
        {"mode": GrantMode.FREEZE},
        {"mode": GrantMode.FREEZE, "reason": FreezeReason.OPERATOR_HOLD},
        {"mode": GrantMode.FREEZE, "reason": FreezeReason.PRESSURE},
        {"mode": GrantMode.FREEZE, "reason": FreezeReason.NO_LEASE, "expiry_ns": 1},
        {"mode": GrantMode.DRAIN},
        {"mode": GrantMode.KILL},
        {"expiry_ns": 1},
        {"heartbeat_ns": 1},
        {"token_budget": 0, "max_sequences": 0},
    ],
    ids=str,
)
async def test_an_idle_host_gets_no_new_weights_beside_it_without_a_live_grant(
    page: ControlPage, grant: dict[str, Any]
) -> None:
    SeatedHost(page).tell()
    granted(page, **grant)
    with pytest.raises(HostBusyError, match="no grant"):
        await wait_host_idle()
    granted(page)
    await wait_host_idle()
    # A guest that no job has leased follows versions, so that a lease begins at once.
    granted(page, mode=GrantMode.FREEZE, reason=FreezeReason.NO_LEASE, token_budget=0)
    await wait_host_idle()


async def test_a_busy_host_gets_no_new_weights_until_it_is_idle(page: ControlPage) -> None:
    host = SeatedHost(granted(page))
    host.tell(running=1)
    with pytest.raises(HostBusyError, match="ask again later"):
        await wait_host_idle()
    waiting = asyncio.create_task(GuestControl().wait_host_idle(5.0))
    await asyncio.sleep(IDLE_PATIENCE_S)
    assert not waiting.done()
    host.tell()
    await waiting


async def test_an_idle_state_without_a_host_counts_as_busy(page: ControlPage) -> None:
    gone = SeatedHost(granted(page))
    gone.tell()
    gone.close()
    with pytest.raises(HostBusyError):
        await wait_host_idle()


async def test_a_missing_page_is_told_and_taken_for_a_busy_host(
    monkeypatch: pytest.MonkeyPatch, page: ControlPage, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ROSE_CONTROL_PAGE", f"{page.path}.gone")
    began_s = asyncio.get_running_loop().time()
    with pytest.raises(HostBusyError):
        await wait_host_idle()
    assert asyncio.get_running_loop().time() - began_s >= IDLE_PATIENCE_S
    assert "cannot open" in caplog.text


# ---- memory that is owed ----


class WakeableCore:
    """Counts what ends the wait of an engine core; the first wake raises `error`."""

    failures: tuple[type[Exception], ...] = ()

    def __init__(self, error: Exception | None = None) -> None:
        self.woken = 0
        self.wakes = asyncio.Event()
        self._error = error

    async def wake(self) -> None:
        self.woken += 1
        if self._error is not None and self.woken == 1:
            raise self._error
        self.wakes.set()


@contextmanager
def waking(core: WakeableCore) -> Iterator[GuestControl]:
    control = GuestControl()
    control.start_waking(core)
    yield control
    control.stop_waking()


def owe(page: ControlPage) -> None:
    page.guest.write(GuestState(granules_total=9, granules_mapped=9))
    page.grant.write(Grant(kv_granule_cap=4))


@pytest.mark.parametrize(
    ("cap", "mapped", "owes"), [(0, 9, False), (5, 9, True), (9, 9, False), (1, 1, False)]
)
def test_memory_is_owed_above_a_cap(cap: int, mapped: int, owes: bool) -> None:
    guest = GuestState(granules_total=9, granules_mapped=mapped)
    assert owes_memory(Grant(kv_granule_cap=cap), guest) is owes
    assert not owes_memory(None, guest)
    assert not owes_memory(Grant(kv_granule_cap=cap), None)


async def test_the_core_is_woken_until_the_memory_is_back(page: ControlPage) -> None:
    page.guest.write(GuestState(granules_total=9, granules_mapped=9))
    core = WakeableCore()
    with waking(core):
        await asyncio.sleep(0.1)
        assert core.woken == 0
        owe(page)
        await asyncio.sleep(0.2)
        assert core.woken > 2
        page.guest.write(GuestState(granules_total=9, granules_mapped=4))
        await asyncio.sleep(0.05)
        woken = core.woken
        await asyncio.sleep(0.1)
        assert core.woken == woken


@pytest.mark.parametrize(
    ("socket", "missing", "wanted"), [("", 3, False), ("/pages", 0, False), ("/pages", 3, True)]
)
async def test_an_idle_core_is_woken_while_a_host_that_lends_by_handle_misses_memory(
    page: ControlPage, monkeypatch: pytest.MonkeyPatch, socket: str, missing: int, wanted: bool
) -> None:
    monkeypatch.setenv("ROSE_PAGE_SOCKET", socket)
    core = WakeableCore()
    with waking(core):
        page.host.write(HostState(granules_total=9, granules_lent=3, reserve_missing=missing))
        await asyncio.sleep(0.2)
    assert (core.woken > 2) is wanted


async def test_memory_is_returned_by_the_page_that_the_engine_has_though_its_file_is_gone(
    page: ControlPage,
) -> None:
    control, core = GuestControl(), WakeableCore()
    assert control.page is control.page
    page.path.unlink()
    control.start_waking(core)
    owe(page)
    await asyncio.wait_for(core.wakes.wait(), PATIENCE_S)
    control.stop_waking()
    with pytest.raises(HostBusyError):
        await control.wait_host_idle(0.01)


async def test_whatever_a_core_raises_the_next_look_wakes_it(
    page: ControlPage, caplog: pytest.LogCaptureFixture
) -> None:
    owe(page)
    core = WakeableCore(RuntimeError("unheard of"))
    with waking(core):
        await asyncio.wait_for(core.wakes.wait(), PATIENCE_S)
    assert "unheard of" in caplog.text


@pytest.mark.parametrize("role", ["dedicated", ""])
async def test_a_replica_without_a_host_does_not_wait_and_is_not_woken(
    page: ControlPage, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setenv("ROSE_ROLE", role)
    SeatedHost(granted(page)).tell(running=1)
    await wait_host_idle()
    monkeypatch.setenv("ROSE_CONTROL_PAGE", f"{page.path}.none")
    with waking(WakeableCore()):
        pass
