"""What figures of a card have to be."""

from collections.abc import Mapping
from typing import Any, TypedDict

from bench.common.checks import Bound, verdict_of

SHARE_OF_COPY = 0.6
GIB_MOVED_S = 0.050
UPDATE_S = 0.050
UPDATE_RATIO = 1.05
REQUESTS_FOR_P90 = 1_000
# Timed against the card's copy, those that read or write weights by the gigabyte.
AGAINST_COPY = ("diff", "overwrite_and_read_back")


class GpuCheck(TypedDict):
    """One figure beside its limit; INCONCLUSIVE where holding it would need more than is here."""

    check: str
    value: float | None
    limit: float
    verdict: str


def kernel_checks(measured: Mapping[str, Any]) -> list[GpuCheck]:
    """Diff and scatter against the copy of the same run."""
    return [
        _judged(
            f"{name}: share of copy",
            measured["speed"][name]["share_of_copy"],
            "at least",
            SHARE_OF_COPY,
        )
        for name in AGAINST_COPY
    ]


def update_checks(measured: Mapping[str, Any]) -> list[GpuCheck]:
    """Overwriting is a part of the pause: too long it fails, short it does not prove the whole."""
    found = _judged(
        "overwrite within the pause: s", measured["overwrite_s"]["p50"], "at most", UPDATE_S
    )
    return [found if found["verdict"] == "FAILS" else {**found, "verdict": "INCONCLUSIVE"}]


def updating_checks(measured: Mapping[str, Any]) -> list[GpuCheck]:
    """The pause of an update under serving, and what the host's users see of it.

    A ratio of few requests above its limit decides nothing.
    """
    pause = measured["pause_s"]
    found = [
        _judged("pause p50: s", pause["p50"], "at most", UPDATE_S),
        _judged("pause most: s", pause["most"], "at most", UPDATE_S),
    ]
    host = measured["host"]
    few = min(host[name]["requests"] for name in ("during", "control")) < REQUESTS_FOR_P90
    for name in ("ttft_p90_s", "tpot_p90_s"):
        if name in host["ratio"]:
            check = _judged(
                f"host {name[:-2]} over control", host["ratio"][name], "at most", UPDATE_RATIO
            )
            fails = check["verdict"] == "FAILS"
            found.append({**check, "verdict": "INCONCLUSIVE"} if fails and few else check)
    return found


def served_checks(measured: Mapping[str, Any]) -> list[GpuCheck]:
    """The decisive checks of every arm with a ROSE guest, as the piece judged them."""
    return [
        GpuCheck(
            check=f"{row['policy']} {row['slack_share']:g} {check['name']}",
            value=check["value"],
            limit=check["limit"],
            verdict=check["verdict"],
        )
        for row in measured["rows"]
        if row["policy"] is not None
        for check in row["checks"]
        if check["decisive"]
    ]


def page_checks(measured: Mapping[str, Any]) -> list[GpuCheck]:
    """One gibibyte from a guest's process to a host's, by handles; the driver's way is told."""
    moved_s = measured["by_handle"]["moved_s"]["p50"]
    return [_judged("1 GiB from guest to host: s", moved_s, "at most", GIB_MOVED_S)]


def _judged(name: str, value: float, bound: Bound, limit: float) -> GpuCheck:
    return GpuCheck(check=name, value=value, limit=limit, verdict=verdict_of(value, bound, limit))
