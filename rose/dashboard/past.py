"""History of hours and days, from the Prometheus that scrapes the fleet, in the live one's lines.

A Prometheus that does not answer leaves the live ten minutes, with a line that says so.
"""

import json
import re
from dataclasses import dataclass
from typing import Final

from rose.advise import PrometheusHistory
from rose.dashboard.history import Points
from rose.errors import RoseError

# Ranges beside the live ten minutes, in seconds.
RANGES: Final = {"6h": 21_600, "24h": 86_400, "7d": 604_800}
POINTS: Final = 240
# An answer, or a trouble, is good for this time.
KEPT_S: Final = 30.0
MOST_KEPT: Final = 64
TIMEOUT_S: Final = 5.0
# $s: labels that choose series; $w: window of a rate.
_RATE: Final = "sum by (instance, host, le) (rate(rose_host_KIND_seconds_bucket{$s}[$w]))"
_P95: Final = f"histogram_quantile(0.95, {_RATE})"
_TARGET: Final = "max by (instance, host) (rose_host_KIND_target_seconds{$s})"
_LATE: Final = f"({_P95} > on (instance, host) {_TARGET})"
_KV_BYTES: Final = "sum(rose_guest_kv_bytes{$s})"
_TOK_S: Final = "sum(rate(rose_guest_tokens_total{$s}[$w]))"
# Queries of the lines of `FLEET_LINES` and `NODE_LINES`, in that order.
FLEET: Final = (
    _KV_BYTES,
    _TOK_S,
    f"count({_LATE.replace('KIND', 'ttft')} or {_LATE.replace('KIND', 'tpot')})"
    " or 0 * count(rose_host_ttft_target_seconds{$s})",
    "sum(rose_scheduler_node_leases{$s} > bool 0)",
)
NODE: Final = (
    f"max({_P95.replace('KIND', 'ttft')})",
    f"max({_P95.replace('KIND', 'tpot')})",
    "clamp_max(max(rate(rose_host_busy_seconds_total{$s}[$w])), 1)",
    "avg(rose_guest_duty{$s})",
    _KV_BYTES,
    _TOK_S,
)


@dataclass(frozen=True, slots=True)
class Past:
    """Lines over a range, oldest first, None where nothing is known; `trouble`: none, and why."""

    times: Points
    lines: list[Points]
    trouble: str = ""


class PastReader:
    """Reader of the fleet's and nodes' lines from the Prometheus at `url`; use it in one thread.

    cluster: the label `cluster` of the series, where they have one. Raises ConfigError for an
    address that is none.
    """

    def __init__(self, url: str, cluster: str = "") -> None:
        self._history = PrometheusHistory(url, (), timeout_s=TIMEOUT_S)
        self._cluster = f"cluster=~{json.dumps(re.escape(cluster) + '|')}" if cluster else ""
        self._kept: dict[tuple[str, str], tuple[float, Past]] = {}

    def read(self, node: str, span: str, wall_s: float) -> Past:
        """Return the lines of a node, or the fleet's for "", over a range of `RANGES`."""
        at_s, past = self._kept.get((node, span), (0.0, None))
        if past is None or not at_s <= wall_s < at_s + KEPT_S:
            try:
                past = self._asked(node, RANGES[span], wall_s)
            except RoseError as error:
                past = Past([], [], f"{error} (the last ten minutes are shown)")
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[node, span] = wall_s, past
        return past

    def _asked(self, node: str, span_s: int, wall_s: float) -> Past:
        step_s = span_s // POINTS
        end_s = int(wall_s) // step_s * step_s
        times: Points = [float(end_s - step_s * n) for n in range(POINTS - 1, -1, -1)]
        # Without the chart's label `node` a target goes by its address.
        address = json.dumps(re.escape(node) + "(:[0-9]+)?")
        names = (f"node={json.dumps(node)}", f"instance=~{address}") if node else ("",)
        lines: list[Points] = []
        for name in names:
            chosen = ",".join(filter(None, (self._cluster, name)))
            lines = [
                self._line(query.replace("$s", chosen), times, step_s)
                for query in (NODE if node else FLEET)
            ]
            if any(value is not None for line in lines for value in line):
                break
        return Past(times, lines)

    def _line(self, query: str, times: Points, step_s: int) -> Points:
        query = query.replace("$w", f"{max(60, step_s)}s")
        begin_s, end_s = times[0] or 0.0, times[-1] or 0.0
        found = self._history.range(query, begin_s, end_s, step_s).get((), {})
        known = (found.get(at_s or 0.0) for at_s in times)
        return [None if value is None else float(f"{value:.4g}") for value in known]
