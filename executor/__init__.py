"""SLO-safe co-serving: control page, gate, guard; plugins in `executor.vllm`."""

from executor.control_page import ControlPage
from executor.errors import ExecutorError, PageError, PageUnreadable
from executor.gate import GateLimits, Run, Yield, decide
from executor.guard import GuardConfig, GuardCore
from executor.latency_ring import Drained, LatencyRing
from executor.pressure import PressureLimits, PressurePolicy
from executor.sections import Grant, GrantMode, GuestState, HostState, LatencyRecord

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
    "HostState",
    "LatencyRecord",
    "LatencyRing",
    "PageError",
    "PageUnreadable",
    "PressureLimits",
    "PressurePolicy",
    "Run",
    "Yield",
    "decide",
]
