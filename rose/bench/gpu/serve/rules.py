"""How host and guest on one card are judged."""

from rose.bench.coserve import verdict as limits
from rose.bench.coserve.evidence import Evidence
from rose.bench.coserve.pairs import latency_s
from rose.bench.coserve.rules import harvest_checks, ratio_checks, undecided
from rose.bench.coserve.verdict import Check, at_most, exactly_none, measured_at_most
from rose.stats import Estimate, percentile_estimate

STOP_S = 0.020
# What ROSE as published shows.
TTFT_P99_RATIO = 1.07


def card_rules(found: Evidence) -> list[Check]:
    """All checks of an arm on a card.

    In bf16 an answer depends on its batch, so tokens that differ from those alone decide nothing:
    the row counts them, beside those of `alone_again`.
    """
    caused = max(0, found.caused_preemptions)
    checks = [exactly_none("host_preemptions", caused, len(found.requests))]
    if found.group.arm.slack_share:
        checks += _target_checks(found)
    else:
        checks += _ratio_checks(found)
    return checks + harvest_checks(found) + _stop_checks(found)


def requests_wanted(requests: int) -> int:
    """How many more an arm needs before its p99 decides."""
    return max(0, limits.MIN_REQUESTS_FOR_P99 - requests)


def _ratio_checks(found: Evidence) -> list[Check]:
    """Host latencies against alone: p90 decides, p99 once an arm has enough requests."""
    checks = ratio_checks(found, found.guest["guest_step_p99_s"] or 0.0)
    kept = [check for check in checks if check.name.endswith("p90")]
    decisive = requests_wanted(len(found.requests)) == 0
    last = at_most("ttft_p99", found.ratios["ttft", 99], TTFT_P99_RATIO, decisive=decisive)
    return [*kept, last if decisive else undecided(last)]


def _target_checks(found: Evidence) -> list[Check]:
    """With slack lent: the p99 of what users see is within the targets."""
    targets_s = {"ttft": found.spec.ttft_s, "tpot": found.spec.tpot_s}
    return [
        at_most(f"{metric}_p99_s", _p99(found, metric), target_s)
        for metric, target_s in targets_s.items()
    ]


def _p99(found: Evidence, metric: str) -> Estimate | None:
    windows = []
    for window in found.windows:
        values = [v for pair in window if (v := latency_s(pair.arm, metric)) is not None]
        if values:
            windows.append(values)
    return percentile_estimate(windows, 99, found.seed) if windows else None


def _stop_checks(found: Evidence) -> list[Check]:
    """From a host's arrival to the end of the guest's last step: decides where no slack is lent."""
    arm = found.group.arm
    if arm.guest != "rose":
        return []
    stop = percentile_estimate(found.stops, 99, found.seed) if found.stops else None
    return [
        at_most("stop_p99_s", stop, STOP_S, decisive=not arm.slack_share),
        measured_at_most("guest_step_p99_s", found.guest["guest_step_p99_s"], STOP_S),
    ]
