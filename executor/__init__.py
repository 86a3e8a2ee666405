"""SLO-safe co-serving: control page, grants, KV memory; plugins in `executor.vllm`."""

from executor.control_page.host_seat import HostSeat, HostView, Veto
from executor.control_page.latency_ring import DrainedRecords, LatencyLane, LatencyRing
from executor.control_page.page import ControlPage
from executor.control_page.records import (
    Grant,
    GrantMode,
    GuestState,
    HostState,
    LatencyRecord,
    SeatState,
)
from executor.errors import ExecutorError, PageError, PageUnreadable
from executor.grants.grant_controller import GrantController, GuardConfig
from executor.grants.step_gate import GateLimits, Run, Yield, decide
from executor.kv.capacity_policy import PressureLimits, PressurePolicy

__all__ = [
    "ControlPage",
    "DrainedRecords",
    "ExecutorError",
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
]
