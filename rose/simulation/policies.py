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

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from types import MappingProxyType, ModuleType

from elastic_scheduler import Policy, hedging, make_policy
from elastic_scheduler.policies import rose as rose_policy
from elastic_scheduler.routing import cost, predictors, router
from executor.kv.lending import PressurePolicy
from rose.errors import ConfigError
from rose.simulation.fleet.hybrid_pool import LibraPolicy, RlboostPolicy


class Borrows(StrEnum):
    """Resources of the serving cluster that a policy borrows: none, guests beside hosts, or whole
    cards.
    """

    NOTHING = "nothing"
    GUESTS = "guests"
    CARDS = "cards"


class Hybrid(StrEnum):
    """Times at which training cards roll out: never, in the rollout phase, or a window of it."""

    NEVER = "never"
    ROLLOUT = "rollout"
    WINDOW = "window"


@dataclass(frozen=True, slots=True)
class PolicySetup:
    """Policy of a run: its leasing policy, what it borrows, its guards' pressure policy, and its
    use of training cards.

    hedges: number of second copies of turns that a group may have.
    """

    name: str
    leasing: Callable[[], Policy]
    borrows: Borrows
    pressure: PressurePolicy = PressurePolicy.ADAPTIVE
    hybrid: Hybrid = Hybrid.NEVER
    hedges: int = 0


POLICIES: Mapping[str, PolicySetup] = MappingProxyType(
    {
        each.name: each
        for each in (
            PolicySetup("fixed", lambda: make_policy("fixed"), Borrows.NOTHING),
            PolicySetup("spot", lambda: make_policy("spot"), Borrows.CARDS),
            PolicySetup("serverless", lambda: make_policy("serverless"), Borrows.CARDS),
            PolicySetup("rlboost", RlboostPolicy, Borrows.CARDS, hybrid=Hybrid.WINDOW),
            PolicySetup("libra", LibraPolicy, Borrows.NOTHING, hybrid=Hybrid.ROLLOUT),
            PolicySetup(
                "paper", lambda: make_policy("paper"), Borrows.GUESTS, PressurePolicy.PAPER
            ),
            PolicySetup("rose", lambda: make_policy("rose"), Borrows.GUESTS, hedges=2),
        )
    }
)


def setup_of(name: str) -> PolicySetup:
    """Return the set-up of the policy of this name. Raises ConfigError for an unknown one."""
    if name not in POLICIES:
        raise ConfigError(f"there is no policy {name!r}; {_hint(name, list(POLICIES))}")
    return POLICIES[name]


def _hint(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(known)}"


# Constants of production's policies that a search may vary: the module and name of each.
CONSTANTS: Mapping[str, tuple[ModuleType, str]] = MappingProxyType(
    {
        "sticky_margin": (router, "STICKY_MARGIN"),
        "patience": (router, "PATIENCE"),
        "long_on_guest": (cost, "LONG_ON_GUEST"),
        "long_quantile": (predictors, "LONG_QUANTILE"),
        "prior_revoke_s": (cost, "PRIOR_REVOKE_S"),
        "keep_above": (rose_policy, "KEEP_ABOVE"),
        "linger_s": (rose_policy, "LINGER_S"),
        "first_tenure_s": (rose_policy, "FIRST_TENURE_S"),
        "hedge_margin": (hedging, "MARGIN"),
        "hedge_done_share": (hedging, "DONE_SHARE"),
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
    "parts",
    "drafts",
    "instance_s",
)


def usual_value(name: str) -> float:
    """Return the value that a tunable constant of `CONSTANTS` has in production."""
    module, attribute = CONSTANTS[name]
    return float(getattr(module, attribute))


def check_options(options: Iterable[str]) -> None:
    """Raise ConfigError, with the nearest known name, for an unknown constant or setting."""
    known = [*CONSTANTS, *SETTINGS]
    for name in options:
        if name not in known:
            raise ConfigError(f"there is no option {name!r}; {_hint(name, known)}")


@contextmanager
def tuned(options: Mapping[str, float]) -> Iterator[None]:
    """Run the block with other constants in production's modules, and restore them afterwards.

    Other names are ignored.
    """
    changed = {CONSTANTS[name]: value for name, value in options.items() if name in CONSTANTS}
    before = {constant: getattr(*constant) for constant in changed}
    try:
        for (module, attribute), value in changed.items():
            setattr(module, attribute, value)
        yield
    finally:
        for (module, attribute), value in before.items():
            setattr(module, attribute, value)
