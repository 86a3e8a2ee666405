"""The guest's side of the page: state that it publishes, the gate of its start, and its end."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from executor import ControlPage, ExecutorError, Grant, GrantMode, GuestState, Run, Yield
from executor.engine_settings import EngineSettings
from executor.guest.gate_client import (
    EXIT_BROKEN,
    EXIT_KILLED,
    EXIT_ORPHANED,
    FIRST_MODEL,
    YIELD_SLEEP_S,
    EngineLoad,
    GateClient,
    GrantLiveness,
    KvMapped,
    StartGate,
    Watchdog,
)
from executor.guest.plugin import gate_limits, step_model
from executor.step_decision import GateLimits
from executor.vllm.rank_worker import GatedStart
from slo import StepModel, StepProfile
from tests.harness.seated_host import SeatedHost

MS = 1_000_000


LOAD = EngineLoad(running=2, waiting=1, kv_used=5)


class GateClientRig:
    def __init__(self, page: ControlPage) -> None:
        self.page = page
        self.now_ns = 10_000 * MS
        self.sleeps: list[float] = []
        self.meanwhile: Callable[[], object] = lambda: None
        self.environ = {"ROSE_POLICY_VERSION": "3"}
        self.client = GateClient(
            page,
            kv=KvMapped(4096),
            clock_ns=lambda: self.now_ns,
            sleep=self.sleep,
            environ=self.environ,
        )
        self.host = SeatedHost(page, lambda: self.now_ns)
        self.host.tell()

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.meanwhile()

    def grant(self, mode: GrantMode = GrantMode.RUN) -> None:
        self.page.grant.write(
            Grant(
                mode,
                token_budget=64,
                max_sequences=4,
                expiry_ns=self.now_ns + 500 * MS,
                heartbeat_ns=self.now_ns,
            )
        )

    def state(self) -> GuestState:
        state = self.page.guest.read()
        assert state is not None
        return state


def test_a_guest_without_a_grant_yields_and_does_not_spin(rig: GateClientRig) -> None:
    assert rig.client.ask(LOAD) == Yield("page_unreadable")
    assert set(rig.sleeps) == {YIELD_SLEEP_S}
    assert rig.state().gate_reason == "page_unreadable"


def test_a_frozen_guest_looks_often_and_its_ranks_hear_of_few_steps(rig: GateClientRig) -> None:
    rig.grant(GrantMode.FREEZE)
    steps = 0
    while len(rig.sleeps) < 2_000:
        steps += isinstance(rig.client.ask(LOAD), Yield)
    assert steps <= 250
    assert max(rig.sleeps) <= 0.0005
    assert sum(rig.sleeps) / steps < 0.005


def test_a_frozen_guest_runs_with_its_next_look(rig: GateClientRig) -> None:
    rig.grant(GrantMode.FREEZE)
    rig.meanwhile = rig.grant
    assert rig.client.ask(LOAD) == Run(64, 4)
    assert rig.sleeps == [YIELD_SLEEP_S]


def test_a_frozen_guest_attends_to_its_memory_and_to_a_step_in_flight(rig: GateClientRig) -> None:
    rig.grant(GrantMode.FREEZE)
    assert rig.client.ask(LOAD, lambda: True) == Yield("frozen")
    assert rig.sleeps == [YIELD_SLEEP_S]
    rig.client.scheduled(LOAD, 12)
    assert rig.client.ask(LOAD) == Yield("frozen")
    assert rig.sleeps == [YIELD_SLEEP_S] * 2


def test_a_granted_step_is_published_from_begin_to_end(rig: GateClientRig) -> None:
    rig.grant()
    assert rig.client.ask(LOAD) == Run(64, 4)
    assert rig.sleeps == []
    rig.client.scheduled(LOAD, 12)
    assert rig.state().in_step
    rig.now_ns += 8 * MS
    rig.client.stepped(EngineLoad(2, 0, 6), tokens=12, sequences=2, sampled=2)
    assert rig.state() == GuestState(
        step_seq=1,
        in_step=False,
        last_step_ns=8 * MS,
        tokens_total=2,
        running=2,
        waiting=0,
        kv_used=6,
        bytes_mapped=4096,
        policy_version=3,
        gate_reason="ok",
        heartbeat_ns=rig.now_ns,
    )


def test_yielded_time_adds_up_and_is_published_every_50_ms(rig: GateClientRig) -> None:
    rig.grant(GrantMode.FREEZE)
    published = set()
    for _ in range(100):
        assert rig.client.ask(LOAD) == Yield("frozen")
        published.add(rig.state().heartbeat_ns)
        rig.now_ns += 2 * MS
    assert 4 <= len(published) <= 5
    rig.grant()
    rig.client.ask(LOAD)
    rig.client.scheduled(LOAD, 1)
    assert rig.state().yielded_ns == 200 * MS


def test_time_without_requests_is_not_yielded(rig: GateClientRig) -> None:
    rig.grant(GrantMode.FREEZE)
    rig.client.ask(LOAD)
    rig.client.idle(EngineLoad(0, 0, 0))
    rig.now_ns += 1_000 * MS
    rig.grant()
    rig.client.ask(LOAD)
    rig.client.scheduled(LOAD, 1)
    assert rig.state().yielded_ns == 0


def test_an_idle_guest_beats_through_the_watchdog(rig: GateClientRig) -> None:
    first_ns = rig.state().heartbeat_ns
    rig.client.beat(first_ns + 10 * MS)
    assert rig.state().heartbeat_ns == first_ns
    rig.environ["ROSE_POLICY_VERSION"] = "4"
    rig.client.beat(first_ns + 60 * MS)
    assert (rig.state().heartbeat_ns, rig.state().policy_version) == (first_ns + 60 * MS, 4)


def test_measured_steps_correct_the_model(rig: GateClientRig) -> None:
    rig.grant()
    for _ in range(60):
        rig.client.scheduled(LOAD, 10)
        rig.now_ns += 40 * MS
        rig.client.stepped(LOAD, 10, 2, 2)
    assert rig.client.model.seconds(10, 2) == pytest.approx(0.04, rel=0.01)


def test_a_guest_takes_smaller_steps_when_its_context_makes_them_long(rig: GateClientRig) -> None:
    model = StepModel(StepProfile(0.001, 1e-4, per_context_token_s=1e-6))
    client = GateClient(
        rig.page, KvMapped(4096), model=model, block_tokens=32, clock_ns=lambda: rig.now_ns
    )
    rig.grant()
    granted = rig.page.grant.read()
    assert granted is not None
    rig.page.grant.write(replace(granted, slack_share=1.0))
    due_ns = rig.now_ns + 9 * MS
    rig.host.tell(running=1, earliest_decode_deadline_ns=due_ns)
    assert client.ask(EngineLoad(2, 0, kv_used=0)) == Run(60, 4)
    assert client.ask(EngineLoad(2, 0, kv_used=100)) == Run(28, 4)


def test_a_change_of_mapped_memory_is_published_at_once(rig: GateClientRig) -> None:
    rig.now_ns += 1 * MS
    rig.client.mapped(KvMapped(1024, granules_mapped=1, granules_total=4), LOAD)
    state = rig.state()
    assert (state.bytes_mapped, state.granules_mapped, state.granules_total) == (1024, 1, 4)
    assert (state.running, state.waiting, state.kv_used) == LOAD, "preemption is seen with it"
    assert state.heartbeat_ns == rig.now_ns
    rig.now_ns += 1 * MS
    rig.client.mapped(KvMapped(1024, granules_mapped=1, granules_total=4), LOAD)
    assert rig.state().heartbeat_ns == rig.now_ns - 1 * MS, "nothing changed, nothing is written"


PROFILE = StepProfile(0.004, 1.25e-5, 2e-5, 1e-8, samples=40, fit_error=0.05)


def settings(**environ: str) -> EngineSettings:
    return EngineSettings.from_environ(
        {"ROSE_ROLE": "guest", "ROSE_CONTROL_PAGE": "page", **environ}
    )


def test_without_profiles_a_guest_guesses() -> None:
    assert step_model(settings()) is FIRST_MODEL
    assert gate_limits(settings()) == GateLimits()


def test_profiles_of_guest_and_host_reach_the_gate(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(PROFILE.to_json())
    profiled = settings(ROSE_STEP_PROFILE=str(path), ROSE_HOST_STEP_PROFILE=str(path))
    assert step_model(profiled).profile == PROFILE
    assert gate_limits(profiled).host_prefill_ns_per_token == 12_500


@pytest.mark.parametrize("text", [None, "", "{}", '{"kind": "rose.step_profile", "layout": 9}'])
def test_a_profile_that_cannot_be_used_ends_the_start_in_one_line(
    tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    for variable, read in (
        ("ROSE_STEP_PROFILE", step_model),
        ("ROSE_HOST_STEP_PROFILE", gate_limits),
    ):
        with pytest.raises(ExecutorError, match=variable) as error:
            read(settings(**{variable: str(path)}))
        assert "\n" not in str(error.value)


SECOND = 10**9


TICK_NS = 1_000_000


@pytest.fixture
def rig(page: ControlPage) -> GateClientRig:
    return GateClientRig(page)


@pytest.mark.parametrize("grant", [None, Grant(), Grant(heartbeat_ns=10**18)])
def test_no_sign_of_the_daemon_orphans_a_guest(grant: Grant | None) -> None:
    core = GrantLiveness(0, 2 * SECOND)
    for second in range(10):
        assert core.step(second * SECOND, Grant(heartbeat_ns=second * SECOND)) is None
    assert core.step(11 * SECOND, grant) is None
    assert core.step(11 * SECOND + 1, grant) == "orphaned"
    assert core.step(11 * SECOND, Grant(GrantMode.KILL)) == "killed"


def test_the_watchdog_beats_and_leaves_with_a_code_that_says_why(page: ControlPage) -> None:
    codes, beats, now_ns = list[int](), list[int](), time.monotonic_ns()

    def fail(_: int) -> None:
        raise OSError("no page")

    Watchdog(page, GrantLiveness(now_ns, SECOND // 4), beats.append, codes.append, 0.001).run()
    page.grant.write(Grant(GrantMode.KILL))
    Watchdog(page, GrantLiveness(now_ns, 60 * SECOND), beats.append, codes.append).run()
    assert beats
    page.grant.write(Grant(heartbeat_ns=now_ns))
    with pytest.raises(OSError, match="no page"):
        Watchdog(page, GrantLiveness(now_ns, 60 * SECOND), fail, codes.append).run()
    assert codes == [EXIT_ORPHANED, EXIT_KILLED, EXIT_BROKEN], "a broken one takes the guest along"


class Start:
    """A start's gate beside an idle host; time passes while it sleeps, and `after` happens then."""

    def __init__(self, page: ControlPage) -> None:
        self.page = page
        self.now_ns = time.monotonic_ns()
        self.after: tuple[int, Callable[[], object]] = (0, lambda: None)
        self.sleeps = 0
        self.host = SeatedHost(page, lambda: self.now_ns)
        self.host.tell()
        self.gate = StartGate(page, clock_ns=lambda: self.now_ns, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)
        self.sleeps += 1
        assert self.sleeps < 10_000, "nothing ends this wait"
        if self.after[0] == self.sleeps:
            self.after[1]()

    def grant(self, **changes: Any) -> None:
        live = {"heartbeat_ns": self.now_ns, "expiry_ns": self.now_ns + 500 * TICK_NS}
        settings = {"mode": GrantMode.RUN, "token_budget": 512, "max_sequences": 8, "epoch": 1}
        self.page.grant.write(Grant(**(settings | live | changes)))


