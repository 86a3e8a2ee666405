"""How engines that share one CPU core are judged: see docs/bench.md."""

import math

from rose.bench.coserve import verdict as limits
from rose.bench.coserve.evidence import PERCENTS, Evidence, mismatches
from rose.bench.coserve.pairs import latency_s
from rose.bench.coserve.pairs import slo_latency as as_slo
from rose.bench.coserve.plan import ARMS
from rose.bench.coserve.verdict import Check, at_least, at_most, exactly_none, measured_at_most
from rose.load.protocol import Request
from rose.stats import paired_difference
from slo import SloSpec, percentile


def core_rules(found: Evidence) -> list[Check]:
    """All checks of an arm on a shared core."""
    checks = _host_checks(found) + harvest_checks(found)
    compared = sum(pair.both_digests for window in found.windows for pair in window)
    checks.append(exactly_none("token_mismatches", mismatches(found.windows), compared))
    caused = max(0, found.caused_preemptions)
    checks.append(exactly_none("host_preemptions", caused, len(found.requests)))
    return checks + (_guest_checks(found) if found.group.arm.guest == "rose" else [])


def ratio_checks(found: Evidence, step_s: float) -> list[Check]:
    """Host latencies against alone; TTFT may be one guest step (`step_s`) later."""
    values = [latency_s(p.alone, "ttft") for w in found.windows for p in w]
    alone = [value for value in values if value is not None]
    checks = []
    for percent in PERCENTS:
        decisive = percent == 90 or len(found.requests) >= limits.MIN_REQUESTS_FOR_P99
        base_s = percentile(alone, percent / 100) if alone else math.inf
        for metric, extra in (("tpot", 0.0), ("ttft", step_s / base_s)):
            name, limit = f"{metric}_p{percent}", limits.RATIO_LIMIT + extra
            check = at_most(name, found.ratios[metric, percent], limit, decisive=decisive)
            checks.append(check if decisive else undecided(check))
    return checks


def harvest_checks(found: Evidence) -> list[Check]:
    """What a ROSE guest got of the idle time, or with slack lent of the spare capacity."""
    arm, busy = found.group.arm, found.group.busy_target
    if arm not in ARMS or arm.guest != "rose":
        return []
    if arm.slack_share:
        return [
            at_least(
                "spare_efficiency",
                found.harvest.spare_efficiency,
                limits.MIN_SPARE_EFFICIENCY,
                decisive=busy in limits.SPARE_EFFICIENCY_AT,
            )
        ]
    return [
        at_least(
            "idle_efficiency",
            found.harvest.idle_efficiency,
            limits.MIN_IDLE_EFFICIENCY,
            decisive=busy in limits.IDLE_EFFICIENCY_AT,
        )
    ]


def undecided(check: Check) -> Check:
    """The same figure, which does not decide."""
    return Check(
        check.name, check.value, check.ci95, check.limit, limits.INCONCLUSIVE, decisive=False
    )


def _host_checks(found: Evidence) -> list[Check]:
    """Latencies against alone, or with slack lent the share of requests in their targets."""
    if found.group.arm.slack_share:
        return _target_checks(found)
    # What a guest that was just let run may take of the core: the time it computes, not the
    # time that the host took back from it.
    return ratio_checks(found, found.guest["guest_step_cpu_p99_s"] or 0.0)


def _target_checks(found: Evidence) -> list[Check]:
    spec = found.spec
    good = [[(_good(p.arm, spec), _good(p.alone, spec)) for p in w] for w in found.windows]
    if not good:
        return [at_least("attainment", None, -limits.MAX_ATTAINMENT_LOSS)]
    lost = paired_difference(good, found.seed)
    return [at_least("attainment_difference", lost, -limits.MAX_ATTAINMENT_LOSS)]


def _guest_checks(found: Evidence) -> list[Check]:
    guest = found.guest
    step_s, cpu_s = guest["guest_step_p99_s"], guest["guest_step_cpu_p99_s"]
    room_s = None if step_s is None else step_s + limits.YIELD_ALLOWANCE_S
    return [
        measured_at_most("guest_step_p99_s", step_s, limits.MAX_GUEST_STEP_S),
        measured_at_most("guest_step_cpu_p99_s", cpu_s, limits.MAX_GUEST_STEP_S),
        measured_at_most("yield_p99_s", guest["yield_p99_s"], room_s),
    ]


def _good(request: Request, spec: SloSpec) -> float:
    return float(as_slo(request).meets(spec))
