"""What every policy is, and their names.

Operator's modes, lease epochs and expiry are not theirs: a policy sees only what may be leased, and
what it says is carried out by whoever keeps the leases.
"""

import importlib
from typing import Protocol

from elastic_scheduler.offer import Offer
from elastic_scheduler.situation import Decision, Holding, Situation


class Policy(Protocol):
    """Decides over a situation; a state machine without IO, so a trace has one outcome."""

    name: str

    def decide(self, situation: Situation) -> Decision:
        """What to take and give back now; asked again after every change and each second."""

    def revoked(self, holding: Holding, held: int, now_s: float) -> None:
        """A node took a replica back; its job held `held` guests before."""

    def switched(self, offer: Offer, took_s: float) -> None:
        """A leased replica gave its first token `took_s` after its lease."""


_CLASSES = {
    "fixed": "FixedPolicy",
    "spot": "SpotPolicy",
    "serverless": "ServerlessPolicy",
    "paper": "PaperPolicy",
    "rose": "RosePolicy",
}


def policy_names() -> tuple[str, ...]:
    """All policies that `make_policy` knows."""
    return tuple(_CLASSES)


def make_policy(name: str) -> Policy:
    """A policy with its defaults. Raises ValueError for an unknown name."""
    if name not in _CLASSES:
        raise ValueError(f"there is no policy {name!r}; choose from {', '.join(_CLASSES)}")
    module = importlib.import_module(f"elastic_scheduler.policies.{name}")
    policy: Policy = getattr(module, _CLASSES[name])()
    return policy
