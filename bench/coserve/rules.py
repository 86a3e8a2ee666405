"""Evidence on each arm, and the rules for engines that share one CPU core (docs/bench.md)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.common.checks import (
    INCONCLUSIVE,
    Check,
    at_least,
    at_most,
    exactly_none,
)
from bench.common.pairing import Window, latency_s
from bench.common.pairing import slo_latency as as_slo
from bench.coserve.plan import ARMS, IDLE_NAIVE, IDLE_ROSE, Arm
from bench.coserve.records import CoserveBlockRecord, CoserveRecords
from bench.load.protocol import Request
from rose.compare.bootstrap import Estimate, paired_difference, ratio_of_rates
from slo import SloSpec, percentile


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
PERCENTS = (90, 99)


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


RATIO_LIMIT = 1.05
MIN_REQUESTS_FOR_P99 = 10_000
MIN_IDLE_EFFICIENCY, IDLE_EFFICIENCY_AT = 0.8, (0.3, 0.6)
MIN_SPARE_EFFICIENCY, SPARE_EFFICIENCY_AT = 0.5, (0.6,)
MAX_ATTAINMENT_LOSS = 0.001
MAX_GUEST_STEP_S = 0.020
YIELD_ALLOWANCE_S = 0.001


def core_rules(found: Evidence) -> list[Check]:
    """Return all checks of an arm on a shared core."""
    checks = _host_checks(found) + harvest_checks(found)
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
        return [
            at_least(
                "spare_efficiency",
                found.harvest.spare_efficiency,
                MIN_SPARE_EFFICIENCY,
                decisive=busy in SPARE_EFFICIENCY_AT,
            )
        ]
    return [
        at_least(
            "idle_efficiency",
            found.harvest.idle_efficiency,
            MIN_IDLE_EFFICIENCY,
            decisive=busy in IDLE_EFFICIENCY_AT,
        )
    ]


def undecided(check: Check) -> Check:
    """Return the same figure, without a verdict."""
    return replace(check, verdict=INCONCLUSIVE, decisive=False)


def _host_checks(found: Evidence) -> list[Check]:
    """Judge latencies against alone, or with slack lent the share of requests in their targets."""
    if found.group.arm.slack_share:
        return _target_checks(found)
    # A guest that just runs may take its computing time of the core, without the time that the host
    # took back from it.
    return ratio_checks(found, found.guest["guest_step_cpu_p99_s"] or 0.0)


def _target_checks(found: Evidence) -> list[Check]:
    spec = found.spec
    good = [[(_good(p.arm, spec), _good(p.alone, spec)) for p in w] for w in found.windows]
    if not good:
        return [at_least("attainment", None, -MAX_ATTAINMENT_LOSS)]
    lost = paired_difference(good, found.seed)
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


def _good(request: Request, spec: SloSpec) -> float:
    return float(as_slo(request).meets(spec))
