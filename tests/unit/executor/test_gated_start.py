"""The passes of a guest's start wait for its host, as its steps do."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from executor import ControlPage, Grant, GrantMode
from executor.errors import ExecutorError
from executor.guest.gate_client import StartGate
from executor.vllm.reserved_worker import GatedStart
from tests.harness.seated_host import SeatedHost

TICK_NS = 1_000_000


@pytest.fixture
def page(tmp_path: Path) -> Iterator[ControlPage]:
    with ControlPage.create(tmp_path / "page") as made:
        yield made


class Clock:
    """Time passes while somebody sleeps; `after` happens then."""

    def __init__(self) -> None:
        self.now_ns = time.monotonic_ns()
        self.after: list[tuple[int, Callable[[], object]]] = []
        self.sleeps = 0

    def __call__(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)
        self.sleeps += 1
        assert self.sleeps < 10_000, "nothing ends this wait"
        while self.after and self.after[0][0] <= self.sleeps:
            self.after.pop(0)[1]()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def grant(page: ControlPage, clock: Clock, **changes: Any) -> None:
    settings: dict[str, Any] = {
        "mode": GrantMode.RUN,
        "token_budget": 512,
        "max_sequences": 8,
        "epoch": 1,
        "heartbeat_ns": clock.now_ns,
        "expiry_ns": clock.now_ns + 500 * TICK_NS,
    }
    page.grant.write(Grant(**(settings | changes)))


@pytest.fixture
def host(page: ControlPage, clock: Clock) -> SeatedHost:
    seated = SeatedHost(page, clock)
    seated.tell()
    return seated


def gate(page: ControlPage, clock: Clock) -> StartGate:
    return StartGate(page, clock_ns=clock, sleep=clock.sleep)


@pytest.mark.usefixtures("host")
def test_a_pass_runs_at_once_beside_an_idle_host(page: ControlPage, clock: Clock) -> None:
    grant(page, clock)
    asked = gate(page, clock)
    asked.wait()
    assert (asked.passes, asked.waited_ns, clock.sleeps) == (1, 0, 0)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_it_waits_for_a_busy_host_whatever_slack_is_lent(
    page: ControlPage, host: SeatedHost, clock: Clock, share: float
) -> None:
    host.tell(running=3)
    grant(page, clock, slack_share=share)
    clock.after.append((7, host.tell))
    asked = gate(page, clock)
    asked.wait()
    assert clock.sleeps == 7
    assert asked.waited_ns == 7 * 2 * TICK_NS


@pytest.mark.parametrize("mode", [GrantMode.FREEZE, GrantMode.KILL, GrantMode.DRAIN])
@pytest.mark.usefixtures("host")
def test_it_waits_for_a_grant_to_run(page: ControlPage, clock: Clock, mode: GrantMode) -> None:
    grant(page, clock, mode=mode)
    clock.after.append((5, lambda: grant(page, clock)))
    gate(page, clock).wait()
    assert clock.sleeps == 5


def test_nobody_who_grants_any_more_freezes_a_start_too(
    page: ControlPage, host: SeatedHost, clock: Clock
) -> None:
    grant(page, clock)
    clock.now_ns += 10**9
    host.beat()
    clock.after.append((300, lambda: grant(page, clock)))
    gate(page, clock).wait()
    assert clock.sleeps == 300


def test_a_start_beside_a_host_that_beats_no_more_is_frozen(
    page: ControlPage, host: SeatedHost, clock: Clock
) -> None:
    clock.now_ns += 2 * 10**9
    grant(page, clock)
    clock.after.append((4, host.beat))
    gate(page, clock).wait()
    assert clock.sleeps == 4


class Runner:
    """Stands in for a model runner."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)

    def get_model(self) -> nn.Module:
        return self.model


class StandInWorker:
    """Base class under the mixin; `passes` of the model in its warm-up."""

    def __init__(self, passes: int = 3) -> None:
        self.model_runner = Runner()
        self.passes = passes
        self.loaded: dict[str, Any] = {}

    def load_model(self, **options: Any) -> None:
        self.loaded = options

    def compile_or_warm_up_model(self) -> str:
        for _ in range(self.passes):
            self.model_runner.model(torch.zeros(1, 2))
        return "compiled"


class Worker(GatedStart, StandInWorker):
    pass


def as_guest(monkeypatch: pytest.MonkeyPatch, page: ControlPage, **changes: str) -> None:
    environ = {"ROSE_ROLE": "guest", "ROSE_GATED_START": "1", "ROSE_CONTROL_PAGE": str(page.path)}
    for name, value in (environ | changes).items():
        monkeypatch.setenv(name, value)


def test_a_guest_whose_node_grants_from_the_start_on_has_a_gate(
    page: ControlPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_guest(monkeypatch, page)
    worker = Worker()
    worker.load_model()
    assert worker.start_gate is not None
    assert len(worker.model_runner.model._forward_pre_hooks) == 1


@pytest.fixture
def gated(
    page: ControlPage, host: SeatedHost, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> StartGate:
    """The gate of every worker, beside an idle host; time stands still."""
    asked = gate(page, clock)
    monkeypatch.setattr(StartGate, "from_environ", lambda _: asked)
    host.tell()
    grant(page, clock)
    return asked


def test_every_pass_of_the_start_asks_and_no_step_afterwards(
    gated: StartGate, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker()
    worker.load_model(load_dummy_weights=True)
    assert worker.loaded == {"load_dummy_weights": True}
    with caplog.at_level(logging.INFO):
        assert worker.compile_or_warm_up_model() == "compiled"
    assert gated.passes == 3
    assert "3 passes of the start waited" in caplog.text
    worker.model_runner.model(torch.zeros(1, 2))
    assert gated.passes == 3, "a step is the scheduler's to gate"


@pytest.mark.usefixtures("gated")
def test_a_start_that_breaks_leaves_no_hook_behind() -> None:
    worker = Worker()
    worker.load_model()
    worker.model_runner.model.forward = lambda *_: 1 / 0  # type: ignore[assignment,method-assign]
    with pytest.raises(ZeroDivisionError):
        worker.compile_or_warm_up_model()
    assert not worker.model_runner.model._forward_pre_hooks


@pytest.mark.usefixtures("gated")
def test_what_is_captured_does_not_run_and_does_not_wait(
    host: SeatedHost,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    host.tell(running=1)
    worker = Worker()
    worker.load_model()
    worker.compile_or_warm_up_model()
    assert "asked the gate for no pass" in caplog.text, "a start that is not gated is said"


@pytest.mark.parametrize(
    "changes", [{"ROSE_ROLE": "host"}, {"ROSE_ROLE": ""}, {"ROSE_GATED_START": "0"}]
)
def test_nobody_else_waits(
    page: ControlPage, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]
) -> None:
    as_guest(monkeypatch, page, **changes)
    worker = Worker()
    worker.load_model()
    assert worker.compile_or_warm_up_model() == "compiled"
    assert worker.start_gate is None
    assert not worker.model_runner.model._forward_pre_hooks


def test_a_page_that_is_not_there_ends_the_start(
    tmp_path: Path, page: ControlPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_guest(monkeypatch, page, ROSE_CONTROL_PAGE=str(tmp_path / "absent"))
    with pytest.raises(ExecutorError):
        Worker().load_model()
