"""What figures of a card have to be."""

from collections.abc import Mapping
from typing import Any, TypedDict

SHARE_OF_COPY = 0.6
GIB_MOVED_S = 0.050
UPDATE_S = 0.050
# Timed against the card's copy, those that read or write weights by the gigabyte.
AGAINST_COPY = ("diff", "overwrite_and_read_back")


class Check(TypedDict):
    """One figure beside its limit; INCONCLUSIVE where holding it would need more than is here."""

    check: str
    value: float | None
    limit: float
    verdict: str


def kernel_checks(measured: Mapping[str, Any]) -> list[Check]:
    """Diff and scatter against the copy of the same run."""
    return [
        _least(f"{name}: share of copy", measured["speed"][name]["share_of_copy"], SHARE_OF_COPY)
        for name in AGAINST_COPY
    ]


def update_checks(measured: Mapping[str, Any]) -> list[Check]:
    """Overwriting is a part of the pause: too long it fails, short it does not prove the whole."""
    found = _most("overwrite within the pause: s", measured["overwrite_s"]["p50"], UPDATE_S)
    return [found if found["verdict"] == "FAILS" else {**found, "verdict": "INCONCLUSIVE"}]


def served_checks(measured: Mapping[str, Any]) -> list[Check]:
    """The decisive checks of every arm with a ROSE guest, as the piece judged them."""
    return [
        Check(
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


def page_checks(measured: Mapping[str, Any]) -> list[Check]:
    """One gibibyte from a guest's process to a host's, by handles; the driver's way is told."""
    moved_s = measured["by_handle"]["moved_s"]["p50"]
    return [_most("1 GiB from guest to host: s", moved_s, GIB_MOVED_S)]


def _least(name: str, value: float, limit: float) -> Check:
    return Check(
        check=name, value=value, limit=limit, verdict="HOLDS" if value >= limit else "FAILS"
    )


def _most(name: str, value: float, limit: float) -> Check:
    return Check(
        check=name, value=value, limit=limit, verdict="HOLDS" if value <= limit else "FAILS"
    )
