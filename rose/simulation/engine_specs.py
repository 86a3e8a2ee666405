"""Engines: how long a step takes and how much fits, measured or of published GPU tables.

Step times are the straight line that `rose profile` fits. `published.json` beside this module has
those of published GPU tables (`scripts/gpu_tables.py` writes it); a model's name may be short where
it is clear: `70b` is the one model of that size.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass

from rose.errors import ConfigError, RoseError
from rose.simulation.checked import CHECKED, Count
from slo import ProfileError, StepProfile

KIND, LAYOUT = "rose.published_engines", 1
FACTS = "published.json"


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of one step of continuous batching, in tokens and sequences.

    prefill_tokens: prompt tokens computed in it, none of them cached. decode_sequences: sequences
    that get one token each. prefill_sequences: sequences to which `prefill_tokens` belong.
    context_tokens: KV tokens that all its sequences attend to.
    """

    prefill_tokens: int
    decode_sequences: int
    prefill_sequences: int = 0
    context_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens that the step computes."""
        return self.prefill_tokens + self.decode_sequences

    @property
    def sequences(self) -> int:
        """Number of sequences in the step."""
        return self.decode_sequences + self.prefill_sequences


@checked_dataclass(frozen=True, slots=True, config=CHECKED)
class DraftFigures:
    """Drafts of an engine's decode steps, which are used wherever that is faster.

    made: tokens that a sequence gets in such a step on the average, at least 1. verified: drafted
    tokens of a sequence that the step computes with its own.
    """

    made: Annotated[float, Field(ge=1)]
    verified: Count = 8


@checked_dataclass(frozen=True, slots=True, config=CHECKED)
class EngineFigures:
    """Size and speed of one inference engine. cards: its tensor parallel size; all figures are of
    these cards together.

    profile: step times. kv_tokens: size of the KV cache in tokens. kv_bytes_per_token,
    weight_bytes: bytes of memory. max_sequences, max_step_tokens: limits of a step, to the latter
    of which prefill is chunked. block_tokens: tokens of a KV block. card, engine: of the published
    table that it comes from, or "". drafts: None for an engine without.
    """

    model: str
    cards: Count
    profile: StepProfile
    kv_tokens: Count
    kv_bytes_per_token: Count
    weight_bytes: Count
    max_sequences: Count = 256
    max_step_tokens: Count = 2_048
    block_tokens: Count = 16
    card: str = ""
    engine: str = ""
    drafts: DraftFigures | None = None

    def __post_init__(self) -> None:
        if self.kv_tokens < self.block_tokens:
            raise ValueError(f"kv_tokens is {self.kv_tokens}; one block has {self.block_tokens}")

    @property
    def kv_bytes(self) -> int:
        """Size of the KV cache in bytes."""
        return self.kv_tokens * self.kv_bytes_per_token

    def seconds(self, work: StepWork) -> float:
        """Return the seconds that a step takes alone on the engine's cards, without drafts; 0
        without tokens.
        """
        return self.profile.seconds(work.tokens, work.sequences, work.context_tokens)

    def decode(self, work: StepWork) -> tuple[float, float]:
        """Return the seconds of a step, and the tokens that each decoding sequence gets in it on
        the average: more than 1 where drafts are faster, which no step with prefill has.
        """
        usual_s, drafts = self.seconds(work), self.drafts
        if drafts is None or work.prefill_tokens:
            return usual_s, 1.0
        tokens = work.tokens * (1 + drafts.verified)
        seconds = self.profile.seconds(tokens, work.sequences, work.context_tokens)
        return (seconds, drafts.made) if seconds < usual_s * drafts.made else (usual_s, 1.0)


@cache
def _facts() -> tuple[str, tuple[EngineFigures, ...]]:
    facts = json.loads(files(__package__).joinpath(FACTS).read_bytes())
    assert (facts["kind"], facts["layout"]) == (KIND, LAYOUT)
    return facts["source"], TypeAdapter(tuple[EngineFigures, ...]).validate_python(facts["engines"])


def source() -> str:
    """Return the name of the source of the published tables."""
    return _facts()[0]


def published_engines() -> tuple[EngineFigures, ...]:
    """Return the engines of all published tables, from a cache."""
    return _facts()[1]


def published_engine(
    model: str, card: str = "h200", engine: str = "vllm", cards: int | None = None
) -> EngineFigures:
    """Return the published engine of a model, on the fewest cards unless `cards` is given.

    Raises ConfigError, which names those that exist, for a model, card, engine or number of cards
    without a table.
    """
    known = sorted({e.model for e in published_engines()})
    named = [name for name in known if name == model.lower() or name.endswith(f"-{model.lower()}")]
    if len(named) != 1:
        raise ConfigError(f"model {model}: no table has it; there are {', '.join(known)}")
    found = [e for e in published_engines() if e.model == named[0]]
    for key, wanted in (("card", card), ("engine", engine), ("cards", cards)):
        sizes = sorted({getattr(e, key) for e in found})
        if wanted is not None and wanted not in sizes:
            there = ", ".join(map(str, sizes))
            raise ConfigError(f"{key} {wanted}: no table of {named[0]} has it; there are {there}")
        found = [e for e in found if wanted is None or getattr(e, key) == wanted]
    return min(found, key=lambda e: e.cards)


def read_profile(path: Path) -> StepProfile:
    """Return the step times in a file that `rose profile` saved.

    Raises RoseError with the file and the fault, for any other file.
    """
    try:
        return StepProfile.from_json(path.read_text(encoding="utf-8"))
    except ProfileError as error:
        raise RoseError(f"{path}:1: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise RoseError(f"{path}: cannot be read as a step profile: {error}") from error
