"""Catalog of policies: what each one borrows, by which leasing policy, with which mechanisms.

| name | borrows | leases by |
| --- | --- | --- |
| fixed | nothing | elastic_scheduler's `FixedPolicy` |
| spot | whole serving cards that an autoscaler frees | `SpotPolicy` |
| serverless | the same | `ServerlessPolicy` |
| rlboost | the same, and training cards for a window of each step | `RlboostPolicy` |
| libra | training cards, while they do not train | `LibraPolicy` |
| paper | guests beside hosts, ROSE as published | `PaperPolicy`, pressure policy `paper` |
| rose | guests beside hosts | `RosePolicy`, pressure policy `adaptive`, second copies |
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from types import MappingProxyType

from elastic_scheduler import Policy, make_policy
from executor.kv.pressure import PressurePolicy
from rose.errors import ConfigError
from rose.simulation.policies.libra import LibraPolicy, level_of
from rose.simulation.policies.rlboost import RlboostPolicy


class Borrows(StrEnum):
    """Resources of the serving cluster that a policy uses."""

    NOTHING = "nothing"
    GUESTS = "guests"
    CARDS = "cards"


class Hybrid(StrEnum):
    """Times at which training cards roll out."""

    NEVER = "never"
    ROLLOUT = "rollout"
    WINDOW = "window"


@dataclass(frozen=True, slots=True)
class PolicySetup:
    """One policy with all that belongs to it.

    hedges: second copies that a group of samples may have. instance_s: until a borrowed card has an
    engine that answers. priority_of: of a trajectory of which so many tool results failed.
    """

    name: str
    leasing: Callable[[], Policy]
    borrows: Borrows
    pressure: PressurePolicy = PressurePolicy.ADAPTIVE
    hybrid: Hybrid = Hybrid.NEVER
    hedges: int = 0
    instance_s: float = 60.0
    priority_of: Callable[[int], int] = lambda failed: 0


SETUPS: Mapping[str, PolicySetup] = MappingProxyType(
    {
        each.name: each
        for each in (
            PolicySetup("fixed", lambda: make_policy("fixed"), Borrows.NOTHING),
            PolicySetup("spot", lambda: make_policy("spot"), Borrows.CARDS),
            PolicySetup("serverless", lambda: make_policy("serverless"), Borrows.CARDS),
            PolicySetup("rlboost", RlboostPolicy, Borrows.CARDS, hybrid=Hybrid.WINDOW),
            PolicySetup(
                "libra",
                LibraPolicy,
                Borrows.NOTHING,
                hybrid=Hybrid.ROLLOUT,
                priority_of=level_of,
            ),
            PolicySetup(
                "paper", lambda: make_policy("paper"), Borrows.GUESTS, PressurePolicy.PAPER
            ),
            PolicySetup("rose", lambda: make_policy("rose"), Borrows.GUESTS, hedges=2),
        )
    }
)


def setup_of(name: str) -> PolicySetup:
    """A policy by its name. Raises ConfigError for an unknown one."""
    if name not in SETUPS:
        near = get_close_matches(name, SETUPS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(SETUPS)}"
        raise ConfigError(f"there is no policy {name!r}; {hint}")
    return SETUPS[name]


# Constants of production's policies that a search may vary: where each of them is.
CONSTANTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "sticky_margin": ("elastic_scheduler.routing.router", "STICKY_MARGIN"),
        "patience": ("elastic_scheduler.routing.router", "PATIENCE"),
        "long_on_guest": ("elastic_scheduler.routing.cost", "LONG_ON_GUEST"),
        "long_quantile": ("elastic_scheduler.routing.predictors", "LONG_QUANTILE"),
        "prior_revoke_s": ("elastic_scheduler.routing.cost", "PRIOR_REVOKE_S"),
        "saturation": ("elastic_scheduler.policies.cost_model", "SATURATION"),
        "take_above": ("elastic_scheduler.policies.rose", "TAKE_ABOVE"),
        "keep_above": ("elastic_scheduler.policies.rose", "KEEP_ABOVE"),
        "linger_s": ("elastic_scheduler.policies.rose", "LINGER_S"),
        "cooldown_s": ("elastic_scheduler.policies.rose", "COOLDOWN_S"),
        "first_tenure_s": ("elastic_scheduler.policies.rose", "FIRST_TENURE_S"),
        "hedge_margin": ("elastic_scheduler.hedging", "MARGIN"),
        "hedge_done_share": ("elastic_scheduler.hedging", "DONE_SHARE"),
    }
)
# Figures of the modelled node's configuration that a search may vary.
SETTINGS = (
    "slack_share",
    "kv_headroom",
    "high_watermark",
    "low_watermark",
    "safety_margin_s",
    "host_share",
    "hedges",
    "tail_batching",
    "instance_s",
)


def usual_value(name: str) -> float:
    """Return the production value of a constant of `CONSTANTS`."""
    module, attribute = CONSTANTS[name]
    return float(getattr(importlib.import_module(module), attribute))


def check_options(options: Mapping[str, float]) -> None:
    """Raise ConfigError for a name that means nothing, with the nearest that does."""
    known = [*CONSTANTS, *SETTINGS]
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(known)}"
            raise ConfigError(f"there is no option {name!r}; {hint}")


@contextmanager
def tuned(options: Mapping[str, float]) -> Iterator[None]:
    """Run with other constants; they are back as they were afterwards."""
    before: list[tuple[object, str, object]] = []
    try:
        for name, value in options.items():
            if name not in CONSTANTS:
                continue
            module_name, attribute = CONSTANTS[name]
            module = importlib.import_module(module_name)
            before.append((module, attribute, getattr(module, attribute)))
            setattr(module, attribute, value)
        yield
    finally:
        for changed, attribute, usual in reversed(before):
            setattr(changed, attribute, usual)
