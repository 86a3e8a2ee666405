"""Input, output and interface of a leasing policy, and the policies by name.

A policy sees one `Situation` (offers that may be leased, leases that may be kept, jobs and their
demand) and returns one `LeaseDecision`. It knows neither operator's modes nor lease epochs and
expiry: the scheduler filters the offers before and carries out the moves afterwards.
"""

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from elastic_scheduler.leases.lease_table import Offer, SwitchKind

_CLASSES = {
    "fixed": ("baselines", "FixedPolicy"),
    "spot": ("baselines", "SpotPolicy"),
    "serverless": ("baselines", "ServerlessPolicy"),
    "paper": ("baselines", "PaperPolicy"),
    "rose": ("rose", "RosePolicy"),
}


@dataclass(frozen=True, slots=True)
class JobDemand:
    """Demand of a job now; infinite if unknown, which asks for every replica.

    turns: turns that run or wait. owed_tokens: tokens that they are still to generate. step: newest
    policy version of the job. weight: the operator's priority. model: "" for the replicas' first
    one. max_guests: quota of guests.
    """

    job: str
    turns: float = math.inf
    owed_tokens: float = math.inf
    step: int = 0
    weight: float = 1.0
    model: str = ""
    max_guests: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"the weight of {self.job} is {self.weight}; give one above 0")

    def cleaned(self) -> "JobDemand":
        """Return the demand with NaN and negative figures, as of an idle meter, replaced by 0."""
        turns = self.turns if self.turns > 0 else 0.0
        owed = self.owed_tokens if self.owed_tokens > 0 else 0.0
        return replace(self, turns=turns, owed_tokens=owed)


@dataclass(frozen=True, slots=True)
class Holding:
    """Active lease of a job, with the replica's newest offer and the time of the grant."""

    job: str
    offer: Offer
    since_s: float


@dataclass(frozen=True, slots=True)
class Situation:
    """Input of a leasing policy: free offers, leases that may be kept, and the jobs' demand."""

    now_s: float
    free: tuple[Offer, ...]
    held: tuple[Holding, ...]
    jobs: tuple[JobDemand, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """One lease to grant or to end: the replica, the job, and the reason with its figures."""

    job: str
    replica: str
    why: str
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LeaseDecision:
    """Output of a leasing policy: leases to grant (`take`) and to end, usually none."""

    take: tuple[Move, ...] = ()
    give_back: tuple[Move, ...] = ()


class Policy(Protocol):
    """Leasing policy: a state machine without IO that decides which leases to grant and end."""

    name: str

    def decide(self, situation: Situation) -> LeaseDecision:
        """Return the leases to grant and end now; called after every change and each second."""

    def revoked(self, holding: Holding, held: int, now_s: float) -> None:
        """Learn that a node took a replica back from a job that had `held` guests until then."""

    def switched(self, offer: Offer, took_s: float, switch: SwitchKind = SwitchKind.NONE) -> None:
        """Learn that a leased replica took `took_s` seconds to its first token after a switch."""


def policy_names() -> tuple[str, ...]:
    """Return the names of all policies that `make_policy` knows."""
    return tuple(_CLASSES)


def make_policy(name: str, **options: float) -> Policy:
    """Return a new policy by its name; options are arguments of its class.

    Raises ValueError for an unknown name.
    """
    if name not in _CLASSES:
        raise ValueError(f"there is no policy {name!r}; choose from {', '.join(_CLASSES)}")
    module, policy_class = _CLASSES[name]
    policy: Policy = getattr(
        importlib.import_module(f"elastic_scheduler.policies.{module}"), policy_class
    )(**options)
    return policy
