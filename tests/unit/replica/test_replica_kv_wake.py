"""An idle guest that owes memory is woken, and nobody else."""

import asyncio
from pathlib import Path

import pytest

from executor import ControlPage, Grant, GuestState, HostState
from rose.replica.control import GuestControl, HostBusyError, owes_memory
from tests.harness.waiting import PATIENCE_S

# The wake of a core catches errors of this module: its import must not come with the first wake.
pytest.importorskip("vllm.v1.engine.exceptions")


class Core:
    """Counts what ends the wait of an engine core."""

    failures: tuple[type[Exception], ...] = ()

    def __init__(self) -> None:
        self.woken = 0

    async def wake(self) -> None:
        self.woken += 1


@pytest.mark.parametrize(
    ("cap", "mapped", "owes"), [(0, 9, False), (5, 9, True), (9, 9, False), (1, 1, False)]
)
def test_memory_is_owed_above_a_cap(cap: int, mapped: int, owes: bool) -> None:
    guest = GuestState(granules_total=9, granules_mapped=mapped)
    assert owes_memory(Grant(kv_granule_cap=cap), guest) is owes
    assert not owes_memory(None, guest)
    assert not owes_memory(Grant(kv_granule_cap=cap), None)


async def test_the_core_is_woken_until_the_memory_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_ROLE", "guest")
    monkeypatch.setenv("ROSE_CONTROL_PAGE", str(tmp_path / "page"))
    with ControlPage.create(tmp_path / "page") as page:
        page.guest.write(GuestState(granules_total=9, granules_mapped=9))
        core = Core()
        control = GuestControl()
        control.start_waking(core)
        await asyncio.sleep(0.1)
        assert core.woken == 0
        page.grant.write(Grant(kv_granule_cap=4))
        await asyncio.sleep(0.2)
        assert core.woken > 2
        page.guest.write(GuestState(granules_total=9, granules_mapped=4))
        await asyncio.sleep(0.05)
        woken = core.woken
        await asyncio.sleep(0.1)
        assert core.woken == woken
        control.stop_waking()


@pytest.mark.parametrize(
    ("socket", "missing", "wanted"), [("", 3, False), ("/pages", 0, False), ("/pages", 3, True)]
)
async def test_an_idle_core_is_woken_while_a_host_that_lends_by_handle_misses_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, socket: str, missing: int, wanted: bool
) -> None:
    monkeypatch.setenv("ROSE_ROLE", "guest")
    monkeypatch.setenv("ROSE_CONTROL_PAGE", str(tmp_path / "page"))
    monkeypatch.setenv("ROSE_PAGE_SOCKET", socket)
    with ControlPage.create(tmp_path / "page") as page:
        core = Core()
        control = GuestControl()
        control.start_waking(core)
        page.host.write(HostState(granules_total=9, granules_lent=3, reserve_missing=missing))
        await asyncio.sleep(0.2)
        control.stop_waking()
        assert (core.woken > 2) is wanted


async def test_memory_is_returned_by_the_page_that_the_engine_has_though_its_file_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken = asyncio.Event()

    class Core:
        failures: tuple[type[Exception], ...] = ()

        async def wake(self) -> None:
            woken.set()

    monkeypatch.setenv("ROSE_ROLE", "guest")
    monkeypatch.setenv("ROSE_CONTROL_PAGE", str(tmp_path / "page"))
    with ControlPage.create(tmp_path / "page") as page:
        control = GuestControl()
        assert control.page is control.page
        page.path.unlink()
        control.start_waking(Core())
        page.guest.write(GuestState(granules_total=9, granules_mapped=9))
        page.grant.write(Grant(kv_granule_cap=4))
        async with asyncio.timeout(5.0):
            await woken.wait()
        control.stop_waking()
        with pytest.raises(HostBusyError):
            await control.wait_host_idle(0.01)


@pytest.mark.parametrize("role", ["dedicated", ""])
async def test_a_replica_without_a_host_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setenv("ROSE_ROLE", role)
    monkeypatch.setenv("ROSE_CONTROL_PAGE", str(tmp_path / "none"))
    control = GuestControl()
    control.start_waking(Core())
    control.stop_waking()


async def test_whatever_a_core_raises_the_next_look_wakes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Moody(Core):
        async def wake(self) -> None:
            self.woken += 1
            if self.woken == 1:
                raise RuntimeError("unheard of")
            recovered.set()

    monkeypatch.setenv("ROSE_ROLE", "guest")
    monkeypatch.setenv("ROSE_CONTROL_PAGE", str(tmp_path / "page"))
    recovered = asyncio.Event()
    with ControlPage.create(tmp_path / "page") as page:
        page.guest.write(GuestState(granules_total=9, granules_mapped=9))
        page.grant.write(Grant(kv_granule_cap=4))
        control = GuestControl()
        control.start_waking(Moody())
        async with asyncio.timeout(PATIENCE_S):
            await recovered.wait()
        control.stop_waking()
    assert "unheard of" in caplog.text
