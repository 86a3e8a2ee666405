"""Quantiles of measurements, and results compared with their raw records, field by field.

Bootstrap intervals are those of `rose.compare.bootstrap`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from rose.errors import BAD_BYTES, RoseError

T = TypeVar("T")


def quantiles(values: Sequence[float], *shares: float) -> list[float | None]:
    """Return the quantile at each share of 0 to 1; None without values."""
    if not values:
        return [None] * len(shares)
    return [float(value) for value in np.quantile(np.asarray(values), shares)]


def rounded(values: Sequence[float], *shares: float, scale: float = 1.0) -> list[float]:
    """Return quantiles, times `scale`, to three digits; not a number without values."""
    found = quantiles(values, *shares)
    return [math.nan if value is None else round(scale * value, 3) for value in found]


# Sums in another order, by another version of a library, may differ in the last digits.
RELATIVE_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field whose reported value is not what the records give."""

    field: str
    reported: object
    recomputed: object

    def __str__(self) -> str:
        return f"{self.field}: reported {self.reported!r}, recomputed {self.recomputed!r}"


_ABSENT = "(absent)"


def _same_leaf(reported: object, recomputed: object) -> bool:
    if type(reported) is bool or type(recomputed) is bool:
        return reported is recomputed
    if isinstance(reported, int | float) and isinstance(recomputed, int | float):
        return math.isclose(reported, recomputed, rel_tol=RELATIVE_TOLERANCE)
    return reported == recomputed


def compare(reported: object, recomputed: object, field: str = "") -> Iterator[FieldDifference]:
    """Yield all differing fields of two JSON values, in order of their names."""
    if isinstance(reported, dict) and isinstance(recomputed, dict):
        for key in sorted(reported.keys() | recomputed.keys()):
            name = f"{field}.{key}" if field else key
            yield from compare(reported.get(key, _ABSENT), recomputed.get(key, _ABSENT), name)
    elif isinstance(reported, list) and isinstance(recomputed, list):
        if len(reported) != len(recomputed):
            yield FieldDifference(f"{field}.length", len(reported), len(recomputed))
        for index, pair in enumerate(zip(reported, recomputed, strict=False)):
            yield from compare(*pair, f"{field}[{index}]")
    elif not _same_leaf(reported, recomputed):
        yield FieldDifference(field, reported, recomputed)


def read_json(path: Path, kind: type[T], hint: str) -> T:
    """Return a run's file as `kind`. Raises RoseError, with `hint`, where it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise RoseError(f"{path}: cannot be read ({error.strerror}); {hint}") from error
    except BAD_BYTES as error:
        raise RoseError(f"{path}: {error}") from error
