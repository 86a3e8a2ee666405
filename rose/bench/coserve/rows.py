"""One row for each arm of each cell, and for each event: figures, checks, verdict."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from executor import GrantMode
from rose.bench.coserve import verdict as limits
from rose.bench.coserve.harvested import BlockPair, Harvest, harvest
from rose.bench.coserve.pairs import (
    METRICS,
    Pair,
    RequestIndex,
    Window,
    latency_s,
    percentile_ratio,
)
from rose.bench.coserve.pairs import slo_latency as as_slo
from rose.bench.coserve.plan import ALL_ARMS, ALONE, ARMS, EVENT_ALONE, EVENT_ARMS, Arm
from rose.bench.coserve.records import BlockRecord, Records
from rose.bench.coserve.steps import starts_s, yields_s
from rose.bench.coserve.verdict import Check, at_least, at_most, exactly_none, measured_at_most
from rose.load.records import Request
from rose.stats import Estimate, paired_difference
from slo import SloSpec, attainment, goodput_rps, percentile

Row = dict[str, Any]
Ratios = dict[tuple[str, int], Estimate | None]
PERCENTS = (90, 99)
THROTTLED = GrantMode.THROTTLE.name.lower()


@dataclass(frozen=True, slots=True)
class Group:
    """The blocks of one arm, each with the block alone that had the same arrivals."""

    arm: Arm
    busy_target: float
    traffic: str
    pairs: list[BlockPair]

    @property
    def seconds(self) -> float:
        """Wall time of the arm."""
        return sum(arm.duration_s for arm, _ in self.pairs)


class Analysis:
    """All rows of a run."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._index = RequestIndex(records.requests)
        self._window_s = float(records.run.settings["window_s"])
        run = records.run
        self._spec = SloSpec("host", run.ttft_target_s, run.tpot_target_s)

    def rows(self) -> list[Row]:
        """In order of load, then of arms; windows with events last."""
        return [self._row(group) for group in self._groups()]

    def _groups(self) -> list[Group]:
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
                        found.append(Group(arm, busy or 0.0, traffic or "", pairs))
        return sorted(found, key=lambda group: group.arm in EVENT_ARMS)

    def _row(self, group: Group) -> Row:
        windows = [w for p in group.pairs for w in self._index.windows(*p, self._window_s)]
        requests = [r for arm, _ in group.pairs for r in self._index.of(arm)]
        load = self._load(group)
        spare = 1 - load["offered"] / load["capacity"]
        found = harvest(self._records, group.pairs, group.arm.guest, spare)
        guest = self._guest_times(group)
        ratios = self._ratios(windows)
        checks = self._checks(group, windows, requests, found, guest, ratios)
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
            **self._kv(group),
            "host_preemptions": _preemptions(group, alone=False),
            "token_mismatches": _mismatches(windows),
            "checks": [] if reference else [_plain(asdict(check)) for check in checks],
            "verdict": limits.REFERENCE if reference else limits.row_verdict(checks),
        }

    def _load(self, group: Group) -> Row:
        """What the host was asked for, and how busy that kept it alone."""
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

    def _guest_times(self, group: Group) -> Row:
        """Steps and yields of the ROSE guest; absent for arms without one."""
        names = ("guest_step_p99_s", "guest_step_cpu_p99_s", "yield_p50_s", "yield_p99_s")
        steps = self._records.steps
        starts: list[float] = []
        pickups: list[float] = []
        wall: list[float] = []
        cpu: list[float] = []
        yields: list[float] = []
        for arm, _ in group.pairs:
            span = (arm.start_s, arm.end_s)
            arrivals = steps["host"].arrivals_in(span)
            starts += starts_s(steps["host"], arrivals)
            pickups += steps["host"].pickups_s(span)
            if group.arm.guest == "rose":
                found = steps["guest"].durations_s(span)
                wall += found[0]
                cpu += found[1]
                yields += yields_s(steps["guest"], arrivals)
        values = (_p(wall, 0.99), _p(cpu, 0.99), _p(yields, 0.5), _p(yields, 0.99))
        return {
            **dict(zip(names, values, strict=True)),
            "yields": len(yields),
            "host_pickup_p50_s": _p(pickups, 0.5),
            "host_pickup_p99_s": _p(pickups, 0.99),
            "host_start_p50_s": _p(starts, 0.5),
            "host_start_p99_s": _p(starts, 0.99),
        }

    def _kv(self, group: Group) -> Row:
        """How often the host was short of KV memory, and how much the guest kept meanwhile."""
        if group.arm.guest != "rose":
            return {"host_kv_pressed": None, "guest_kv_bytes": None}
        spans = [(arm.start_s, arm.end_s) for arm, _ in group.pairs]
        seen = [s for s in self._records.guest if any(a <= s.t_s < b for a, b in spans)]
        return {
            "host_kv_pressed": _mean([float(s.mode == THROTTLED) for s in seen]),
            "guest_kv_bytes": _mean([float(s.kv_bytes) for s in seen]),
        }

    def _checks(
        self,
        group: Group,
        windows: Sequence[Window],
        requests: Sequence[Request],
        found: Harvest,
        guest: Row,
        ratios: Ratios,
    ) -> list[Check]:
        checks = self._host_checks(group, windows, len(requests), guest, ratios)
        checks += self._harvest_checks(group, found)
        compared = sum(pair.both_digests for window in windows for pair in window)
        checks.append(exactly_none("token_mismatches", _mismatches(windows), compared))
        caused = _preemptions(group, alone=False) - _preemptions(group, alone=True)
        checks.append(exactly_none("host_preemptions", max(0, caused), len(requests)))
        if group.arm.guest == "rose":
            step_s = guest["guest_step_p99_s"]
            room_s = None if step_s is None else step_s + limits.YIELD_ALLOWANCE_S
            checks += [
                measured_at_most("guest_step_p99_s", step_s, limits.MAX_GUEST_STEP_S),
                measured_at_most(
                    "guest_step_cpu_p99_s", guest["guest_step_cpu_p99_s"], limits.MAX_GUEST_STEP_S
                ),
                measured_at_most("yield_p99_s", guest["yield_p99_s"], room_s),
            ]
        return checks

    def _host_checks(
        self,
        group: Group,
        windows: Sequence[Window],
        requests: int,
        guest: Row,
        ratios: Ratios,
    ) -> list[Check]:
        """Latencies against alone, or with slack lent the share of requests in their targets."""
        if group.arm.slack_share:
            return self._target_checks(windows)
        # What a guest that was just let run may take of the core: the time it computes, not the
        # time that the host took back from it.
        step_s = guest["guest_step_cpu_p99_s"] or 0.0
        alone = [v for w in windows for p in w if (v := latency_s(p.alone, "ttft")) is not None]
        checks = []
        for percent in PERCENTS:
            decisive = percent == 90 or requests >= limits.MIN_REQUESTS_FOR_P99
            base_s = percentile(alone, percent / 100) if alone else math.inf
            for metric, extra in (("tpot", 0.0), ("ttft", step_s / base_s)):
                name, limit = f"{metric}_p{percent}", limits.RATIO_LIMIT + extra
                check = at_most(name, ratios[metric, percent], limit, decisive=decisive)
                checks.append(check if decisive else _undecided(check))
        return checks

    def _target_checks(self, windows: Sequence[Window]) -> list[Check]:
        spec = self._spec
        good = [[(_good(p.arm, spec), _good(p.alone, spec)) for p in w] for w in windows]
        if not good:
            return [at_least("attainment", None, -limits.MAX_ATTAINMENT_LOSS)]
        lost = paired_difference(good, self._records.run.seed)
        return [at_least("attainment_difference", lost, -limits.MAX_ATTAINMENT_LOSS)]

    def _harvest_checks(self, group: Group, found: Harvest) -> list[Check]:
        arm = group.arm
        if arm not in ARMS or arm.guest != "rose":
            return []
        if arm.slack_share:
            decisive = group.busy_target in limits.SPARE_EFFICIENCY_AT
            return [
                at_least(
                    "spare_efficiency",
                    found.spare_efficiency,
                    limits.MIN_SPARE_EFFICIENCY,
                    decisive=decisive,
                )
            ]
        return [
            at_least(
                "idle_efficiency",
                found.idle_efficiency,
                limits.MIN_IDLE_EFFICIENCY,
                decisive=group.busy_target in limits.IDLE_EFFICIENCY_AT,
            )
        ]


def arm_of(row: Row) -> Arm:
    """The arm that a row is about."""
    name = row["mode"]
    return ALL_ARMS[name if name in ALL_ARMS else f"{name}-{row['slack_share']}"]


def _undecided(check: Check) -> Check:
    return Check(
        check.name, check.value, check.ci95, check.limit, limits.INCONCLUSIVE, decisive=False
    )


def _good(request: Request, spec: SloSpec) -> float:
    return float(as_slo(request).meets(spec))


def _mismatches(windows: Sequence[Window]) -> int:
    pairs: list[Pair] = [pair for window in windows for pair in window]
    return sum(pair.mismatch for pair in pairs)


def _preemptions(group: Group, *, alone: bool) -> int:
    blocks: list[BlockRecord] = [pair[1] if alone else pair[0] for pair in group.pairs]
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
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None


def _plain(check: Row) -> Row:
    ci95 = check["ci95"]
    return check | {
        "value": _finite(check["value"]),
        "ci95": [_finite(end) for end in ci95] if ci95 else None,
        "limit": _finite(check["limit"]),
    }
