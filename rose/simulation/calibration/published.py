"""Engines of published GPU tables, from a file of facts beside this module.

`gpu_tables` writes it. A name may be short where it is clear: `70b` is the one model of that size.
"""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import msgspec

from rose.errors import ConfigError
from rose.simulation.cluster import EngineSpec
from rose.simulation.step_times import ProfiledSteps
from slo import StepProfile

KIND, LAYOUT = "rose.published_engines", 1
FACTS = "published.json"


@dataclass(frozen=True, slots=True)
class PublishedEngine:
    """Step times and memory of one model on `cards` cards of one kind, under one engine."""

    model: str
    card: str
    engine: str
    cards: int
    profile: StepProfile
    kv_tokens: int
    kv_bytes_per_token: int
    weight_bytes: int

    def spec(self) -> EngineSpec:
        """Return the engine's specification for the simulator."""
        return EngineSpec(
            model=self.model,
            cards=self.cards,
            steps=ProfiledSteps(self.profile),
            kv_tokens=self.kv_tokens,
            kv_bytes_per_token=self.kv_bytes_per_token,
            weight_bytes=self.weight_bytes,
        )


class _Facts(msgspec.Struct):
    kind: str
    layout: int
    source: str
    engines: tuple[PublishedEngine, ...]


@cache
def _facts() -> _Facts:
    facts = msgspec.json.decode(files(__package__).joinpath(FACTS).read_bytes(), type=_Facts)
    assert (facts.kind, facts.layout) == (KIND, LAYOUT)
    return facts


def source() -> str:
    """Return the source of the facts."""
    return _facts().source


def published_engines() -> tuple[PublishedEngine, ...]:
    """All of them."""
    return _facts().engines


def published_engine(
    model: str, card: str = "h200", engine: str = "vllm", cards: int | None = None
) -> PublishedEngine:
    """The one of that model, on the fewest cards unless `cards` says how many.

    Raises ConfigError, with what there is, for a model, card, engine or size without a table.
    """
    named = _named(model)
    found = [e for e in published_engines() if e.model == named]
    for key, wanted in (("card", card), ("engine", engine), ("cards", cards)):
        known = sorted({getattr(e, key) for e in found})
        if wanted is not None and wanted not in known:
            there = ", ".join(map(str, known))
            raise ConfigError(f"{key} {wanted}: no table of {named} has it; there are {there}")
        found = [e for e in found if wanted is None or getattr(e, key) == wanted]
    return min(found, key=lambda e: e.cards)


def _named(model: str) -> str:
    known = sorted({e.model for e in published_engines()})
    named = [name for name in known if name == model.lower() or name.endswith("-" + model.lower())]
    if len(named) != 1:
        raise ConfigError(f"model {model}: no table has it; there are {', '.join(known)}")
    return named[0]
