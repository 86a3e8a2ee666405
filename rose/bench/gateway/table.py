"""The result as text."""

from collections.abc import Mapping, Sequence
from typing import Any

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
    """Rows, sessions and checks."""
    blocks = [
        _block(
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
        blocks.append(
            _block(
                "Checks",
                ("check", "value", "limit", "verdict"),
                [
                    (
                        check["check"],
                        f"{check['value']:.3g}",
                        f"<= {check['at_most']}"
                        if "at_most" in check
                        else f">= {check['at_least']}",
                        check["verdict"],
                    )
                    for check in checks
                ],
            )
        )
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
    return _block(
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


def _block(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
    lines = [
        "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True))
        for row in [head, *rows]
    ]
    return "\n".join([title, "", *lines, ""])
