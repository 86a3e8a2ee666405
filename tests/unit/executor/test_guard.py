"""The guard grants only to a lease, and everything unknown freezes."""

from dataclasses import replace
from typing import Any

import pytest

from executor import Grant, GrantController, GrantMode, GuardConfig, GuestState, HostState
from tests.seated_host import believed

CONFIG = GuardConfig(token_budget=256, max_sequences=8, kv_granule_cap=4, slack_share=0.5)
HOST = HostState(kv_used=10, kv_total=100)
SECOND = 10**9


def granted(core: GrantController, now_ns: int = SECOND, **change: Any) -> Grant:
    inputs: dict[str, Any] = {
        "host": HOST,
        "guest": None,
        "lease_active": True,
        "kill_switch": False,
    }
    inputs |= change
    return core.step(now_ns, believed(inputs.pop("host"), now_ns), **inputs)


def test_a_lease_gets_the_operators_limits_for_half_a_second() -> None:
    assert granted(GrantController(CONFIG)) == Grant(
        GrantMode.RUN, 256, 8, 4, 0.5, 1, SECOND + SECOND // 2, SECOND, "leased"
    )


@pytest.mark.parametrize(
    ("change", "mode", "reason"),
    [
        ({"lease_active": False}, GrantMode.FREEZE, "no_lease"),
        ({"host": None}, GrantMode.FREEZE, "host_unreadable"),
        ({"host_doubt": "host_dead"}, GrantMode.FREEZE, "host_dead"),
        ({"operator_hold": True}, GrantMode.FREEZE, "operator_hold"),
        ({"draining": True}, GrantMode.DRAIN, "drain"),
        ({"draining": True, "guest": GuestState(running=1)}, GrantMode.DRAIN, "drain"),
        ({"draining": True, "guest": GuestState()}, GrantMode.FREEZE, "drained"),
        ({"pressed": True}, GrantMode.FREEZE, "owing"),
        ({"kill_switch": True}, GrantMode.KILL, "kill_switch"),
        ({"kill_switch": True, "host": None, "lease_active": False}, GrantMode.KILL, "kill_switch"),
    ],
)
def test_anything_wrong_takes_the_capacity_back(
    change: dict[str, Any], mode: GrantMode, reason: str
) -> None:
    grant = granted(GrantController(CONFIG), **change)
    assert (grant.mode, grant.reason) == (mode, reason)
    assert (grant.token_budget, grant.max_sequences) == (0, 0)
    assert grant.kv_granule_cap == 4, "0 would lift the cap of a guest that may not run"


def test_the_epoch_grows_with_each_change_of_mode_and_survives_a_restart() -> None:
    core = GrantController(CONFIG, previous=Grant(epoch=41))
    assert granted(core).epoch == 42
    assert granted(core).epoch == 42
    assert granted(core, lease_active=False).epoch == 43
    assert granted(core).epoch == core.epoch == 44


def test_a_daemon_that_slept_longer_than_a_grant_freezes_before_it_goes_on() -> None:
    core = GrantController(CONFIG)
    granted(core, SECOND)
    woken = granted(core, 3 * SECOND)
    assert (woken.mode, woken.reason) == (GrantMode.FREEZE, "daemon_stalled")
    assert granted(core, 3 * SECOND + 1).mode is GrantMode.RUN


def test_kv_pressure_throttles_with_hysteresis() -> None:
    core = GrantController(CONFIG)

    def mode_at(used: int) -> GrantMode:
        return granted(core, host=replace(HOST, kv_used=used)).mode

    assert [mode_at(used) for used in (89, 90, 85, 79, 85)] == [
        GrantMode.RUN,
        GrantMode.THROTTLE,
        GrantMode.THROTTLE,
        GrantMode.RUN,
        GrantMode.RUN,
    ]
    assert granted(core, host=replace(HOST, kv_used=99)).token_budget == CONFIG.token_budget // 2


