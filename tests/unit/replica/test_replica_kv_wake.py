"""An idle guest that owes memory is woken, and nobody else."""

import asyncio
from pathlib import Path

import pytest

from executor import ControlPage, Grant, GuestState, HostState
from rose.replica.kv_wake import KvWaker, owes_memory, wanted_back
from tests.patience import PATIENCE_S


class Core:
    """Counts what ends the wait of an engine core."""

    def __init__(self) -> None:
        self.woken = 0

    async def is_paused(self) -> bool:
        self.woken += 1
        return False


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
        waker = KvWaker(core)
        waker.start()
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
        waker.stop()


@pytest.mark.parametrize(
    ("socket", "missing", "wanted"), [("", 3, False), ("/pages", 0, False), ("/pages", 3, True)]
)
def test_a_host_that_lends_by_handle_is_heard_when_it_misses_memory(
    monkeypatch: pytest.MonkeyPatch, socket: str, missing: int, wanted: bool
) -> None:
    monkeypatch.setenv("ROSE_PAGE_SOCKET", socket)
    assert wanted_back(HostState(granules_total=9, reserve_missing=missing)) is wanted
    assert not wanted_back(None)


async def test_an_idle_core_is_woken_while_its_host_misses_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_ROLE", "guest")
    monkeypatch.setenv("ROSE_CONTROL_PAGE", str(tmp_path / "page"))
    monkeypatch.setenv("ROSE_PAGE_SOCKET", str(tmp_path / "pages"))
    with ControlPage.create(tmp_path / "page") as page:
        core = Core()
        waker = KvWaker(core)
        waker.start()
        page.host.write(HostState(granules_total=9, granules_lent=3, reserve_missing=1))
        await asyncio.sleep(0.2)
        waker.stop()
        assert core.woken > 2


@pytest.mark.parametrize("role", ["dedicated", ""])
async def test_a_replica_without_a_host_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setenv("ROSE_ROLE", role)
    monkeypatch.setenv("ROSE_CONTROL_PAGE", str(tmp_path / "none"))
    waker = KvWaker(Core())
    waker.start()
    waker.stop()


async def test_whatever_a_core_raises_the_next_look_wakes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Moody(Core):
        async def is_paused(self) -> bool:
            self.woken += 1
            if self.woken == 1:
                raise RuntimeError("unheard of")
            recovered.set()
            return False

    monkeypatch.setenv("ROSE_ROLE", "guest")
    monkeypatch.setenv("ROSE_CONTROL_PAGE", str(tmp_path / "page"))
    recovered = asyncio.Event()
    with ControlPage.create(tmp_path / "page") as page:
        page.guest.write(GuestState(granules_total=9, granules_mapped=9))
        page.grant.write(Grant(kv_granule_cap=4))
        waker = KvWaker(Moody())
        waker.start()
        async with asyncio.timeout(PATIENCE_S):
            await recovered.wait()
        waker.stop()
    assert "unheard of" in caplog.text
