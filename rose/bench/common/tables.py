"""Tables of text: columns as wide as what is in them, figures to the right."""

from collections.abc import Mapping, Sequence
from typing import Any


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
