"""Stories of the grant controller: tests/traces/guard."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from datadriven import amount, nanoseconds, shown, status, stories, tell

from executor import (
    FreezeReason,
    Grant,
    GrantController,
    GuardConfig,
    GuestState,
    HostState,
    HostView,
)
from executor.grant_controller import Boost, Observation, Write
from tests.harness.seated_host import believed


class Guard:
    """`config tokens= sequences= cap= share= base= [epoch= left-cap=]`: a daemon starts.

    Then `TIME sees` with what is seen. Of the host: `kv=` percent of its KV memory in use, `lent=`
    bytes in ten granules, `unreadable`, `no-host`, `doubt=`. Of the guest: `has=` mapped granules
    of 100 B each out of 40, `turns=`. Else: `lease=` epoch, `kill-switch`, `warming`, `draining`,
    `held`, `reclaim-cap=`.
    """

    core: GrantController

    def step(self, verb: str, values: dict[str, str]) -> Iterator[str]:
        if verb == "config":
            config = GuardConfig(
                int(values.get("tokens", "256")),
                int(values.get("sequences", "8")),
                kv_granule_cap=int(values.get("cap", "0")),
                slack_share=float(values.get("share", "0.5")),
                kv_base_bytes=amount(values.get("base", "0")),
            )
            left = None
            if "epoch" in values:
                cap = int(values.get("left-cap", "0"))
                left = Grant(epoch=int(values["epoch"]), kv_granule_cap=cap)
            self.core = GrantController(config, left)
            return
        now_ns = nanoseconds(verb)
        doubt = FreezeReason(values["doubt"]) if "doubt" in values else None
        seen = Observation(
            _sight(values, now_ns),
            _guest(values),
            lease_epoch=int(values["lease"]) if "lease" in values else None,
            kill_switch="kill-switch" in values,
            host_doubt=doubt,
            draining="draining" in values,
            operator_hold="held" in values,
            reclaim_cap=int(values["reclaim-cap"]) if "reclaim-cap" in values else None,
            warming="warming" in values,
        )
        for action in self.core.step(seen, now_ns):
            match action:
                case Write():
                    yield _grant(action.grant)
                case Boost():
                    yield f"Boost {'on' if action.on else 'off'}"
                case _:
                    yield shown(action)

    def status(self) -> str:
        return status(self.core.status())


def _sight(values: dict[str, str], now_ns: int) -> HostView:
    lent = amount(values.get("lent", "0"))
    state = HostState(
        kv_used=int(values.get("kv", "10")),
        kv_total=100,
        granules_total=50 if lent else 0,
        granules_lent=10 if lent else 0,
        bytes_lent=lent,
        reserve_missing=int(values.get("missing", "0")),
    )
    view = believed(None if "unreadable" in values else state, now_ns)
    return replace(view, seated=False) if "no-host" in values else view


def _guest(values: dict[str, str]) -> GuestState | None:
    if not values.keys() & {"has", "turns", "version"}:
        return None
    return GuestState(
        running=int(values.get("turns", "0")),
        policy_version=int(values.get("version", "0")),
        granules_total=40,
        granules_mapped=int(values.get("has", "0")),
        granule_bytes=100,
    )


def _grant(grant: Grant) -> str:
    within = (
        f"tokens={grant.token_budget} sequences={grant.max_sequences} share={grant.slack_share:g}"
    )
    cap = f" cap={grant.kv_granule_cap}" if grant.kv_granule_cap else ""
    lives_ns = grant.expiry_ns - grant.heartbeat_ns
    assert lives_ns == nanoseconds("500ms")
    mode = grant.mode.name.lower()
    return f"Write {mode} ({grant.reason}) {within if grant.token_budget else 'nothing'}{cap}"


@pytest.mark.parametrize("story", stories("guard"))
def test_the_guard_grants_as_the_story_says(story: Path) -> None:
    tell(story, Guard())
