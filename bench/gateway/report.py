"""From cells to rows, checks and text: what a router adds to the direct cell of its round."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bench.common.checks import Check, at_least, at_most, checks_table, text_table

# A process this busy for most of a cell is what limits it.
BUSY = 0.85
# A router that is ready to run for this share of the time and may not shows others' load.
WAITED = 0.2


def rows(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each way and number of streams: medians over the rounds."""
    keys = dict.fromkeys((c["engine"], c["router"], c["wire"], c["streams"]) for c in cells)
    made = []
    for key in keys:
        mine = [c for c in cells if (c["engine"], c["router"], c["wire"], c["streams"]) == key]
        made.append(_row(mine, [_direct(cells, cell) for cell in mine]))
    return made


def _direct(cells: Sequence[Mapping[str, Any]], cell: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the direct cell of the same engine, streams and round."""
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
    row["errors_kept"] = [error for cell in mine for error in cell["errors_kept"]][:3]
    return row


def _added(
    mine: Sequence[Mapping[str, Any]],
    base: Sequence[Mapping[str, Any]],
    what: str,
    quantile: str,
    direct: bool,
) -> float | None:
    """Return the median over the rounds of the difference; None where nothing can be compared."""
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


AT_STREAMS = 2000
ADDED_P50_S, ADDED_P99_S = 0.001, 0.005
# Longer than this without a token, where the engine wrote one, is a stall.
STALL_S = 2.0
# Streams go on with the next turn at once, so a router that keeps up gets all turns through.
DONE = 0.9
OF_ORACLE = 0.85


def checks(rows: Sequence[Mapping[str, Any]], sessions: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Judge every figure of ROSE's; other routers are there to compare with."""
    found: list[Check] = []
    ours = [r for r in rows if r["router"] == "rose" and r["engine"].startswith("standin")]
    for row in ours:
        label = f"{row['wire']} at {row['streams']} streams"
        found.append(at_most(f"errors, {label}", row["errors"], 0))
        done = row["turns_per_s"] / row["due_turns_per_s"]
        found.append(at_least(f"turns of those due, {label}", done, DONE))
        if row["worst_s"] is not None:
            found.append(at_most(f"worst s, {label}", row["worst_s"], STALL_S))
        if row["streams"] != AT_STREAMS:
            continue
        for key, limit in (
            ("added_ttft_p50_s", ADDED_P50_S),
            ("added_ttft_p99_s", ADDED_P99_S),
            ("added_itl_p99_s", ADDED_P99_S),
        ):
            if row[key] is not None:
                found.append(at_most(f"{key}, {label}", row[key], limit))
    for row in sessions:
        label = f"prefix hits of the oracle's, {row['engine']}"
        found.append(at_least(label, row["of_oracle"], OF_ORACLE))
    return found


HEAD = (
    "engine",
    "router",
    "streams",
    "turn +p50 ms",
    "turn +p99 ms",
    "token +p99 ms",
    "worst ms",
    "turns/s",
    "errors",
    "router busy",
    "waits",
    "limited by",
)


def table(result: Mapping[str, Any]) -> str:
    blocks = [
        text_table(
            "Added by a router: to a turn (its request's way in and its first token's way out; of"
            " a whole answer, the last token's) and to each later token",
            HEAD,
            [_cells(row) for row in result["rows"]],
        )
    ]
    for name, why in result.get("skipped", {}).items():
        blocks.append(f"{name}: skipped, {why}\n")
    if sessions := result.get("sessions"):
        blocks.append(_sessions(sessions))
    if checks := result.get("checks"):
        blocks.append(checks_table(checks, ".3g"))
    return "\n".join(blocks)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    router = f"{row['router']}, {row['wire']}"
    return (
        row["engine"],
        router,
        str(row["streams"]),
        _ms(row["added_ttft_p50_s"]),
        _ms(row["added_ttft_p99_s"]),
        _ms(row["added_itl_p99_s"]),
        _ms(row["worst_s"]),
        f"{row['turns_per_s']:.1f}",
        str(row["errors"]),
        f"{row['router_busy']:.0%}",
        f"{row['router_waited']:.0%}",
        row["limited_by"] or "-",
    )


def _sessions(rows: Sequence[Mapping[str, Any]]) -> str:
    return text_table(
        "Prefix hit rate of agentic sessions",
        ("engine", "sessions", "turns", "routed", "oracle", "of the oracle"),
        [
            (
                row["engine"],
                str(row["sessions"]),
                str(row["turns"]),
                f"{row['routed_hit_rate']:.1%}",
                f"{row['oracle_hit_rate']:.1%}",
                f"{row['of_oracle']:.1%}",
            )
            for row in rows
        ],
    )


def _ms(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1e3:.2f}"