@pytest.fixture
def start(page: ControlPage) -> Start:
    made = Start(page)
    made.grant()
    return made


def test_a_pass_runs_at_once_beside_an_idle_host(start: Start) -> None:
    start.gate.wait()
    assert (start.gate.passes, start.gate.waited_ns, start.sleeps) == (1, 0, 0)


def busy(start: Start) -> Callable[[], object]:
    start.host.tell(running=3)
    return start.host.tell


def busy_and_shared(start: Start) -> Callable[[], object]:
    start.grant(slack_share=1.0)
    return busy(start)


def not_to_run(mode: GrantMode) -> Callable[[Start], Callable[[], object]]:
    def forbid(start: Start) -> Callable[[], object]:
        start.grant(mode=mode)
        return start.grant

    return forbid


def expired(start: Start) -> Callable[[], object]:
    start.now_ns += 10**9
    start.host.beat()
    return start.grant


def silent(start: Start) -> Callable[[], object]:
    start.now_ns += 2 * 10**9
    start.grant()
    return start.host.beat


@pytest.mark.parametrize(
    "hinder",
    [
        busy,
        busy_and_shared,
        *map(not_to_run, (GrantMode.FREEZE, GrantMode.KILL, GrantMode.DRAIN)),
        expired,
        silent,
    ],
)
def test_a_pass_waits_for_an_idle_host_and_a_live_grant(start: Start, hinder: Any) -> None:
    start.after = (7, hinder(start))
    start.gate.wait()
    assert start.sleeps == 7
    assert start.gate.waited_ns == 7 * 2 * TICK_NS


