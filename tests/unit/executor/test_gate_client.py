"""State that a guest publishes while it runs, yields and idles."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from executor import ControlPage, ExecutorError, Grant, GrantMode, GuestState, Run, Yield
from executor.engine_settings import EngineSettings
from executor.guest.gate_client import (
    FIRST_MODEL,
    YIELD_SLEEP_S,
    EngineLoad,
    GateClient,
    KvMapped,
    gate_limits,
    step_model,
)
from executor.step_decision import GateLimits
from slo import StepModel, StepProfile
from tests.harness.seated_host import SeatedHost

MS = 1_000_000
LOAD = EngineLoad(running=2, waiting=1, kv_used=5)


class Rig:
    def __init__(self, page: ControlPage) -> None:
        self.page = page
        self.now_ns = 10_000 * MS
        self.sleeps: list[float] = []
        self.environ = {"ROSE_POLICY_VERSION": "3"}
        self.client = GateClient(
            page,
            kv=KvMapped(4096),
            clock_ns=lambda: self.now_ns,
            sleep=self.sleeps.append,
            environ=self.environ,
        )
        self.host = SeatedHost(page, lambda: self.now_ns)
        self.host.tell()

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


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with ControlPage.create(tmp_path / "page") as page:
        yield Rig(page)


def test_a_guest_without_a_grant_yields_and_does_not_spin(rig: Rig) -> None:
    assert rig.client.ask(LOAD) == Yield("page_unreadable")
    assert rig.sleeps == [YIELD_SLEEP_S]
    assert rig.state().gate_reason == "page_unreadable"


def test_a_granted_step_is_published_from_begin_to_end(rig: Rig) -> None:
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


def test_yielded_time_adds_up_and_is_published_every_50_ms(rig: Rig) -> None:
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


def test_time_without_requests_is_not_yielded(rig: Rig) -> None:
    rig.grant(GrantMode.FREEZE)
    rig.client.ask(LOAD)
    rig.client.idle(EngineLoad(0, 0, 0))
    rig.now_ns += 1_000 * MS
    rig.grant()
    rig.client.ask(LOAD)
    rig.client.scheduled(LOAD, 1)
    assert rig.state().yielded_ns == 0


def test_an_idle_guest_beats_through_the_watchdog(rig: Rig) -> None:
    first_ns = rig.state().heartbeat_ns
    rig.client.beat(first_ns + 10 * MS)
    assert rig.state().heartbeat_ns == first_ns
    rig.environ["ROSE_POLICY_VERSION"] = "4"
    rig.client.beat(first_ns + 60 * MS)
    assert (rig.state().heartbeat_ns, rig.state().policy_version) == (first_ns + 60 * MS, 4)


def test_measured_steps_correct_the_model(rig: Rig) -> None:
    rig.grant()
    for _ in range(60):
        rig.client.scheduled(LOAD, 10)
        rig.now_ns += 40 * MS
        rig.client.stepped(LOAD, 10, 2, 2)
    assert rig.client.model.seconds(10, 2) == pytest.approx(0.04, rel=0.01)


def test_a_guest_takes_smaller_steps_when_its_context_makes_them_long(rig: Rig) -> None:
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


def test_a_change_of_mapped_memory_is_published_at_once(rig: Rig) -> None:
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
