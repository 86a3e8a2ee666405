"""Step times of published GPU tables: `python -m scripts.gpu_tables`.

The tables are those of NVIDIA's aiconfigurator-core (Apache-2.0), measured kernel by kernel for
each card and engine. Steps of many sizes are estimated by them and fitted as `rose profile` fits
measured ones; what comes out is a small file of facts, `published.json`, so that a simulation needs
neither the package nor a card.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rose.errors import ConfigError
from rose.simulation.engine_specs import KIND, LAYOUT, EngineFigures
from slo import StepProfile, StepSample, fit_profile

PACKAGE = "aiconfigurator-core"
SYSTEMS = {"h200": "h200_sxm", "h100": "h100_sxm"}
ENGINES = ("vllm", "sglang")
BF16_BYTES = 2
# (name here, name there, parameters, KV heads × head size × layers, cards)
MODELS: tuple[tuple[str, str, float, int, tuple[int, ...]], ...] = (
    ("qwen3-8b", "Qwen/Qwen3-8B", 8.19e9, 8 * 128 * 36, (1, 2, 4, 8)),
    ("qwen3-32b", "Qwen/Qwen3-32B", 32.8e9, 8 * 128 * 64, (2, 4, 8)),
    ("llama-3.1-70b", "meta-llama/Meta-Llama-3.1-70B", 70.6e9, 8 * 128 * 80, (4, 8)),
)
MEMORY_BYTES = {"h200": 151_397_597_184, "h100": 85_899_345_920}
# Share of a card that engines take, and their need beside weights and KV cache.
MEMORY_SHARE, ACTIVATION_BYTES = 0.9, 4 << 30
_SEQUENCES = (1, 4, 16, 64, 128, 256)
_CONTEXTS = (256, 1_024, 4_096, 16_384)
_PREFILLS = (64, 256, 512, 1_024, 2_048, 4_096)
_BESIDE = (0, 16, 64, 128)
_MOST_CONTEXT = 1_100_000


def samples(handle: Any) -> Iterator[StepSample]:  # noqa: ANN401 - of the package, untyped here
    """Estimated steps: decodes of several batches and contexts, prefills alone and beside them."""
    for sequences in _SEQUENCES:
        for context in _CONTEXTS:
            if sequences * context <= _MOST_CONTEXT:
                ms = handle.decode_step_latency(sequences, context, 2)
                yield StepSample(sequences, sequences, sequences * context, ms / 1e3)
    for tokens in _PREFILLS:
        for beside in _BESIDE:
            length = 1_024 if beside else tokens
            ms = handle.mixed_step_latency(tokens, beside, length, 2)
            yield StepSample(tokens + beside, beside + 1, beside * length, ms / 1e3)


def kv_tokens(card: str, cards: int, parameters: float, kv_bytes_per_token: int) -> int:
    """KV cache of an engine: what is left of its cards' memory."""
    room = cards * (MEMORY_SHARE * MEMORY_BYTES[card] - ACTIVATION_BYTES) - parameters * BF16_BYTES
    if room <= 0:
        raise ConfigError(f"{parameters:g} parameters do not fit {cards} {card} cards")
    return int(room / kv_bytes_per_token)


def engines() -> Iterator[EngineFigures]:
    """One for each model, card, engine and tensor parallel size."""
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle
    except ImportError:
        raise ConfigError(f"{PACKAGE} is not there; install rose-rollout[simulation]") from None
    for name, theirs, parameters, kv_width, sizes in MODELS:
        kv_bytes = 2 * BF16_BYTES * kv_width
        for card, system in SYSTEMS.items():
            for engine in ENGINES:
                for cards in sizes:
                    handle = EngineHandle.compile(theirs, system, engine, tp_size=cards)
                    yield EngineFigures(
                        name, cards, fit_profile(samples(handle)),
                        kv_tokens(card, cards, parameters, kv_bytes), kv_bytes,
                        int(parameters * BF16_BYTES), card=card, engine=engine,
                    )  # fmt: skip


def rounded(profile: StepProfile) -> dict[str, float]:
    """Its figures with four digits: the tables know no more."""
    return {
        key: value if isinstance(value, int) else float(f"{value:.4g}")
        for key, value in asdict(profile).items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Write the facts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    found = [asdict(each) | {"profile": rounded(each.profile)} for each in engines()]
    facts = {
        "kind": KIND,
        "layout": LAYOUT,
        "source": f"{PACKAGE} {version(PACKAGE)}, Apache-2.0, NVIDIA",
        "engines": found,
    }
    args.out.write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    sys.stdout.write(f"saved {len(found)} engines to {args.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
