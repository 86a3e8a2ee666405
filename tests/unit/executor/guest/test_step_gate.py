"""The gate fails closed and spends only what grant and slack allow."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor import GateLimits, Grant, GrantMode, HostState, Run, SeatState, Yield, decide
from executor.control_page.page import HostView
from slo import StepModel, StepProfile
from tests.harness.seated_host import believed

NOW = 10**12
MS = 1_000_000
MODEL = StepModel(StepProfile(base_s=0.005, per_token_s=1e-4))
LIMITS = GateLimits()
GRANT = Grant(
    GrantMode.RUN,
    token_budget=256,
    max_sequences=8,
    epoch=1,
    expiry_ns=NOW + 500 * MS,
    heartbeat_ns=NOW - 50 * MS,
)
SHARING = replace(GRANT, slack_share=1.0)
IDLE = HostState(heartbeat_ns=NOW - 900 * 1000 * MS)
BUSY = HostState(
    running=4,
    in_step=True,
    earliest_decode_deadline_ns=NOW + 100 * MS,
    last_step_ns=15 * MS,
    heartbeat_ns=NOW - 10 * MS,
)


def ask(host: HostState | None, grant: Grant | None, limits: GateLimits = LIMITS) -> Run | Yield:
    return decide(believed(host, NOW), grant, MODEL, NOW, limits)


def test_an_idle_host_that_beats_lends_everything_however_long_nothing_happened() -> None:
    assert ask(IDLE, GRANT) == Run(256, 8)
    assert ask(IDLE, SHARING) == Run(256, 8)


@pytest.mark.parametrize("host", [None, IDLE])
@pytest.mark.parametrize("grant", [None, GRANT])
def test_an_unreadable_section_yields(host: HostState | None, grant: Grant | None) -> None:
    expected = Run(256, 8) if host else Yield("host_unreadable")
    assert ask(host, grant) == (expected if grant else Yield("page_unreadable"))


VIEW = believed(IDLE, NOW)
SEAT = SeatState(taken_ns=0, beat_ns=NOW)


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (HostView(), "page_replaced"),
        (replace(VIEW, replaced=True), "page_replaced"),
        (replace(VIEW, seated=False), "no_host"),
        (replace(VIEW, vetoed=True), "host_veto"),
        (replace(VIEW, seat=None), "host_unreadable"),
        (replace(VIEW, seat=replace(SEAT, beat_ns=NOW - 1001 * MS)), "host_silent"),
        (replace(VIEW, seat=replace(SEAT, beat_ns=NOW + 2 * MS)), "host_silent"),
        (replace(VIEW, seat=replace(SEAT, taken_ns=NOW - 999 * MS)), "host_starting"),
        (replace(VIEW, seat=replace(SEAT, taken_ns=IDLE.heartbeat_ns + 1)), "host_starting"),
    ],
)
@pytest.mark.parametrize("grant", [GRANT, SHARING])
def test_an_idle_state_that_nobody_vouches_for_yields(
    view: HostView, grant: Grant, reason: str
) -> None:
    assert decide(view, grant, MODEL, NOW, LIMITS) == Yield(reason)


def test_a_busy_host_that_nobody_vouches_for_lends_no_slack_either() -> None:
    view = replace(VIEW, state=BUSY)
    assert isinstance(decide(view, SHARING, MODEL, NOW, LIMITS), Run)
    assert decide(replace(view, vetoed=True), SHARING, MODEL, NOW, LIMITS) == Yield("host_veto")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"expiry_ns": NOW}, "grant_expired"),
        ({"expiry_ns": NOW + 10**15}, "grant_expired"),
        ({"heartbeat_ns": NOW - 251 * MS}, "heartbeat_stale"),
        ({"heartbeat_ns": NOW + 10**12}, "heartbeat_stale"),
        ({"mode": GrantMode.FREEZE}, "frozen"),
        ({"mode": GrantMode.DRAIN}, "draining"),
        ({"mode": GrantMode.KILL}, "killed"),
        ({"mode": GrantMode.KILL, "expiry_ns": 0}, "killed"),
        ({"token_budget": 0}, "throttled"),
        ({"max_sequences": 0}, "throttled"),
    ],
)
def test_a_grant_that_allows_nothing_yields_and_says_why(
    change: dict[str, int], reason: str
) -> None:
    assert ask(IDLE, replace(GRANT, **change)) == Yield(reason)


def test_a_zeroed_grant_never_runs() -> None:
    assert isinstance(ask(IDLE, Grant()), Yield)


def test_a_throttled_grant_runs_within_its_budget() -> None:
    grant = replace(GRANT, mode=GrantMode.THROTTLE, token_budget=16)
    assert ask(IDLE, grant) == Run(16, 8, "throttled")


@pytest.mark.parametrize("change", [{"running": 1}, {"waiting": 1}, {"in_step": True}])
def test_without_slack_sharing_any_host_work_stops_the_guest(change: dict[str, int]) -> None:
    assert ask(replace(IDLE, **change), GRANT) == Yield("host_busy")


def test_slack_bounds_the_step_by_its_predicted_time() -> None:
    # 100 ms to the deadline, less 15 ms for the host's step and 2 ms of margin; base 5 ms.
    verdict = ask(BUSY, SHARING)
    assert isinstance(verdict, Run)
    assert verdict.token_budget == 256
    near = replace(BUSY, earliest_decode_deadline_ns=NOW + 32 * MS)
    assert ask(near, SHARING) == Run(100, 8)
    assert ask(near, replace(SHARING, slack_share=0.5)) == Run(25, 8)
    assert ask(replace(BUSY, earliest_decode_deadline_ns=NOW + 20 * MS), SHARING) == Yield(
        "no_slack"
    )


def test_the_tighter_of_both_slacks_counts() -> None:
    host = replace(BUSY, waiting=1, earliest_prefill_deadline_ns=NOW + 10 * MS)
    assert ask(host, SHARING) == Yield("no_slack")
    host = replace(host, earliest_prefill_deadline_ns=NOW + 80 * MS, queued_prefill_tokens=1000)
    assert isinstance(ask(host, SHARING), Run)
    costly = GateLimits(host_prefill_ns_per_token=80_000)
    assert ask(host, SHARING, costly) == Yield("no_slack")


def test_work_without_known_deadlines_has_no_slack() -> None:
    assert ask(replace(BUSY, earliest_decode_deadline_ns=0), SHARING) == Yield("no_slack")


def test_a_busy_host_that_went_silent_is_not_trusted() -> None:
    host = replace(BUSY, heartbeat_ns=NOW - 251 * MS)
    assert ask(host, SHARING) == Yield("heartbeat_stale")


@given(
    st.builds(
        HostState,
        in_step=st.booleans(),
        running=st.integers(0, 3),
        waiting=st.integers(0, 3),
        queued_prefill_tokens=st.integers(0, 1000),
        earliest_prefill_deadline_ns=st.sampled_from([0, NOW - MS, NOW + 30 * MS, NOW + 900 * MS]),
        earliest_decode_deadline_ns=st.sampled_from([0, NOW - MS, NOW + 30 * MS, NOW + 900 * MS]),
        last_step_ns=st.integers(0, 50 * MS),
        heartbeat_ns=st.sampled_from([NOW, NOW - 100 * MS, NOW - 1000 * MS]),
    ),
    st.builds(
        Grant,
        mode=st.sampled_from(GrantMode),
        token_budget=st.integers(0, 512),
        max_sequences=st.integers(0, 16),
        slack_share=st.floats(0, 1),
        expiry_ns=st.sampled_from([0, NOW, NOW + MS, NOW + 500 * MS]),
        heartbeat_ns=st.sampled_from([0, NOW, NOW - 100 * MS, NOW - 1000 * MS]),
    ),
)
def test_nothing_runs_outside_a_live_grant_or_the_hosts_slack(
    host: HostState, grant: Grant
) -> None:
    verdict = ask(host, grant)
    if isinstance(verdict, Yield):
        return
    assert grant.mode in (GrantMode.RUN, GrantMode.THROTTLE)
    assert grant.expiry_ns > NOW
    assert NOW - grant.heartbeat_ns <= LIMITS.grant_stale_ns
    assert 0 < verdict.token_budget <= grant.token_budget
    assert verdict.max_sequences == grant.max_sequences
    if not host.idle:
        assert grant.slack_share > 0
        took_ns = 1e9 * MODEL.seconds(
            verdict.token_budget, min(verdict.token_budget, grant.max_sequences)
        )
        for deadline_ns in (host.earliest_prefill_deadline_ns, host.earliest_decode_deadline_ns):
            if deadline_ns:
                assert NOW + took_ns + host.last_step_ns <= deadline_ns
