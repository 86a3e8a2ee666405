"""One row for each arm of each cell, and for each event: figures, checks, verdict."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from bench.common.checks import REFERENCE, Check, row_verdict
from bench.common.pairing import METRICS, RequestIndex, Window, latency_s, percentile_ratio
from bench.common.pairing import slo_latency as as_slo
from bench.coserve.plan import ALL_ARMS, ALONE, ARMS, EVENT_ALONE, EVENT_ARMS, Arm
from bench.coserve.records import CoserveBlockRecord, CoserveRecords, starts_s, yields_s
from bench.coserve.rules import (
    PERCENTS,
    Evidence,
    FigureGroup,
    Ratios,
    core_rules,
    harvest,
    mismatches,
)
from bench.load.protocol import Request
from executor import FreezeReason, GrantMode
from rose.compare.bootstrap import Estimate
from slo import SloSpec, attainment, goodput_rps, percentile

Row = dict[str, Any]
Rules = Callable[[Evidence], list[Check]]
THROTTLED = GrantMode.THROTTLE.name.lower()


class Analysis:
    """All rows of a run, judged by `rules`."""

    def __init__(self, records: CoserveRecords, rules: Rules = core_rules) -> None:
        self._records = records
        self._rules = rules
        self._index = RequestIndex(records.requests)
        self._window_s = float(records.run.settings["window_s"])
        run = records.run
        self._spec = SloSpec("host", run.ttft_target_s, run.tpot_target_s)

    def rows(self) -> list[Row]:
        """Return the rows in order of load, then of arms; windows with events last."""
        return [self._row(group) for group in self._groups()]

    def _groups(self) -> list[FigureGroup]:
        found = []
        cells = sorted({(b.busy_target, b.traffic) for b in self._records.blocks if b.traffic})
        for busy, traffic in cells:
            blocks = [
                b for b in self._records.blocks if (b.busy_target, b.traffic) == (busy, traffic)
            ]
            for base, arms in ((ALONE, ARMS), (EVENT_ALONE, EVENT_ARMS)):
                alone = {b.segment: b for b in blocks if b.arm == base.name}
                for arm in arms:
                    pairs = [
                        (b, alone[b.segment])
                        for b in blocks
                        if b.arm == arm.name and b.segment in alone
                    ]
                    if pairs:
                        found.append(FigureGroup(arm, busy or 0.0, traffic or "", pairs))
        return sorted(found, key=lambda group: group.arm in EVENT_ARMS)

    def _row(self, group: FigureGroup) -> Row:
        windows = [w for p in group.pairs for w in self._index.windows(*p, self._window_s)]
        requests = [r for arm, _ in group.pairs for r in self._index.of(arm)]
        load = self._load(group)
        spare = 1 - load["offered"] / load["capacity"]
        found = harvest(self._records, group.pairs, group.arm.guest, spare)
        guest = self._guest_times(group)
        ratios = self._ratios(windows)
        caused = _preemptions(group, alone=False) - _preemptions(group, alone=True)
        checks = self._rules(
            Evidence(
                group, windows, requests, found, guest, ratios, self._spec, self._records.run.seed,
                self._stops(group), caused,
            )
        )  # fmt: skip
        reference = group.arm is ALONE
        return {
            **load,
            "mode": group.arm.policy if group.arm in ARMS and group.arm.policy else group.arm.name,
            "policy": group.arm.policy,
            "slack_share": group.arm.slack_share,
            "isolation": group.pairs[0][0].isolation,
            "rounds": len(group.pairs),
            "host": self._host(requests, group.seconds),
            "ratio_to_alone": {f"{m}_p90": _value(ratios[m, 90]) for m in METRICS},
            "ratio_to_alone_ci95": {f"{m}_p90": _ends(ratios[m, 90]) for m in METRICS},
            "guest_tok_s": found.guest_tok_s,
            "guest_alone_tok_s": found.guest_alone_tok_s,
            "idle_efficiency": _value(found.idle_efficiency),
            "spare_efficiency": _value(found.spare_efficiency),
            **guest,
            **self._pressed(group),
            "host_preemptions": _preemptions(group, alone=False),
            "token_mismatches": mismatches(windows),
            "checks": [] if reference else [_plain(asdict(check)) for check in checks],
            "verdict": REFERENCE if reference else row_verdict(checks),
        }

    def _load(self, group: FigureGroup) -> Row:
        """Return the load of the host, and how busy it kept the host alone."""
        alone = [block for _, block in group.pairs]
        seconds = sum(block.duration_s for block in alone)
        busy_s = [self._records.steps["host"].busy_s((b.start_s, b.end_s)) for b in alone]
        return {
            "busy": sum(busy_s) / seconds,
            "busy_target": group.busy_target,
            "offered": sum(len(self._index.of(block)) for block in alone) / seconds,
            "capacity": self._records.run.capacity_rps,
            "traffic": group.traffic,
        }

    def _ratios(self, windows: Sequence[Window]) -> Ratios:
        return {
            (metric, percent): percentile_ratio(windows, metric, percent, self._records.run.seed)
            for metric in METRICS
            for percent in PERCENTS
        }

    def _host(self, requests: Sequence[Request], seconds: float) -> Row:
        found: Row = {}
        for metric in ("ttft", "tpot"):
            values = [v for r in requests if (v := latency_s(r, metric)) is not None]
            for percent in (50, 90, 99):
                value = percentile(values, percent / 100) if values else None
                found[f"{metric}_p{percent}_s"] = _finite(value)
        latencies = [as_slo(request) for request in requests]
        return found | {
            "requests": len(requests),
            "failed": sum(request.status != "ok" for request in requests),
            "attainment": attainment(latencies, self._spec).fraction,
            "goodput": goodput_rps(latencies, self._spec, seconds),
        }

    def _guest_times(self, group: FigureGroup) -> Row:
        """Return steps and yields of the ROSE guest; None for arms without one."""
        names = ("guest_step_p99_s", "guest_step_cpu_p99_s", "yield_p50_s", "yield_p99_s")
        steps = self._records.steps
        starts: list[float] = []
        pickups: list[float] = []
        wall: list[float] = []
        cpu: list[float] = []
        busy: list[float] = []
        yields = [second for window in self._stops(group) for second in window]
        for arm, _ in group.pairs:
            span = (arm.start_s, arm.end_s)
            arrivals = steps["host"].arrivals_in(span)
            starts += starts_s(steps["host"], arrivals)
            pickups += steps["host"].pickups_s(span)
            busy += steps["host"].durations_s(span)[0]
            if group.arm.guest == "rose":
                found = steps["guest"].durations_s(span)
                wall += found[0]
                cpu += found[1]
        values = (_p(wall, 0.99), _p(cpu, 0.99), _p(yields, 0.5), _p(yields, 0.99))
        return {
            **dict(zip(names, values, strict=True)),
            "yields": len(yields),
            "host_pickup_p50_s": _p(pickups, 0.5),
            "host_pickup_p99_s": _p(pickups, 0.99),
            "host_step_p50_s": _p(busy, 0.5),
            "host_step_p99_s": _p(busy, 0.99),
            "host_start_p50_s": _p(starts, 0.5),
            "host_start_p99_s": _p(starts, 0.99),
        }

    def _stops(self, group: FigureGroup) -> list[list[float]]:
        """Return the yields of the ROSE guest in each window of its blocks."""
        if group.arm.guest != "rose":
            return []
        steps, found = self._records.steps, []
        for arm, _ in group.pairs:
            for k in range(math.ceil(arm.duration_s / self._window_s)):
                begin_s = arm.start_s + k * self._window_s
                arrivals = steps["host"].arrivals_in(
                    (begin_s, min(arm.end_s, begin_s + self._window_s))
                )
                found.append(yields_s(steps["guest"], arrivals))
        return [window for window in found if window]

    def _pressed(self, group: FigureGroup) -> Row:
        """Return the shares of time in which the guest was held or throttled, and its KV bytes."""
        if group.arm.guest != "rose":
            return {"held": None, "host_kv_pressed": None, "guest_kv_bytes": None}
        spans = [(arm.start_s, arm.end_s) for arm, _ in group.pairs]
        seen = [s for s in self._records.guest if any(a <= s.t_s < b for a, b in spans)]
        return {
            "held": _mean([float(s.reason == FreezeReason.NO_LEASE) for s in seen]),
            "host_kv_pressed": _mean([float(s.mode == THROTTLED) for s in seen]),
            "guest_kv_bytes": _mean([float(s.kv_bytes) for s in seen]),
        }


def arm_of(row: Row) -> Arm:
    """Return the arm of a row."""
    name = row["mode"]
    return ALL_ARMS[name if name in ALL_ARMS else f"{name}-{row['slack_share']}"]


def _preemptions(group: FigureGroup, *, alone: bool) -> int:
    blocks: list[CoserveBlockRecord] = [pair[1] if alone else pair[0] for pair in group.pairs]
    return sum(b.end.host_preemptions - b.start.host_preemptions for b in blocks)


def _ends(estimate: Estimate | None) -> list[float | None] | None:
    if estimate is None or estimate.ci95 is None:
        return None
    return [_finite(end) for end in estimate.ci95]


def _p(values: Sequence[float], fraction: float) -> float | None:
    return percentile(values, fraction) if values else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _value(estimate: Estimate | None) -> float | None:
    return _finite(estimate.value) if estimate else None


def _finite(value: float | None) -> float | None:
    """Return None for infinity, which JSON lacks."""
    return value if value is not None and math.isfinite(value) else None


def _plain(check: Row) -> Row:
    ci95 = check["ci95"]
    return check | {
        "value": _finite(check["value"]),
        "ci95": [_finite(end) for end in ci95] if ci95 else None,
        "limit": _finite(check["limit"]),
    }
