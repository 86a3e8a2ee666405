"""Limits of a card's figures."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bench.common.checks import FAILS, INCONCLUSIVE, Check, at_least, at_most

SHARE_OF_COPY = 0.6
GIB_MOVED_S = 0.050
UPDATE_S = 0.050
UPDATE_RATIO = 1.05
REQUESTS_FOR_P90 = 1_000
# The kernels that read or write weights by the gigabyte are timed against the card's copy.
AGAINST_COPY = ("diff", "overwrite_and_read_back")


def kernel_checks(measured: Mapping[str, Any]) -> list[Check]:
    """Judge diff and scatter against the copy of the same run."""
    return [
        at_least(f"{name}: share of copy", measured["speed"][name]["share_of_copy"], SHARE_OF_COPY)
        for name in AGAINST_COPY
    ]


def update_checks(measured: Mapping[str, Any]) -> list[Check]:
    """Judge the overwrite, a part of the pause: too long it fails, short it proves nothing."""
    check = at_most("overwrite within the pause: s", measured["overwrite_s"]["p50"], UPDATE_S)
    return [check if check.verdict == FAILS else replace(check, verdict=INCONCLUSIVE)]


def updating_checks(measured: Mapping[str, Any]) -> list[Check]:
    """Judge the pause of an update under serving, and the host's latencies meanwhile.

    A ratio of few requests above its limit decides nothing.
    """
    pause, host = measured["pause_s"], measured["host"]
    few = min(host[name]["requests"] for name in ("during", "control")) < REQUESTS_FOR_P90
    checks = [
        at_most("pause p50: s", pause["p50"], UPDATE_S),
        at_most("pause most: s", pause["most"], UPDATE_S),
    ]
    for name in ("ttft_p90_s", "tpot_p90_s"):
        if name in host["ratio"]:
            check = at_most(f"host {name[:-2]} over control", host["ratio"][name], UPDATE_RATIO)
            undecided = few and check.verdict == FAILS
            checks.append(replace(check, verdict=INCONCLUSIVE) if undecided else check)
    return checks


def served_checks(measured: Mapping[str, Any]) -> list[Check]:
    """Return the decisive checks of every arm with a ROSE guest, as the piece judged them."""
    return [
        Check(**check | {"name": f"{row['policy']} {row['slack_share']:g} {check['name']}"})
        for row in measured["rows"]
        if row["policy"] is not None
        for check in row["checks"]
        if check["decisive"]
    ]


def page_checks(measured: Mapping[str, Any]) -> list[Check]:
    """Judge one gibibyte from a guest's process to a host's by handles."""
    moved_s = measured["by_handle"]["moved_s"]["p50"]
    return [at_most("1 GiB from guest to host: s", moved_s, GIB_MOVED_S)]
