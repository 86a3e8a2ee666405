"""Figures beside their limits, and tables of them.

A figure HOLDS or FAILS its limit, or is INCONCLUSIVE where an interval contains the limit. Standard
library only: what judges a GPU's figures runs in any Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rose.compare.bootstrap import Estimate, Interval


def text_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a titled table; every row has as many cells as the head."""
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
    lines = [
        "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True))
        for row in [head, *rows]
    ]
    return "\n".join([*([title, ""] if title else []), *lines, ""])


def checks_table(checks: Sequence[Mapping[str, Any]], shown: str) -> str:
    """Lay out figures of `common.checks`; `shown` formats a value."""
    rows = []
    for check in checks:
        limit = f"<= {check['at_most']}" if "at_most" in check else f">= {check['at_least']}"
        rows.append((check["check"], f"{check['value']:{shown}}", limit, check["verdict"]))
    return text_table("Checks", ("check", "value", "limit", "verdict"), rows)


def number(value: float | None, digits: int) -> str:
    """Round for people, a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


Verdict = Literal["HOLDS", "FAILS", "INCONCLUSIVE", "REFERENCE"]
Bound = Literal["at least", "at most", "above"]
HOLDS: Verdict = "HOLDS"
FAILS: Verdict = "FAILS"
INCONCLUSIVE: Verdict = "INCONCLUSIVE"
REFERENCE: Verdict = "REFERENCE"


def meets(value: float, bound: Bound, limit: float) -> bool:
    """Tell whether the value is on the limit's right side."""
    if bound == "at least":
        return value >= limit
    return value <= limit if bound == "at most" else value > limit


def verdict_of(value: float, bound: Bound, limit: float) -> Verdict:
    """Judge a figure that has no interval."""
    return HOLDS if meets(value, bound, limit) else FAILS


def figure_at_most(name: str, value: float, limit: float) -> dict[str, object]:
    """Judge a figure without an interval, as results hold it."""
    verdict = verdict_of(value, "at most", limit)
    return {"check": name, "value": value, "at_most": limit, "verdict": verdict}


def figure_at_least(name: str, value: float, limit: float) -> dict[str, object]:
    """Judge a figure without an interval, as results hold it."""
    verdict = verdict_of(value, "at least", limit)
    return {"check": name, "value": value, "at_least": limit, "verdict": verdict}


@dataclass(frozen=True, slots=True)
class Check:
    """One limit. A check that is not `decisive` is reported beside the row's verdict."""

    name: str
    value: float | None
    ci95: Interval | None
    limit: float
    verdict: Verdict
    decisive: bool = True


def at_most(name: str, found: Estimate | None, limit: float, *, decisive: bool = True) -> Check:
    """HOLDS when the interval's upper end is within the limit, FAILS when its lower end is not."""
    return _by_interval(name, found, "at most", limit, decisive)


def at_least(name: str, found: Estimate | None, limit: float, *, decisive: bool = True) -> Check:
    """HOLDS when the interval's lower end reaches the limit, FAILS when its upper end does not."""
    return _by_interval(name, found, "at least", limit, decisive)


def _by_interval(
    name: str, found: Estimate | None, bound: Bound, limit: float, decisive: bool
) -> Check:
    if found is None or found.ci95 is None:
        value = found.value if found else None
        return Check(name, value, None, limit, INCONCLUSIVE, decisive)
    met = {meets(end, bound, limit) for end in found.ci95}
    verdict = INCONCLUSIVE if len(met) == 2 else HOLDS if met == {True} else FAILS
    return Check(name, found.value, found.ci95, limit, verdict, decisive)


def exactly_none(name: str, count: int, of: int) -> Check:
    """HOLDS when something was looked at and nothing was found."""
    verdict = FAILS if count > 0 else HOLDS if of > 0 else INCONCLUSIVE
    return Check(name, float(count), None, 0.0, verdict)


def measured_at_most(name: str, value: float | None, limit: float | None) -> Check:
    """A figure without an interval, reported beside the verdict."""
    if value is None or limit is None or not math.isfinite(value):
        return Check(name, value, None, limit or 0.0, INCONCLUSIVE, decisive=False)
    return Check(name, value, None, limit, verdict_of(value, "at most", limit), decisive=False)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """FAILS before INCONCLUSIVE before HOLDS; INCONCLUSIVE when there is none."""
    found = set(verdicts)
    if FAILS in found:
        return FAILS
    return HOLDS if found == {HOLDS} else INCONCLUSIVE


def row_verdict(checks: Iterable[Check]) -> Verdict:
    """Of the decisive checks."""
    return worst(check.verdict for check in checks if check.decisive)
