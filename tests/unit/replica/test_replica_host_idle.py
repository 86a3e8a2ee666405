"""New weights wait for an idle host, and for as long as they may; then they are not taken."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from executor import ControlPage, GrantMode
from executor.freeze_reason import FreezeReason
from rose.replica.control import GuestControl, HostBusyError
from tests.harness.seated_host import SeatedHost, granted

PATIENCE_S = 0.02


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ControlPage:
    monkeypatch.setenv("ROSE_ROLE", "guest")
    monkeypatch.setenv("ROSE_CONTROL_PAGE", str(tmp_path / "page"))
    return granted(ControlPage.create(tmp_path / "page"))


async def test_an_idle_host_lets_the_switch_begin_at_once(page: ControlPage) -> None:
    SeatedHost(page).tell()
    await GuestControl().wait_host_idle(PATIENCE_S)


async def test_a_busy_host_gets_no_new_weights_beside_it(page: ControlPage) -> None:
    SeatedHost(page).tell(running=1)
    with pytest.raises(HostBusyError, match="ask again later"):
        await GuestControl().wait_host_idle(PATIENCE_S)


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
        await GuestControl().wait_host_idle(PATIENCE_S)
    granted(page)
    await GuestControl().wait_host_idle(PATIENCE_S)
    # A guest that no job has leased follows versions, so that a lease begins at once.
    granted(page, mode=GrantMode.FREEZE, reason=FreezeReason.NO_LEASE, token_budget=0)
    await GuestControl().wait_host_idle(PATIENCE_S)


async def test_a_host_that_becomes_idle_lets_them_begin(page: ControlPage) -> None:
    host = SeatedHost(page)
    host.tell(running=1)
    waiting = asyncio.create_task(GuestControl().wait_host_idle(5.0))
    await asyncio.sleep(PATIENCE_S)
    assert not waiting.done()
    host.tell()
    await waiting


async def test_an_idle_state_without_a_host_counts_as_busy(page: ControlPage) -> None:
    gone = SeatedHost(page)
    gone.tell()
    gone.close()
    with pytest.raises(HostBusyError):
        await GuestControl().wait_host_idle(PATIENCE_S)


async def test_a_missing_page_is_told_and_taken_for_a_busy_host(
    monkeypatch: pytest.MonkeyPatch, page: ControlPage, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ROSE_CONTROL_PAGE", f"{page.path}.gone")
    began_s = asyncio.get_running_loop().time()
    with pytest.raises(HostBusyError):
        await GuestControl().wait_host_idle(PATIENCE_S)
    assert asyncio.get_running_loop().time() - began_s >= PATIENCE_S
    assert "cannot open" in caplog.text


async def test_a_replica_without_host_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, page: ControlPage
) -> None:
    SeatedHost(page).tell(running=1)
    monkeypatch.setenv("ROSE_ROLE", "dedicated")
    await GuestControl().wait_host_idle(PATIENCE_S)
