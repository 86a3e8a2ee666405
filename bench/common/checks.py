"""Figures beside their limits, and tables of them.

A figure HOLDS or FAILS its limit, or is INCONCLUSIVE where an interval contains the limit. Standard
library only, so that any Python judges a GPU's figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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


def columns_table(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, Callable[[Mapping[str, Any]], str]],
) -> str:
    """Lay out a titled table with a cell of each row for each column."""
    cells = [[shown(row) for shown in columns.values()] for row in rows]
    return text_table(title, list(columns), cells)


def number(value: float | None, digits: int) -> str:
    """Round for people, a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


Verdict = Literal["HOLDS", "FAILS", "INCONCLUSIVE", "REFERENCE"]
Bound = Literal["at least", "at most", "above"]
HOLDS: Verdict = "HOLDS"
FAILS: Verdict = "FAILS"
INCONCLUSIVE: Verdict = "INCONCLUSIVE"
REFERENCE: Verdict = "REFERENCE"
SIGNS: dict[Bound, str] = {"at least": ">=", "at most": "<=", "above": ">"}


def meets(value: float, bound: Bound, limit: float) -> bool:
    """Return True if the value is on the limit's right side."""
    if bound == "at least":
        return value >= limit
    return value <= limit if bound == "at most" else value > limit


def verdict_of(value: float, bound: Bound, limit: float) -> Verdict:
    """Judge a figure that has no interval."""
    return HOLDS if meets(value, bound, limit) else FAILS


@dataclass(frozen=True, slots=True)
class Check:
    """One limit. A check that is not `decisive` is reported beside the row's verdict."""

    name: str
    value: float | None
    ci95: Interval | None
    limit: float
    verdict: Verdict
    decisive: bool = True
    bound: Bound = "at most"


def at_most(
    name: str, figure: float | Estimate | None, limit: float, *, decisive: bool = True
) -> Check:
    """Judge an upper limit.

    An estimate HOLDS when its interval's upper end is within the limit, and FAILS when its lower
    end is not; a number is judged by itself.
    """
    return _judged(name, figure, "at most", limit, decisive)


def at_least(
    name: str, figure: float | Estimate | None, limit: float, *, decisive: bool = True
) -> Check:
    """Judge a lower limit.

    An estimate HOLDS when its interval's lower end reaches the limit, and FAILS when its upper end
    does not; a number is judged by itself.
    """
    return _judged(name, figure, "at least", limit, decisive)


def _judged(
    name: str, figure: float | Estimate | None, bound: Bound, limit: float, decisive: bool
) -> Check:
    if isinstance(figure, int | float):
        verdict = verdict_of(figure, bound, limit) if math.isfinite(figure) else INCONCLUSIVE
        return Check(name, figure, None, limit, verdict, decisive, bound)
    if figure is None or figure.ci95 is None:
        value = figure.value if figure else None
        return Check(name, value, None, limit, INCONCLUSIVE, decisive, bound)
    met = {meets(end, bound, limit) for end in figure.ci95}
    verdict = INCONCLUSIVE if len(met) == 2 else HOLDS if met == {True} else FAILS
    return Check(name, figure.value, figure.ci95, limit, verdict, decisive, bound)


def exactly_none(name: str, count: int, of: int) -> Check:
    """Judge a count of faults among `of` cases: HOLDS when there were cases and no fault."""
    verdict = FAILS if count > 0 else HOLDS if of > 0 else INCONCLUSIVE
    return Check(name, float(count), None, 0.0, verdict)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return FAILS before INCONCLUSIVE before HOLDS; INCONCLUSIVE when there is none."""
    found = set(verdicts)
    if FAILS in found:
        return FAILS
    return HOLDS if found == {HOLDS} else INCONCLUSIVE


def row_verdict(checks: Iterable[Check]) -> Verdict:
    """Return the worst verdict of the decisive checks."""
    return worst(check.verdict for check in checks if check.decisive)


def checks_table(checks: Sequence[Check], shown: str) -> str:
    """Lay out checks; `shown` formats a value."""
    rows = [
        (
            check.name,
            "-" if check.value is None else f"{check.value:{shown}}",
            f"{SIGNS[check.bound]} {check.limit:g}",
            check.verdict if check.decisive else f"{check.verdict}, not decisive",
        )
        for check in checks
    ]
    return text_table("Checks", ("check", "value", "limit", "verdict"), rows)
