"""One row for each arm of each cell, and for each event: figures, checks, verdict."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.common.checks import (
    INCONCLUSIVE,
    REFERENCE,
    Check,
    at_least,
    at_most,
    exactly_none,
    row_verdict,
)
from bench.common.stats import METRICS, RequestIndex, Window, latency_s, percentile_ratio
from bench.common.stats import slo_latency as as_slo
from bench.coserve.plan import (
    ALL_ARMS,
    ALONE,
    ARMS,
    EVENT_ALONE,
    EVENT_ARMS,
    IDLE_NAIVE,
    IDLE_ROSE,
    Arm,
)
from bench.coserve.records import CoserveBlockRecord, CoserveRecords, starts_s, yields_s
from bench.load.protocol import Request
from executor import FreezeReason, GrantMode
from rose.compare.bootstrap import Estimate, paired_difference, ratio_of_rates
from slo import SloSpec, attainment, goodput_rps, percentile

THROTTLED = GrantMode.THROTTLE.name.lower()
PERCENTS = (90, 99)
RATIO_LIMIT = 1.05
MIN_REQUESTS_FOR_P99 = 10_000
MIN_IDLE_EFFICIENCY, IDLE_EFFICIENCY_AT = 0.8, (0.3, 0.6)
MIN_SPARE_EFFICIENCY, SPARE_EFFICIENCY_AT = 0.5, (0.6,)
MAX_ATTAINMENT_LOSS = 0.001
MAX_GUEST_STEP_S = 0.020
YIELD_ALLOWANCE_S = 0.001


@dataclass(frozen=True, slots=True)
class Harvest:
    """Guest tokens/s, against the guest alone × idle, and × spare. None: not to be had."""

    guest_tok_s: float
    guest_alone_tok_s: float | None
    idle_efficiency: Estimate | None
    spare_efficiency: Estimate | None


def alone_tok_s(records: CoserveRecords, guest: str) -> float | None:
    """Return tokens/s of a guest over all its blocks without host load."""
    arm = (IDLE_NAIVE if guest == "naive" else IDLE_ROSE).name
    blocks = [block for block in records.blocks if block.arm == arm]
    seconds = sum(block.duration_s for block in blocks)
    tokens = sum(block.guest_tokens for block in blocks)
    return tokens / seconds if tokens else None


BlockPair = tuple[CoserveBlockRecord, CoserveBlockRecord]


def harvest(
    records: CoserveRecords, pairs: Sequence[BlockPair], guest: str, spare: float
) -> Harvest:
    """Compare (arm, alone) blocks with the same arrivals."""
    seconds = sum(arm.duration_s for arm, _ in pairs)
    tokens = sum(arm.guest_tokens for arm, _ in pairs)
    rate = alone_tok_s(records, guest)
    if guest == "none" or rate is None or not seconds:
        return Harvest(tokens / seconds if seconds else 0.0, rate, None, None)
    windows = [window for pair in pairs for window in _windows(records, pair, guest, rate)]
    above = [(tokens_, seconds_) for tokens_, seconds_, _ in windows]
    idle = [(ideal, seconds_) for _, seconds_, ideal in windows]
    whole = [(rate * spare * seconds_, seconds_) for _, seconds_, _ in windows]
    return Harvest(
        guest_tok_s=tokens / seconds,
        guest_alone_tok_s=rate,
        idle_efficiency=ratio_of_rates(above, idle, records.run.seed),
        spare_efficiency=ratio_of_rates(above, whole, records.run.seed) if spare > 0 else None,
    )


def _windows(
    records: CoserveRecords, pair: BlockPair, guest: str, rate_tok_s: float
) -> list[tuple[float, float, float]]:
    """Return (tokens, seconds, tokens of the guest alone × idle) of each window of a pair of
    blocks.

    A stock guest keeps no step log: its block is one window, of its own counter.
    """
    arm, alone = pair
    length_s = min(arm.duration_s, alone.duration_s)
    if guest == "naive":
        spans = [(0.0, length_s)]
    else:
        width_s = float(records.run.settings["window_s"])
        # A rest shorter than a window says little and would weigh as much.
        spans = [(k * width_s, (k + 1) * width_s) for k in range(int(length_s / width_s))]
    found = []
    for begin_s, end_s in spans:
        seconds = end_s - begin_s
        host = (alone.start_s + begin_s, alone.start_s + end_s)
        idle = 1 - records.steps["host"].busy_s(host) / seconds
        tokens = arm.guest_tokens * length_s / arm.duration_s
        if guest != "naive":
            span = (arm.start_s + begin_s, arm.start_s + end_s)
            tokens = records.steps["guest"].sampled_in(span)
        found.append((float(tokens), seconds, rate_tok_s * max(0.0, idle) * seconds))
    return found


Ratios = dict[tuple[str, int], Estimate | None]


@dataclass(frozen=True, slots=True)
class FigureGroup:
    """The blocks of one arm, each with the block alone that had the same arrivals."""

    arm: Arm
    busy_target: float
    traffic: str
    pairs: list[BlockPair]

    @property
    def seconds(self) -> float:
        """Wall time of the arm."""
        return sum(arm.duration_s for arm, _ in self.pairs)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence on one arm.

    windows: arrivals of the arm beside the same ones alone. requests: all of the arm.
    guest: figures of its steps and yields, as the row has them. ratios: host latency in the arm
    over that alone, by metric and percentile. stops: seconds from a host's arrival to the end of
    the guest's last step, by window. caused_preemptions: the host's beyond those alone.
    """

    group: FigureGroup
    windows: Sequence[Window]
    requests: Sequence[Request]
    harvest: Harvest
    guest: dict[str, Any]
    ratios: Ratios
    spec: SloSpec
    seed: int
    stops: Sequence[Sequence[float]]
    caused_preemptions: int