LENDING = replace(CONFIG, kv_granule_cap=0, kv_base_bytes=500)
LENDER = replace(HOST, granules_total=50, granules_lent=10, bytes_lent=1_000)
BORROWER = GuestState(granules_total=40, granules_mapped=5, granule_bytes=100)


def test_a_guests_cap_follows_what_its_host_lends_now_and_falls_at_once() -> None:
    core = GrantController(LENDING)

    def cap(**change: Any) -> int:
        return granted(core, **({"host": LENDER, "guest": BORROWER} | change)).kv_granule_cap

    assert cap() == 15
    assert core.owed_bytes == 0
    assert cap(host=replace(LENDER, bytes_lent=300)) == 8
    assert cap(host=replace(LENDER, bytes_lent=-1), guest=replace(BORROWER, granules_mapped=9)) == 5
    assert core.owed_bytes == 400
    assert cap() == 15
    assert cap(host=replace(LENDER, reserve_missing=1)) == 14, "reserved headroom is never granted"
    assert cap(host=replace(LENDER, bytes_lent=10**9)) == 40
    assert cap(lease_active=False) == 15, "a frozen guest may keep what it has"


def test_what_is_unknown_of_a_loan_counts_against_the_guest() -> None:
    core = GrantController(LENDING)
    assert granted(core, host=None, guest=BORROWER).kv_granule_cap == 5
    assert granted(core, host=LENDER, guest=BORROWER, host_doubt="host_dead").kv_granule_cap == 5
    assert granted(core, host=LENDER, guest=None).kv_granule_cap == 1


def test_a_reclaim_freezes_and_its_cap_binds_until_it_ends() -> None:
    core = GrantController(CONFIG)
    held = granted(core, reclaim_cap=2)
    assert (held.mode, held.reason, held.kv_granule_cap) == (GrantMode.FREEZE, "reclaim", 2)
    assert granted(core, reclaim_cap=0).kv_granule_cap == 4, "frozen only"
    assert granted(core, reclaim_cap=9).kv_granule_cap == 4, "no reclaim loosens a cap"
    assert granted(core).mode is GrantMode.RUN


def test_pressure_and_the_operators_cap_bind_a_borrower_too() -> None:
    capped = GrantController(replace(LENDING, kv_granule_cap=7))
    assert granted(capped, host=LENDER, guest=BORROWER).kv_granule_cap == 7
    full = replace(LENDER, kv_used=95, granules_lent=0, bytes_lent=0)
    assert granted(GrantController(LENDING), host=full, guest=BORROWER).kv_granule_cap == 2


@pytest.mark.parametrize(
    "bad",
    [{"token_budget": 0}, {"slack_share": 1.5}, {"kv_base_bytes": -1}, {"ttl_ns": 0}],
)
def test_limits_that_make_no_sense_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must|give"):
        GuardConfig(**({"token_budget": 1, "max_sequences": 1} | bad))  # type: ignore[arg-type] # wrong on purpose


def test_a_guest_that_warms_up_runs_in_host_idle_time_without_a_lease() -> None:
    core = GrantController(CONFIG)
    grant = granted(core, lease_active=False, warming=True)
    assert (grant.mode, grant.reason, grant.token_budget) == (GrantMode.RUN, "warm_up", 256)
    assert grant.slack_share == 0.0, "the host's slack is for leases"
    after = granted(core, lease_active=False, warming=False)
    assert (after.mode, after.reason) == (GrantMode.FREEZE, "no_lease")


@pytest.mark.parametrize("change", [{"kill_switch": True}, {"operator_hold": True}, {"host": None}])
def test_a_warm_up_obeys_whatever_freezes_a_lease(change: dict[str, Any]) -> None:
    grant = granted(GrantController(CONFIG), lease_active=False, warming=True, **change)
    assert grant.mode in (GrantMode.KILL, GrantMode.FREEZE)
    assert grant.token_budget == 0
