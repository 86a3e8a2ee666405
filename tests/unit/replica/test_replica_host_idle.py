from pathlib import Path

import pytest

from executor import ControlPage, HostState
from rose.replica import host_idle


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ControlPage:
    monkeypatch.setenv("ROSE_ROLE", "guest")
    monkeypatch.setenv("ROSE_CONTROL_PAGE", str(tmp_path / "page"))
    monkeypatch.setattr(host_idle, "PATIENCE_S", 0.02)
    return ControlPage.create(tmp_path / "page")


async def test_an_idle_host_lets_the_switch_begin_at_once(page: ControlPage) -> None:
    page.host.write(HostState())
    assert await host_idle.wait_host_idle()


async def test_a_busy_host_delays_the_switch_by_no_more_than_the_bound(
    page: ControlPage, caplog: pytest.LogCaptureFixture
) -> None:
    page.host.write(HostState(running=1))
    assert not await host_idle.wait_host_idle()
    assert "not idle" in caplog.text


async def test_a_missing_page_is_told_and_delays_nothing(
    monkeypatch: pytest.MonkeyPatch, page: ControlPage, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ROSE_CONTROL_PAGE", f"{page.path}.gone")
    assert not await host_idle.wait_host_idle()
    assert "cannot open" in caplog.text


async def test_a_replica_without_host_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, page: ControlPage
) -> None:
    page.host.write(HostState(running=1))
    monkeypatch.setenv("ROSE_ROLE", "dedicated")
    assert await host_idle.wait_host_idle()