class ModelHolder:
    """Stands in for a model runner."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)

    def get_model(self) -> nn.Module:
        return self.model


class WarmUpWorker:
    """Base class under the mixin; `passes` of the model in its warm-up."""

    def __init__(self, passes: int = 3) -> None:
        self.model_runner = ModelHolder()
        self.passes = passes
        self.loaded: dict[str, Any] = {}

    def load_model(self, **options: Any) -> None:
        self.loaded = options

    def compile_or_warm_up_model(self) -> str:
        for _ in range(self.passes):
            self.model_runner.model(torch.zeros(1, 2))
        return "compiled"


class GatedWorker(GatedStart, WarmUpWorker):
    pass


def as_guest(monkeypatch: pytest.MonkeyPatch, page: ControlPage, **changes: str) -> None:
    environ = {"ROSE_ROLE": "guest", "ROSE_GATED_START": "1", "ROSE_CONTROL_PAGE": str(page.path)}
    for name, value in (environ | changes).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("changes", "hooks"),
    [
        ({}, 1),
        ({"ROSE_ROLE": "host"}, 0),
        ({"ROSE_ROLE": ""}, 0),
        ({"ROSE_GATED_START": "0"}, 0),
    ],
)
def test_only_a_guest_whose_node_grants_from_the_start_on_has_a_gate(
    page: ControlPage, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], hooks: int
) -> None:
    as_guest(monkeypatch, page, **changes)
    worker = GatedWorker()
    worker.load_model()
    assert (worker.start_gate is not None) == bool(hooks)
    assert len(worker.model_runner.model._forward_pre_hooks) == hooks
    assert hooks or worker.compile_or_warm_up_model() == "compiled"


def test_a_page_that_is_not_there_ends_the_start(
    page: ControlPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_guest(monkeypatch, page, ROSE_CONTROL_PAGE=f"{page.path}-absent")
    with pytest.raises(ExecutorError):
        GatedWorker().load_model()


@pytest.fixture
def worker(start: Start, monkeypatch: pytest.MonkeyPatch) -> GatedWorker:
    """A worker whose model is loaded, beside an idle host; time stands still."""
    monkeypatch.setattr(StartGate, "from_environ", lambda _: start.gate)
    made = GatedWorker()
    made.load_model(load_dummy_weights=True)
    return made


def test_every_pass_of_the_start_asks_and_no_step_afterwards(
    worker: GatedWorker, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    assert worker.loaded == {"load_dummy_weights": True}
    with caplog.at_level(logging.INFO):
        assert worker.compile_or_warm_up_model() == "compiled"
    assert start.gate.passes == 3
    assert "3 passes of the start waited" in caplog.text
    worker.model_runner.model(torch.zeros(1, 2))
    assert start.gate.passes == 3, "a step is the scheduler's to gate"


def test_a_start_that_breaks_leaves_no_hook_behind(worker: GatedWorker) -> None:
    worker.model_runner.model.forward = lambda *_: 1 / 0  # type: ignore[assignment,method-assign]
    with pytest.raises(ZeroDivisionError):
        worker.compile_or_warm_up_model()
    assert not worker.model_runner.model._forward_pre_hooks


def test_what_is_captured_does_not_run_and_does_not_wait(
    worker: GatedWorker,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    start.host.tell(running=1)
    worker.compile_or_warm_up_model()
    assert "asked the gate for no pass" in caplog.text, "a start that is not gated is said"
