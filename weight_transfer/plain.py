"""Reading untrusted JSON: each function returns its kind or raises TypeError or ValueError."""

from __future__ import annotations

from math import isfinite


def object_of(value: object) -> dict[str, object]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.80} is not an object")
    return value


def list_of(value: object) -> list[object]:
    """A JSON array."""
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.80} is not a list")
    return value


def string_of(value: object) -> str:
    """A string."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is not a string")
    return value


def count_of(value: object) -> int:
    """A whole number from 0 to 2^63."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise TypeError(f"{value!r:.80} is not a count")
    return value


def range_of(value: object) -> tuple[int, int]:
    """A pair of counts."""
    first, end = list_of(value)
    return count_of(first), count_of(end)


def seconds_of(value: object) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise TypeError(f"{value!r:.80} is not a number of seconds")
    return value


def hex_of(value: object, digits: int) -> str:
    """So many lower-case hex digits: such ids become file names."""
    text = string_of(value)
    if len(text) != digits or not set(text) <= set("0123456789abcdef"):
        raise ValueError(f"{text!r:.80} is not {digits} hex digits")
    return text
