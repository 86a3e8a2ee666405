"""ROSE's general plugin of vLLM, and the scheduler class that vLLM takes with it."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config.scheduler import SchedulerConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from executor.vllm.host.plugin import register, warn_of_scheduler
from executor.vllm.host.scheduler import ObservedScheduler

_MINE = "vllm.v1.core.sched.scheduler.Scheduler"


@pytest.fixture(autouse=True)
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchedulerConfig, "get_scheduler_cls", SchedulerConfig.get_scheduler_cls)


@pytest.mark.parametrize(
    ("role", "named", "taken"),
    [
        ("host", None, ObservedScheduler),
        ("host", _MINE, Scheduler),
        ("guest", None, AsyncScheduler),
        (None, None, AsyncScheduler),
    ],
)
def test_the_role_alone_makes_the_scheduler_the_observing_one(
    role: str | None, named: str | None, taken: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROSE_ROLE", raising=False)
    if role:
        monkeypatch.setenv("ROSE_ROLE", role)
    register()
    register()
    config: Any = SimpleNamespace(scheduler_cls=named, async_scheduling=True)
    assert SchedulerConfig.get_scheduler_cls(config) is taken


def test_a_vllm_that_cannot_be_told_serves_on_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ROSE_ROLE", "host")
    monkeypatch.delattr(SchedulerConfig, "get_scheduler_cls")
    register()
    assert "serves on without ROSE" in caplog.text


def test_a_host_with_another_scheduler_says_so(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_scheduler(type("Mine", (ObservedScheduler,), {}))
    assert not caplog.records
    warn_of_scheduler(AsyncScheduler)
    assert "scheduler is AsyncScheduler, so no guest" in caplog.text
    assert "start it without --scheduler-cls" in caplog.text
