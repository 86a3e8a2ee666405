"""A guest keeps within the caps of capacity policies, and a cut-off node harvests nothing."""

from dataclasses import replace
from typing import Any

import pytest

from executor import FreezeReason, Grant, GrantController, GrantMode, GuardConfig, GuestState
from executor import HostState as Host
from executor.grant_controller import HarvestCaps, Observation, Write
from executor.kv.lending import LEAST_CAP
from executor.kv.shrink_plan import NO_CAP
from tests.harness.seated_host import believed

CONFIG = GuardConfig(token_budget=256, max_sequences=8, slack_share=0.5)
HOST = Host(kv_used=10, kv_total=100)
GUEST = GuestState(granules_total=40, granules_mapped=5, granule_bytes=100)
SECOND = 10**9


def granted(core: GrantController, caps: HarvestCaps, now_ns: int = SECOND, **change: Any) -> Grant:
    inputs: dict[str, Any] = {"host": HOST, "lease_epoch": 1, "guest": GUEST} | change
    first, *_ = core.step(
        Observation(believed(inputs.pop("host"), now_ns), caps=caps, **inputs), now_ns
    )
    assert isinstance(first, Write)
    return first.grant


def test_without_caps_nothing_changes() -> None:
    grant = granted(GrantController(CONFIG), HarvestCaps())
    assert (grant.token_budget, grant.slack_share, grant.kv_granule_cap) == (256, 0.5, NO_CAP)


def test_a_guest_begins_steps_in_its_share_of_each_second_alone() -> None:
    core = GrantController(CONFIG)
    grants = [
        granted(core, HarvestCaps(compute=0.3), SECOND + tick * SECOND // 50) for tick in range(100)
    ]
    assert sum(grant.token_budget > 0 for grant in grants) == 30
    assert {grant.mode for grant in grants} == {GrantMode.RUN}
    assert len({grant.epoch for grant in grants}) == 1, "no change of mode twice a second"
    assert granted(core, HarvestCaps(compute=0.0), 4 * SECOND).token_budget == 0


def test_the_smaller_slack_share_of_file_and_policy_holds() -> None:
    for share, held in ((0.2, 0.2), (0.9, 0.5)):
        caps = HarvestCaps(slack_share=share)
        assert granted(GrantController(CONFIG), caps).slack_share == held


def test_memory_is_capped_in_whole_granules() -> None:
    core = GrantController(CONFIG)
    assert granted(core, HarvestCaps(kv_bytes=799)).kv_granule_cap == 7
    assert granted(core, HarvestCaps(kv_bytes=1)).kv_granule_cap == LEAST_CAP
    assert granted(core, HarvestCaps(kv_bytes=799), guest=None).kv_granule_cap == LEAST_CAP
    own = GrantController(replace(CONFIG, kv_granule_cap=3))
    assert granted(own, HarvestCaps(kv_bytes=799)).kv_granule_cap == 3


@pytest.mark.parametrize(
    ("headroom", "used", "granules"),
    [(0.0, 10, 15), (0.5, 10, 15), (0.5, 35, 12), (0.5, 60, 5), (0.95, 10, 5)],
)
def test_headroom_of_the_host_is_neither_used_nor_lent(
    headroom: float, used: int, granules: int
) -> None:
    """5 granules of its own; 1,000 of the host's 5,000 bytes are lent."""
    host = replace(HOST, kv_used=used, granules_total=50, granules_lent=10, bytes_lent=1_000)
    core = GrantController(replace(CONFIG, kv_base_bytes=500))
    assert granted(core, HarvestCaps(kv_headroom=headroom), host=host).kv_granule_cap == granules


def test_watermarks_of_a_policy_hold_where_they_are_lower() -> None:
    core = GrantController(CONFIG)
    host = replace(HOST, kv_used=75)
    assert granted(core, HarvestCaps(), host=host).reason == FreezeReason.LEASED
    caps = HarvestCaps(high_watermark=0.7, low_watermark=0.6)
    pressed = granted(core, caps, SECOND + SECOND // 10, host=host)
    assert (pressed.mode, pressed.reason) == (GrantMode.THROTTLE, FreezeReason.PRESSURE)


@pytest.mark.parametrize("state", [{"lease_epoch": 1}, {"lease_epoch": None, "warming": True}])
def test_a_cut_off_node_harvests_neither_time_nor_memory(state: dict[str, Any]) -> None:
    grant = granted(GrantController(CONFIG), HarvestCaps(), cut_off=True, **state)
    assert (grant.mode, grant.reason) == (GrantMode.FREEZE, FreezeReason.CUT_OFF)
    assert grant.kv_granule_cap == LEAST_CAP
    assert grant.token_budget == 0


@pytest.mark.parametrize(
    "bad",
    [{"compute": 1.5}, {"kv_headroom": -0.1}, {"slack_share": float("nan")}, {"kv_bytes": -1}],
)
def test_shares_that_are_none_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="give"):
        HarvestCaps(**bad)  # type: ignore[arg-type] # wrong on purpose
