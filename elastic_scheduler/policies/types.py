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
    """Demand of a job now; infinite if unknown, which asks for everything.

    `turns` run or wait, `owed_tokens` are still to be made by them, `step` is the policy version
    that its trajectories work with, `weight` the operator's priority, `model` the model of its
    replicas ("": their first one), `max_guests` its quota.
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
        """Return it without NaN and negative figures, which an idle meter may give."""
        turns = self.turns if self.turns > 0 else 0.0
        owed = self.owed_tokens if self.owed_tokens > 0 else 0.0
        return replace(self, turns=turns, owed_tokens=owed)


@dataclass(frozen=True, slots=True)
class Holding:
    """An active lease, with its replica's newest offer."""

    job: str
    offer: Offer
    since_s: float


@dataclass(frozen=True, slots=True)
class Situation:
    """Input of a policy at one moment: offers to lease, leases that may be kept, and the jobs."""

    now_s: float
    free: tuple[Offer, ...]
    held: tuple[Holding, ...]
    jobs: tuple[JobDemand, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """A lease of a replica to a job, or its return, with the reason."""

    job: str
    replica: str
    why: str
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LeaseDecision:
    """Output of a policy: the changes to make now, usually none."""

    take: tuple[Move, ...] = ()
    give_back: tuple[Move, ...] = ()


class Policy(Protocol):
    """Decides over a situation; a state machine without IO, so a trace has one outcome."""

    name: str

    def decide(self, situation: Situation) -> LeaseDecision:
        """Return the leases to make and end now; called after every change and each second."""

    def revoked(self, holding: Holding, held: int, now_s: float) -> None:
        """Take the news that a node took a replica back; its job held `held` guests before."""

    def switched(self, offer: Offer, took_s: float, switch: SwitchKind = SwitchKind.NONE) -> None:
        """Take the time `took_s` of a leased replica from that switch to its first token."""


def policy_names() -> tuple[str, ...]:
    """Return the names of all policies of `make_policy`."""
    return tuple(_CLASSES)


def make_policy(name: str, **options: float) -> Policy:
    """Return a policy by its name; options are those of its class. Raises ValueError."""
    if name not in _CLASSES:
        raise ValueError(f"there is no policy {name!r}; choose from {', '.join(_CLASSES)}")
    module, policy_class = _CLASSES[name]
    policy: Policy = getattr(
        importlib.import_module(f"elastic_scheduler.policies.{module}"), policy_class
    )(**options)
    return policy
