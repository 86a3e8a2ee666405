"""From cells to rows: what a router adds, each cell beside the direct one of its round."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

# A process this busy for most of a cell is what limits it.
BUSY = 0.85
# A router that is ready to run for this share of the time and may not shows others' load.
WAITED = 0.2


def rows(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each way and number of streams: medians over the rounds."""
    keys = dict.fromkeys((c["engine"], c["router"], c["wire"], c["streams"]) for c in cells)
    made = []
    for engine, router, wire, streams in keys:
        mine = [
            c
            for c in cells
            if (c["engine"], c["router"], c["wire"], c["streams"])
            == (engine, router, wire, streams)
        ]
        made.append(_row(mine, [_direct(cells, cell) for cell in mine]))
    return made


def _direct(cells: Sequence[Mapping[str, Any]], cell: Mapping[str, Any]) -> Mapping[str, Any]:
    """The direct cell of the same engine, streams and round."""
    where = ("engine", "streams", "round")
    return next(
        c
        for c in cells
        if c["router"] == "direct"
        and c["wire"] == cell["baseline"]
        and all(c[key] == cell[key] for key in where)
    )


def _row(mine: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = mine[0]
    direct = first["router"] == "direct"
    row = {key: first[key] for key in ("engine", "router", "wire", "streams")}
    row |= {
        "added_ttft_p50_s": _added(mine, base, "first_s", "p50", direct),
        "added_ttft_p99_s": _added(mine, base, "first_s", "p99", direct),
        "added_itl_p99_s": _added(mine, base, "later_s", "p99", direct),
        "worst_s": _worst(mine),
        "turns_per_s": median(c["turns_per_s"] for c in mine),
        "turns": sum(c["turns"] for c in mine),
        "errors": sum(c["errors"] for c in mine),
        "due_turns_per_s": first["due_turns_per_s"],  # None: a real engine's pace is its own
        "router_waited": median(c["router_waited"] for c in mine),
        "router_busy": median(c["router_busy"] for c in mine),
        "engine_busy": median(c["engine_busy"] for c in mine),
        "generator_busy": median(c["generator_busy"] for c in mine),
    }
    row["direct_ttft_p50_s"] = _middle([c["first_s"]["p50"] for c in base])
    row["direct_ttft_p99_s"] = _middle([c["first_s"]["p99"] for c in base])
    limits = [who for who in ("router", "engine", "generator") if row[f"{who}_busy"] > BUSY]
    if row["router_waited"] > WAITED:
        limits.append("others on the machine")
    row["limited_by"] = ", ".join(limits)
    row["said"] = [said for cell in mine for said in cell["said"]][:3]
    return row


def _added(
    mine: Sequence[Mapping[str, Any]],
    base: Sequence[Mapping[str, Any]],
    what: str,
    quantile: str,
    direct: bool,
) -> float | None:
    """Median over the rounds of the difference; None where there is nothing to compare."""
    if direct:
        return None
    pairs = [(a[what][quantile], b[what][quantile]) for a, b in zip(mine, base, strict=True)]
    return _middle([a - b for a, b in pairs if a is not None and b is not None])


def _worst(cells: Sequence[Mapping[str, Any]]) -> float | None:
    found = [c[what]["max"] for c in cells for what in ("first_s", "later_s")]
    return max((value for value in found if value is not None), default=None)


def _middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
