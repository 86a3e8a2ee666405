"""Units of a capacity policy's file: durations (`5s`), bytes (`8Gi`), counts that may be shares.

In Python they are plain numbers with their unit in the field's name; in files they are the strings
that Kubernetes users write. A `ValueError` says what to write instead.
"""

import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_SECONDS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3_600.0}
_BYTES = re.compile(r"(\d+)(Ki|Mi|Gi|Ti)?")
_FACTORS: Final = {None: 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_MOST_CHARS: Final = 32
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d+)?)%")


def seconds_of(value: object) -> float:
    """Read `500ms`, `5s`, `2m` or `1h`; a number is seconds already."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is no duration; write one as 500ms, 5s, 2m or 1h")
    return float(match[1]) * _SECONDS[match[2]]


def duration_text(seconds: float) -> str:
    """Write seconds as a file has them."""
    for unit, factor in (("h", 3_600.0), ("m", 60.0), ("s", 1.0)):
        if seconds >= factor and (seconds / factor).is_integer():
            return f"{seconds / factor:.0f}{unit}"
    return f"{seconds * 1e3:.0f}ms"


def bytes_of(value: object) -> int:
    """Read `8Gi`, `512Mi` or a plain number of bytes."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    match = _BYTES.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{value!r} is no number of bytes; write one as 8Gi, 512Mi or 1073741824")
    return int(match[1]) * _FACTORS[match[2]]


def bytes_text(count: int) -> str:
    """Write bytes as a file has them, in the largest unit that is exact."""
    for unit, factor in (("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
        if count and count % factor == 0:
            return f"{count // factor}{unit}"
    return str(count)


def count_or_share(value: object) -> int | str:
    """Check `3` (a count) or `25%` (that share of all, rounded down)."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    if match is None or float(match[1]) > 100:
        raise ValueError(f"{value!r} is neither; write a number as 3, or a share as 25%")
    assert isinstance(value, str)
    return value


def most_of(limit: int | str, count: int) -> int:
    """Return how many of `count` a limit allows; a share is rounded down."""
    if isinstance(limit, int):
        return min(limit, count)
    # 0.29 × 100 is a little less than 29 in floating point.
    return int(count * float(limit.removesuffix("%")) / 100 + 1e-9)


# A pattern holds for the string, a bound for the number.
_INT_OR_STRING: Final = {
    "x-kubernetes-int-or-string": True,
    "minimum": 0,
    "maxLength": _MOST_CHARS,
}


def _schema(kind: str, pattern: str) -> WithJsonSchema:
    return WithJsonSchema({"type": kind, "pattern": f"^{pattern}$", "maxLength": _MOST_CHARS})


Seconds = Annotated[
    float,
    BeforeValidator(seconds_of),
    PlainSerializer(duration_text, str, when_used="json"),
    _schema("string", r"[0-9]+(\.[0-9]+)?(ms|s|m|h)"),
]
Bytes = Annotated[
    int,
    BeforeValidator(bytes_of),
    PlainSerializer(bytes_text, str, when_used="json"),
    WithJsonSchema(_INT_OR_STRING | {"pattern": "^[0-9]+(Ki|Mi|Gi|Ti)?$"}),
]
CountOrShare = Annotated[
    Any,
    BeforeValidator(count_or_share),
    WithJsonSchema(_INT_OR_STRING | {"pattern": r"^([0-9]{1,2}(\.[0-9]+)?|100(\.0+)?)%$"}),
]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
