"""The guard grants only to a lease, within limits and caps. Its stories: tests/traces/guard."""

from dataclasses import replace
from typing import Any

import pytest

from executor import (
    FreezeReason,
    Grant,
    GrantController,
    GrantMode,
    GuardConfig,
    GuestState,
    HostState,
    explained,
)
from executor.control_page.seqlock_records import REASON_BYTES
from executor.grant_controller import HarvestCaps, Observation, Write
from executor.kv.lending import LEAST_CAP
from executor.kv.shrink_plan import NO_CAP
from tests.harness.seated_host import believed

SECOND = 10**9


CONFIG = GuardConfig(token_budget=256, max_sequences=8, slack_share=0.5)
HOST = HostState(kv_used=10, kv_total=100)
LENDER = replace(HOST, granules_total=50, granules_lent=10, bytes_lent=1_000)
GUEST = GuestState(granules_total=40, granules_mapped=5, granule_bytes=100)


def granted(config: GuardConfig | GrantController, now_ns: int = SECOND, **change: Any) -> Grant:
    """Return the grant of one moment, by a controller or a fresh one of this configuration."""
    core = config if isinstance(config, GrantController) else GrantController(config)
    inputs: dict[str, Any] = {"host": HOST, "guest": GUEST, "lease_epoch": 1} | change
    first, *_ = core.step(Observation(believed(inputs.pop("host"), now_ns), **inputs), now_ns)
    assert isinstance(first, Write)
    return first.grant


def capped(config: GuardConfig, **caps: Any) -> int:
    """Return the KV granules granted under these caps of policies."""
    return granted(config, caps=HarvestCaps(**caps)).kv_granule_cap


def test_pressure_and_the_operators_cap_bind_a_borrower_too() -> None:
    lending = replace(CONFIG, kv_base_bytes=500)
    assert granted(replace(lending, kv_granule_cap=7), host=LENDER).kv_granule_cap == 7
    full = replace(LENDER, kv_used=95, granules_lent=0, bytes_lent=0)
    assert granted(lending, host=full).kv_granule_cap == 2


@pytest.mark.parametrize("state", [{"lease_epoch": 1}, {"lease_epoch": None, "warming": True}])
def test_a_cut_off_node_harvests_neither_time_nor_memory(state: dict[str, Any]) -> None:
    grant = granted(replace(CONFIG, kv_granule_cap=4), cut_off=True, **state)
    assert (grant.mode, grant.reason) == (GrantMode.FREEZE, FreezeReason.CUT_OFF)
    assert (grant.kv_granule_cap, grant.token_budget) == (LEAST_CAP, 0)


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        *(
            (GuardConfig, {name: value})
            for name, value in (
                ("token_budget", 0),
                ("slack_share", 1.5),
                ("kv_base_bytes", -1),
                ("ttl_ns", 0),
            )
        ),
        *(
            (HarvestCaps, {name: value})
            for name, value in (
                ("compute", 1.5),
                ("kv_headroom", -0.1),
                ("slack_share", float("nan")),
                ("kv_bytes", -1),
            )
        ),
    ],
)
def test_limits_that_make_no_sense_are_refused(kind: Any, bad: dict[str, float]) -> None:
    sizes = {"token_budget": 1, "max_sequences": 1} if kind is GuardConfig else {}
    with pytest.raises(ValueError, match=r"must|give"):
        kind(**(sizes | bad))


@pytest.mark.parametrize("reason", FreezeReason)
def test_every_reason_fits_the_page_and_has_a_sentence(reason: FreezeReason) -> None:
    assert len(reason.encode()) <= REASON_BYTES
    assert Grant.unpack(Grant(reason=reason).pack()).reason == reason
    assert GuestState.unpack(GuestState(gate_reason=reason).pack()).gate_reason == reason
    assert reason.sentence
    assert "\n" not in reason.sentence


def test_a_word_is_explained_and_one_of_another_build_stands_alone() -> None:
    assert explained("host_dead") == "host_dead (the host's process is gone)"
    assert explained("no_slack") == (
        "no_slack (the host has a deadline that the next step could make it miss)"
    )
    assert explained("moon_phase") == "moon_phase"


def test_without_caps_nothing_changes() -> None:
    grant = granted(CONFIG, caps=HarvestCaps())
    assert (grant.token_budget, grant.slack_share, grant.kv_granule_cap) == (256, 0.5, NO_CAP)


def test_a_guest_begins_steps_in_its_share_of_each_second_alone() -> None:
    core, caps = GrantController(CONFIG), HarvestCaps(compute=0.3)
    grants = [granted(core, SECOND + tick * SECOND // 50, caps=caps) for tick in range(100)]
    assert sum(grant.token_budget > 0 for grant in grants) == 30
    assert {grant.mode for grant in grants} == {GrantMode.RUN}
    assert len({grant.epoch for grant in grants}) == 1, "no change of mode twice a second"
    assert granted(core, 4 * SECOND, caps=HarvestCaps(compute=0.0)).token_budget == 0


def test_the_smaller_slack_share_of_file_and_policy_holds() -> None:
    for share, held in ((0.2, 0.2), (0.9, 0.5)):
        assert granted(CONFIG, caps=HarvestCaps(slack_share=share)).slack_share == held


def test_memory_is_capped_in_whole_granules() -> None:
    assert (capped(CONFIG, kv_bytes=799), capped(CONFIG, kv_bytes=1)) == (7, LEAST_CAP)
    unknown = granted(CONFIG, caps=HarvestCaps(kv_bytes=799), guest=None)
    assert unknown.kv_granule_cap == LEAST_CAP
    assert capped(replace(CONFIG, kv_granule_cap=3), kv_bytes=799) == 3


@pytest.mark.parametrize(
    ("headroom", "used", "granules"),
    [(0.0, 10, 15), (0.5, 10, 15), (0.5, 35, 12), (0.5, 60, 5), (0.95, 10, 5)],
)
def test_headroom_of_the_host_is_neither_used_nor_lent(
    headroom: float, used: int, granules: int
) -> None:
    """5 granules of its own; 1,000 of the host's 5,000 bytes are lent."""
    config, host = replace(CONFIG, kv_base_bytes=500), replace(LENDER, kv_used=used)
    grant = granted(config, caps=HarvestCaps(kv_headroom=headroom), host=host)
    assert grant.kv_granule_cap == granules


def test_watermarks_of_a_policy_hold_where_they_are_lower() -> None:
    core, host = GrantController(CONFIG), replace(HOST, kv_used=75)
    assert granted(core, host=host).reason == FreezeReason.LEASED
    caps = HarvestCaps(high_watermark=0.7, low_watermark=0.6)
    pressed = granted(core, SECOND + SECOND // 10, host=host, caps=caps)
    assert (pressed.mode, pressed.reason) == (GrantMode.THROTTLE, FreezeReason.PRESSURE)