def mismatches(windows: Sequence[Window]) -> int:
    """Count answers that differ from those alone."""
    return sum(pair.mismatch for window in windows for pair in window)


def core_rules(found: Evidence) -> list[Check]:
    """Return all checks of an arm on a shared core."""
    if found.group.arm.slack_share:
        checks = _target_checks(found)
    else:
        # A guest that just runs may take its computing time of the core, without the time that the
        # host took back from it.
        checks = ratio_checks(found, found.guest["guest_step_cpu_p99_s"] or 0.0)
    checks += harvest_checks(found)
    compared = sum(pair.both_digests for window in found.windows for pair in window)
    checks.append(exactly_none("token_mismatches", mismatches(found.windows), compared))
    caused = max(0, found.caused_preemptions)
    checks.append(exactly_none("host_preemptions", caused, len(found.requests)))
    return checks + (_guest_checks(found) if found.group.arm.guest == "rose" else [])


def ratio_checks(found: Evidence, step_s: float) -> list[Check]:
    """Judge host latencies against alone; TTFT may be one guest step (`step_s`) later."""
    values = [latency_s(p.alone, "ttft") for w in found.windows for p in w]
    alone = [value for value in values if value is not None]
    checks = []
    for percent in PERCENTS:
        decisive = percent == 90 or len(found.requests) >= MIN_REQUESTS_FOR_P99
        base_s = percentile(alone, percent / 100) if alone else math.inf
        for metric, extra in (("tpot", 0.0), ("ttft", step_s / base_s)):
            name, limit = f"{metric}_p{percent}", RATIO_LIMIT + extra
            check = at_most(name, found.ratios[metric, percent], limit, decisive=decisive)
            checks.append(check if decisive else undecided(check))
    return checks


def harvest_checks(found: Evidence) -> list[Check]:
    """Judge a ROSE guest's share of the idle time, or with slack lent of the spare capacity."""
    arm, busy = found.group.arm, found.group.busy_target
    if arm not in ARMS or arm.guest != "rose":
        return []
    if arm.slack_share:
        spare, decisive = found.harvest.spare_efficiency, busy in SPARE_EFFICIENCY_AT
        return [at_least("spare_efficiency", spare, MIN_SPARE_EFFICIENCY, decisive=decisive)]
    idle, decisive = found.harvest.idle_efficiency, busy in IDLE_EFFICIENCY_AT
    return [at_least("idle_efficiency", idle, MIN_IDLE_EFFICIENCY, decisive=decisive)]


def undecided(check: Check) -> Check:
    """Return the same figure, without a verdict."""
    return replace(check, verdict=INCONCLUSIVE, decisive=False)


def _target_checks(found: Evidence) -> list[Check]:
    spec = found.spec

    def good(request: Request) -> float:
        return float(as_slo(request).meets(spec))

    good_pairs = [[(good(p.arm), good(p.alone)) for p in w] for w in found.windows]
    if not good_pairs:
        return [at_least("attainment", None, -MAX_ATTAINMENT_LOSS)]
    lost = paired_difference(good_pairs, found.seed)
    return [at_least("attainment_difference", lost, -MAX_ATTAINMENT_LOSS)]


def _guest_checks(found: Evidence) -> list[Check]:
    guest = found.guest
    step_s, cpu_s = guest["guest_step_p99_s"], guest["guest_step_cpu_p99_s"]
    # Without a step there is no room to yield in, and nothing to judge.
    yield_s = None if step_s is None else guest["yield_p99_s"]
    room_s = 0.0 if step_s is None else step_s + YIELD_ALLOWANCE_S
    return [
        at_most("guest_step_p99_s", step_s, MAX_GUEST_STEP_S, decisive=False),
        at_most("guest_step_cpu_p99_s", cpu_s, MAX_GUEST_STEP_S, decisive=False),
        at_most("yield_p99_s", yield_s, room_s, decisive=False),
    ]


Row = dict[str, Any]
Rules = Callable[[Evidence], list[Check]]


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
        ratios = {
            (metric, percent): percentile_ratio(windows, metric, percent, self._records.run.seed)
            for metric in METRICS
            for percent in PERCENTS
        }
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
