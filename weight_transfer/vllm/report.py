"""CommitReport: what one rank, or all of them, say of an activation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CommitReport:
    """What a commit did; `version` is the version active afterwards.

    `apply_s`: scatter and read-back. `probe_s`: the live model's probe forward and the comparison.
    `loose`: parameters copied as a whole. `digest_ok`: every overwritten weight was the parent's
    and reads as the new version's.
    """

    version: int
    tensors: int
    changed_elements: int
    wire_bytes: int
    apply_s: float
    probe_s: float
    loose: int
    digest_ok: bool
    probe_ok: bool
    probe_max_abs_diff: float


def merged(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One report of all ranks: proofs hold when they hold everywhere, times are the slowest's.

    Ranks that are at different versions prove nothing. Raises IndexError without any report,
    KeyError for one that lacks something.
    """
    whole = dict(reports[0])
    agree = all(report["version"] == whole["version"] for report in reports)
    for name in ("digest_ok", "probe_ok"):
        whole[name] = agree and all(report[name] is True for report in reports)
    for name in ("apply_s", "probe_s", "probe_max_abs_diff"):
        whole[name] = max(report[name] for report in reports)
    return whole
