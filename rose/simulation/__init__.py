"""Simulator: a whole cluster under a virtual clock, decided by the cores that run in production.

    traffic (Request) ──► balancer ──► modelled host ── page ──► guard, gate ──► modelled guest
                                          (executor's cores)          │ tokens
    trainer ◄── rollout buffer ◄── turns ◄── router, hedging ◄────────┤
       │ version       (elastic_scheduler's cores)                    │ tokens
       └──► modelled links ──► replicas        scheduler core ──leases┴── modelled dedicated replica
                                                                  ▼
                                                    RunResult: tables, JSON, plots

Decisions are the production cores' alone: the simulator hands them the clock and the events, and
carries out their actions. Whatever stands in for an engine, a link or a trainer has `Modelled` in
its name. `Scenario` is the input (`cluster`, `workload`, `trainer`, `step_times`), `RunResult` the
output. One seed has one history: nothing reads a real clock, and the only randomness is a
workload's, which does not depend on what policies do.
"""

from rose.simulation.cluster import (
    ClusterError,
    ClusterSpec,
    DedicatedPool,
    EngineSpec,
    GuestSpec,
    HostPool,
    Links,
)
from rose.simulation.results import (
    Latencies,
    Percentiles,
    RunResult,
    SloSlice,
    StepResult,
    UseSlice,
)
from rose.simulation.scenario import Scenario
from rose.simulation.step_times import (
    ProfiledSteps,
    RooflineSteps,
    StepTimes,
    StepWork,
    profile_of,
)
from rose.simulation.trainer import Algorithm, TrainerSpec
from rose.simulation.workload import Request, RolloutWorkload, ServingWorkload, Trajectory, Turn

__all__ = [
    "Algorithm",
    "ClusterError",
    "ClusterSpec",
    "DedicatedPool",
    "EngineSpec",
    "GuestSpec",
    "HostPool",
    "Latencies",
    "Links",
    "Percentiles",
    "ProfiledSteps",
    "Request",
    "RolloutWorkload",
    "RooflineSteps",
    "RunResult",
    "Scenario",
    "ServingWorkload",
    "SloSlice",
    "StepResult",
    "StepTimes",
    "StepWork",
    "TrainerSpec",
    "Trajectory",
    "Turn",
    "UseSlice",
    "profile_of",
]
