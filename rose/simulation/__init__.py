"""Simulator: a whole cluster under a virtual clock, decided by the cores that run in production.

    users' requests ────► balancer ──► modelled host ── page ──► guard, gate ──► modelled guest
                                          (executor's cores)          │ tokens
    trainer ◄── rollout buffer ◄── turns ◄── router, hedging ◄────────┤
       │ version       (elastic_scheduler's cores)                    │ tokens
       └──► modelled links ──► replicas        scheduler core ──leases┴── modelled dedicated replica
                                                                  ▼
                                                    RunResult: tables, JSON, plots

Decisions are the production cores' alone: the simulator hands them the clock and the events, and
carries out their actions. A class that stands in for an engine, a link or a trainer has `Modelled`
in its name. `Scenario` is the input, `RunResult` the output. One seed has one history: nothing
reads a real clock, and the only randomness is a workload's, which does not depend on policies.
"""

from rose.simulation.engine_specs import EngineFigures, StepWork, published_engine
from rose.simulation.results import (
    Percentiles,
    RunResult,
    SloSlice,
    StepResult,
    UserLatencies,
    UseSlice,
)
from rose.simulation.run import SimulatedRun, carry_out, run_all
from rose.simulation.scenario import (
    Algorithm,
    ClusterSpec,
    DedicatedReplicas,
    GuestSpec,
    HostPool,
    Links,
    Scenario,
    TrainerSpec,
)
from rose.simulation.workloads.episodes import EpisodeTurn, RolloutEpisode, RolloutWorkload
from rose.simulation.workloads.traffic import ServingWorkload, UserRequest

__all__ = [
    "Algorithm",
    "ClusterSpec",
    "DedicatedReplicas",
    "EngineFigures",
    "EpisodeTurn",
    "GuestSpec",
    "HostPool",
    "Links",
    "Percentiles",
    "RolloutEpisode",
    "RolloutWorkload",
    "RunResult",
    "Scenario",
    "ServingWorkload",
    "SimulatedRun",
    "SloSlice",
    "StepResult",
    "StepWork",
    "TrainerSpec",
    "UseSlice",
    "UserLatencies",
    "UserRequest",
    "carry_out",
    "published_engine",
    "run_all",
]
