"""What the figures have to be."""

from collections.abc import Mapping, Sequence
from typing import Any

AT_STREAMS = 2000
ADDED_P50_S, ADDED_P99_S = 0.001, 0.005
# Longer than this without a token, where the engine wrote one, is a stall.
STALL_S = 2.0
# Streams go on with the next turn at once, so a router that keeps up gets all turns through.
DONE = 0.9
OF_ORACLE = 0.85


def checks(
    rows: Sequence[Mapping[str, Any]], sessions: Sequence[Mapping[str, Any]]
) -> list[dict[str, object]]:
    """Every figure of ROSE's beside its limit; other routers are there to compare with."""
    found: list[dict[str, object]] = []
    ours = [r for r in rows if r["router"] == "rose" and r["engine"].startswith("standin")]
    for row in ours:
        label = f"{row['wire']} at {row['streams']} streams"
        found.append(_most(f"errors, {label}", row["errors"], 0))
        done = row["turns_per_s"] / row["due_turns_per_s"]
        found.append(_least(f"turns of those due, {label}", done, DONE))
        if row["worst_s"] is not None:
            found.append(_most(f"worst s, {label}", row["worst_s"], STALL_S))
        if row["streams"] != AT_STREAMS:
            continue
        for key, limit in (
            ("added_ttft_p50_s", ADDED_P50_S),
            ("added_ttft_p99_s", ADDED_P99_S),
            ("added_itl_p99_s", ADDED_P99_S),
        ):
            if row[key] is not None:
                found.append(_most(f"{key}, {label}", row[key], limit))
    for row in sessions:
        label = f"prefix hits of the oracle's, {row['engine']}"
        found.append(_least(label, row["of_oracle"], OF_ORACLE))
    return found


def _most(name: str, value: float, limit: float) -> dict[str, object]:
    verdict = "HOLDS" if value <= limit else "FAILS"
    return {"check": name, "value": value, "at_most": limit, "verdict": verdict}


def _least(name: str, value: float, limit: float) -> dict[str, object]:
    verdict = "HOLDS" if value >= limit else "FAILS"
    return {"check": name, "value": value, "at_least": limit, "verdict": verdict}
