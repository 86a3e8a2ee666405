"""The guard grants only to a lease, and everything unknown freezes.

The stories are in tests/traces/guard.
"""

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
from executor.grant_controller import Observation, Write
from executor.kv.lending import LEAST_CAP
from tests.harness.seated_host import believed

CONFIG = GuardConfig(token_budget=256, max_sequences=8, kv_granule_cap=4, slack_share=0.5)
HOST = HostState(kv_used=10, kv_total=100)
SECOND = 10**9


def granted(core: GrantController, now_ns: int = SECOND, **change: Any) -> Grant:
    inputs: dict[str, Any] = {"host": HOST, "lease_epoch": 1} | change
    first, *_ = core.step(Observation(believed(inputs.pop("host"), now_ns), **inputs), now_ns)
    assert isinstance(first, Write)
    return first.grant


LENDING = replace(CONFIG, kv_granule_cap=0, kv_base_bytes=500)
LENDER = replace(HOST, granules_total=50, granules_lent=10, bytes_lent=1_000)
BORROWER = GuestState(granules_total=40, granules_mapped=5, granule_bytes=100)


def test_pressure_and_the_operators_cap_bind_a_borrower_too() -> None:
    capped = GrantController(replace(LENDING, kv_granule_cap=7))
    assert granted(capped, host=LENDER, guest=BORROWER).kv_granule_cap == 7
    full = replace(LENDER, kv_used=95, granules_lent=0, bytes_lent=0)
    assert granted(GrantController(LENDING), host=full, guest=BORROWER).kv_granule_cap == 2


def test_a_node_that_hears_no_scheduler_freezes_its_guest_and_takes_its_memory_back() -> None:
    grant = granted(GrantController(CONFIG), cut_off=True)
    assert (grant.mode, grant.reason) == (GrantMode.FREEZE, FreezeReason.CUT_OFF)
    assert grant.kv_granule_cap == LEAST_CAP


@pytest.mark.parametrize(
    "bad",
    [{"token_budget": 0}, {"slack_share": 1.5}, {"kv_base_bytes": -1}, {"ttl_ns": 0}],
)
def test_limits_that_make_no_sense_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must|give"):
        GuardConfig(**({"token_budget": 1, "max_sequences": 1} | bad))  # type: ignore[arg-type] # wrong on purpose


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
