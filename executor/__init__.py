"""SLO-safe co-serving: control page, gate, guard; plugins in `executor.vllm`."""

from executor.control_page import ControlPage
from executor.errors import ExecutorError, PageError, PageUnreadable
from executor.gate import GateLimits, Run, Yield, decide
from executor.guard import GuardConfig, GuardCore
from executor.host_seat import HostSeat, Veto
from executor.host_sight import HostSight
from executor.latency_ring import Drained, LatencyLane, LatencyRing
from executor.pressure import PressureLimits, PressurePolicy
from executor.sections import Grant, GrantMode, GuestState, HostState, LatencyRecord, SeatState

__all__ = [
    "ControlPage",
    "Drained",
    "ExecutorError",
    "GateLimits",
    "Grant",
    "GrantMode",
    "GuardConfig",
    "GuardCore",
    "GuestState",
    "HostSeat",
    "HostSight",
    "HostState",
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
