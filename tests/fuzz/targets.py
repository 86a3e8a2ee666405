"""The fuzz targets, and the function of an input."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path

FUZZ_DIR = Path(__file__).parent
Target = Callable[[bytes], None]


def find_modules() -> list[str]:
    """Names of the modules with targets, without their `target_`."""
    return sorted(path.stem.removeprefix("target_") for path in FUZZ_DIR.glob("target_*.py"))


def names(module: str) -> list[str]:
    """Return the sorted names of the module's functions `run_NAME`, without importing it."""
    source = (FUZZ_DIR / f"target_{module}.py").read_text(encoding="utf-8")
    return sorted(re.findall(r"^def (run_\w+)", source, re.MULTILINE))


def load(module: str) -> list[Target]:
    """The module's functions of these names."""
    found = importlib.import_module(f"tests.fuzz.target_{module}")
    return [getattr(found, name) for name in names(module)]


def seeds(module: str) -> list[bytes]:
    """Valid inputs to begin with, as `dispatch` reads them: from the module's SEEDS by function."""
    found = importlib.import_module(f"tests.fuzz.target_{module}")
    given: dict[str, list[bytes]] = getattr(found, "SEEDS", {})
    known = names(module)
    return [bytes([known.index(name)]) + one for name, many in given.items() for one in many]


def dispatch(targets: list[Target], data: bytes) -> None:
    """Run one input: its first byte chooses the function, which gets the rest."""
    if data:
        targets[data[0] % len(targets)](data[1:])
