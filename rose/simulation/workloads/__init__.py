"""Workloads of the simulator: users' traffic, episodes of training jobs, and the jobs themselves.

All are seeded and read lazily: a week of traffic never lies in memory.
"""

from rose.simulation.workloads.episodes import ALFWORLD, FROZEN_LAKE, Environment
from rose.simulation.workloads.lengths import Amount, LogNormal, Quantiles
from rose.simulation.workloads.serving import (
    AZURE_CODE_2023,
    AZURE_CONVERSATION_2023,
    CODE_DAY,
    CONVERSATION_DAY,
    Bursts,
    BurstyTraffic,
    DailyShape,
    TraceTraffic,
    fit_bursts,
)
from rose.simulation.workloads.sessions import CODING_SESSIONS, AgenticSessions, SessionFile
from rose.simulation.workloads.training_jobs import (
    ALFWORLD_32B,
    FROZEN_LAKE_8B,
    JOBS,
    TrainingJob,
)

__all__ = [
    "ALFWORLD",
    "ALFWORLD_32B",
    "AZURE_CODE_2023",
    "AZURE_CONVERSATION_2023",
    "CODE_DAY",
    "CODING_SESSIONS",
    "CONVERSATION_DAY",
    "FROZEN_LAKE",
    "FROZEN_LAKE_8B",
    "JOBS",
    "AgenticSessions",
    "Amount",
    "Bursts",
    "BurstyTraffic",
    "DailyShape",
    "Environment",
    "LogNormal",
    "Quantiles",
    "SessionFile",
    "TraceTraffic",
    "TrainingJob",
    "fit_bursts",
]
