"""Stories of the pure cores as data: events, a line `----`, and the actions and status after them.

    # A lease that nobody renews is taken back.
    5s tick
    ----
    TakenBack epoch=1 reason=expired
    | epoch=1 vacant

Every core has a runner of a few lines, which turns one line into an event and steps the core. With
ROSE_REWRITE_TRACES=1 the tests write what happened into the files instead of comparing: read the
difference before you commit it. (The format is that of CockroachDB's datadriven, as used for the
traces of etcd's raft.)
"""

import os
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import pytest

TRACES = Path(__file__).parents[2] / "traces"
REWRITE = "ROSE_REWRITE_TRACES"
_UNITS_NS = {"": 1, "ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}
_UNITS_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class Runner(Protocol):
    """Drives one core by lines."""

    def step(self, verb: str, values: dict[str, str]) -> Iterator[str]:
        """Carry out one line; what the core asks to be done, one action a line."""
        ...

    def status(self) -> str:
        """Return the core's state."""
        ...


def stories(core: str) -> list[Any]:
    """The files of a core, as parameters of its test."""
    return [pytest.param(path, id=path.stem) for path in sorted((TRACES / core).glob("*.txt"))]


def tell(path: Path, runner: Runner) -> None:
    """Run a story: what comes out of each block has to be what stands there."""
    told, found = path.read_text(), []
    for block in told.strip().split("\n\n"):
        asked, separator, _ = block.partition("\n----")
        if not separator:
            found.append(block)  # A comment of its own.
            continue
        lines = [line for line in asked.splitlines() if line and not line.startswith("#")]
        said = [action for line in lines for action in runner.step(*parsed(line))]
        found.append("\n".join([asked, "----", *said, f"| {runner.status()}"]))
    happened = "\n\n".join(found) + "\n"
    if os.environ.get(REWRITE):
        path.write_text(happened)
        return
    assert happened == told, f"{path.name} tells another story; {REWRITE}=1 writes the new one"


def parsed(line: str) -> tuple[str, dict[str, str]]:
    """`grant epoch=1 for=5s` → its verb, and its values by name; a bare word stands for itself."""
    verb, *rest = re.findall(r"(?:[^\s\"]|\"[^\"]*\")+", line)
    values = dict(word.partition("=")[::2] for word in rest)
    return verb, {name: value.strip('"') for name, value in values.items()}


def nanoseconds(text: str) -> int:
    """`20ms`, `1.5s`."""
    number, unit = re.fullmatch(r"([\d.]+)([a-z]*)", text).groups()  # type: ignore[union-attr]
    return round(float(number) * _UNITS_NS[unit])


def amount(text: str) -> int:
    """`300MiB`."""
    number, unit = re.fullmatch(r"([\d.]+)([A-Za-z]*)", text).groups()  # type: ignore[union-attr]
    return round(float(number) * _UNITS_BYTES[unit or "B"])


def shown(value: object) -> str:
    """A record in one line: its kind, and the fields that are not as they are by default."""
    if not is_dataclass(value):
        return _word("", value)
    words = [type(value).__name__]
    for field in fields(value):
        held = getattr(value, field.name)
        if field.default is MISSING or held != field.default:
            words.append(_field(field.name, held))
    return " ".join(word for word in words if word)


def status(value: Any) -> str:
    """A status in one line; what is false, None or zero is left out."""
    named = [(field.name, getattr(value, field.name)) for field in fields(value)]
    return " ".join(_field(name, held) for name, held in named if held or isinstance(held, Enum))


def _field(name: str, value: object) -> str:
    if value is True:
        return name
    if value is False:
        return f"not {name}"
    for unit in ("_ns", "_s", "_bytes"):
        if name.endswith(unit):
            return f"{name.removesuffix(unit)}={_word(unit, value)}"
    if name.startswith("bytes_"):
        return f"{name.removeprefix('bytes_')}={_word('_bytes', value)}"
    return f"{name}={_word('', value)}"


def _word(unit: str, value: object) -> str:
    if isinstance(value, Enum):
        return value.name.lower()
    if is_dataclass(value):
        return f"({shown(value)})"
    if isinstance(value, tuple):
        return "[" + ", ".join(shown(each) for each in value) + "]"
    if unit == "_ns" and isinstance(value, int):
        return f"{value / 10**9:g}s" if value >= 10**9 else f"{value / 10**6:g}ms"
    if unit == "_s" and isinstance(value, float):
        return f"{value:g}s"
    if unit == "_bytes" and isinstance(value, int):
        return _bytes(value)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f'"{text}"' if " " in text or not text else text


def _bytes(value: int) -> str:
    for name, size in reversed(_UNITS_BYTES.items()):
        if value and value % size == 0:
            return f"{value // size}{name}"
    return f"{value}B"
