"""SLO-safe co-serving: control page, grants, KV memory; plugins of engines in `executor.vllm` and
`executor.sglang`.

Its cores decide and act on nothing: clock, page and memory are the caller's. A core has
`step(event, now_ns) -> list[Action]` and `status()`. The loop of a guest's grants
(`rose.node.guest.guard` is the real one), with a reclaim when it owes for too long:

    controller = GrantController(config, previous=page.grant.peek())
    while True:  # 50 times a second
        seen = Observation(page.host_view(), page.guest.peek(), lease_epoch=held())
        for action in controller.step(seen, monotonic_ns()):
            match action:
                case Write(grant):          page.grant.write(grant)
                case VoidLeases():          end_leases()
                case Boost(on):             raise_or_lower(on)
                case Reclaim(owed_bytes):   begin_ladder(owed_bytes)

    ladder = ReclaimCore(monotonic_ns(), held_bytes(), wanted_bytes, deadline_ns)
    while not finished:
        for action in ladder.step(Measured(held_bytes(), engine_says()), monotonic_ns()):
            match action:
                case Escalate(level, bytes_left): take(level, bytes_left)
                case Finished():                  finished = action

Their golden traces are in tests/traces/{guard,reclaim}.
"""

import sys

# The image of a host's engine has its own Python, and no installer asks for this one's there.
if sys.version_info < (3, 11):  # noqa: UP036
    raise ImportError("ROSE's plugin needs Python 3.11 or newer; the engine serves on without ROSE")

from executor.control_page.host_seat import HostSeat, Veto
from executor.control_page.latency_ring import DrainedRecords, LatencyLane, LatencyRing
from executor.control_page.page import ControlPage, HostView
from executor.control_page.seqlock_records import (
    Grant,
    GrantMode,
    GuestState,
    HostState,
    LatencyRecord,
    SeatState,
)
from executor.errors import ExecutorError, PageError, PageUnreadable
from executor.freeze_reason import FreezeReason, explained
from executor.grant_controller import GrantController, GuardConfig
from executor.kv.lending import PressureLimits, PressurePolicy
from executor.step_decision import GateLimits, Run, Yield, decide

__all__ = [
    "ControlPage",
    "DrainedRecords",
    "ExecutorError",
    "FreezeReason",
    "GateLimits",
    "Grant",
    "GrantController",
    "GrantMode",
    "GuardConfig",
    "GuestState",
    "HostSeat",
    "HostState",
    "HostView",
    "LatencyLane",
    "LatencyRecord",
    "LatencyRing",
    "PageError",
    "PageUnreadable",
    "PressureLimits",
    "PressurePolicy",
    "Run",
    "SeatState",
    "Veto",
    "Yield",
    "decide",
    "explained",
]
