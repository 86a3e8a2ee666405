"""Figures as texts, each with its unit; what nobody knows is `no data`, never 0."""

import datetime
from typing import Final

NO_DATA: Final = "no data"
_SIZES: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: float | None) -> str:
    """Return bytes: `38.0 GiB`."""
    if count is None:
        return NO_DATA
    power = 0
    while count >= 1024 and power < len(_SIZES) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.0f} B" if power == 0 else f"{count:.1f} {_SIZES[power]}"


def share(part: float | None) -> str:
    """Return a share: `61%`."""
    return NO_DATA if part is None else f"{part:.0%}"


def count(number: float | None) -> str:
    """Return a number with a space between thousands."""
    return NO_DATA if number is None else f"{number:,.0f}".replace(",", " ")


def latency(seconds: float | None) -> str:
    """Return a latency, below a second in milliseconds: `420 ms`, `1.30 s`."""
    if seconds is None:
        return NO_DATA
    if seconds < 0.01:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def span(seconds: float | None) -> str:
    """Return a duration: `3 s`, `5 min`, `2.1 h`, `4.0 d`."""
    if seconds is None:
        return NO_DATA
    for least, unit, each in ((172_800.0, "d", 86_400.0), (7_200.0, "h", 3_600.0)):
        if seconds >= least:
            return f"{seconds / each:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def clock(at_s: float) -> str:
    """Return a Unix time as a time of day: `11:35:02`."""
    return f"{datetime.datetime.fromtimestamp(at_s, datetime.UTC):%H:%M:%S}"


def day(at_s: float) -> str:
    """Return a Unix time: `2026-11-23 11:35:02 UTC`."""
    return f"{datetime.datetime.fromtimestamp(at_s, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"
