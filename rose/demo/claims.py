"""The claims of the demo, and the verdict of the records on each.

A count or a mean is held against its limit as it stands; an interval decides where the limit is one
of noise (host latency), and too little data is never a verdict.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rose.demo.harvest import Harvest, harvest
from rose.demo.host_impact import HostImpact, host_impact
from rose.demo.measures import (
    KINDS,
    LogprobGap,
    faults,
    fifths,
    held_out,
    logprob_gap,
    rewards_by_group,
    tokens,
    trajectories,
    weights,
)
from rose.demo.records import Records
from rose.stats import Estimate, Interval, mean_difference, proportion_difference

Verdict = Literal["HOLDS", "FAILS", "INCONCLUSIVE"]
Bound = Literal["at least", "at most", "above"]

MIN_REWARD_RISE = 0.10
MIN_HELD_OUT_RISE = 0.05
HELD_OUT_MAPS = 128
# Below this many steps a missing rise may only mean that training was too short.
ENOUGH_STEPS = 20
MAX_LOGPROB_GAP = 0.01
MAX_HOST_BUSY = 0.5
ENOUGH_PAIRS = 3
MAX_LATENCY_RATIO = 1.10
ENOUGH_REQUESTS = {50: 50, 95: 200}
MIN_SPANNING_SHARE = 0.05
MIN_FORCED_REVOCATIONS = 10
MAX_STALENESS = 1

_BAD_WEIGHTS = ("weights: digest and probe failures", "borrowed tokens: logprob gap of guest")
# A control is a run that must fail: one of these claims has to, or the measurement sees nothing.
BROKEN_BY_CONTROL: dict[str, tuple[str, ...]] = {
    "shuffled-advantage": ("learns: sampled reward",),
    "lr0": ("learns: sampled reward",),
    "corrupt-chunk": _BAD_WEIGHTS,
    "wrong-chunk": _BAD_WEIGHTS,
    "stale-guest": _BAD_WEIGHTS,
}


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim: `value` must be `bound` `limit`; `why` says in words what decided."""

    name: str
    value: float | None
    ci95: Interval | None
    bound: Bound
    limit: float | None
    verdict: Verdict
    why: str


def _meets(value: float, bound: Bound, limit: float) -> bool:
    if bound == "at least":
        return value >= limit
    return value <= limit if bound == "at most" else value > limit


def _plain(
    name: str, value: float | None, bound: Bound, limit: float | None, why: str, missing: str
) -> Claim:
    """A claim decided by its value alone; `missing` says what a None value lacked."""
    if value is None or limit is None:
        return Claim(name, value, None, bound, limit, "INCONCLUSIVE", missing)
    verdict: Verdict = "HOLDS" if _meets(value, bound, limit) else "FAILS"
    return Claim(name, value, None, bound, limit, verdict, why)


def _rise(name: str, found: Estimate, limit: float, steps: int, why: str) -> Claim:
    """A rise decided by its value; short training that did not rise enough proves nothing."""
    verdict: Verdict = "HOLDS" if found.value >= limit else "FAILS"
    surely_below = found.ci95 is not None and found.ci95[1] < limit
    if verdict == "FAILS" and steps < ENOUGH_STEPS and not surely_below:
        verdict = "INCONCLUSIVE"
        why = f"{why}; {steps} steps are few to learn from, {ENOUGH_STEPS} are enough"
    return Claim(name, found.value, found.ci95, "at least", limit, verdict, why)


def learning_claims(records: Records, seed: int) -> list[Claim]:
    """Reward rises over the run, and so does success on maps never trained on."""
    name, limit = "learns: sampled reward", MIN_REWARD_RISE
    first, last = (rewards_by_group(records, steps) for steps in fifths(records))
    if not first or not last:
        missing = "no delivered trajectories in the first or the last fifth of the steps"
        sampled = Claim(name, None, None, "at least", limit, "INCONCLUSIVE", missing)
    else:
        why = "mean of the last fifth of steps minus the first; interval over maps"
        steps = len(records.steps)
        sampled = _rise(name, mean_difference(first, last, seed), limit, steps, why)
    return [sampled, _held_out_claim(records, seed)]


def _held_out_claim(records: Records, seed: int) -> Claim:
    name, limit, found = "learns: held-out success", MIN_HELD_OUT_RISE, held_out(records)
    if found.warm_start is None or found.final is None or found.n < HELD_OUT_MAPS:
        missing = f"both evaluations must cover {HELD_OUT_MAPS} maps"
        return Claim(name, None, None, "at least", limit, "INCONCLUSIVE", missing)
    before, after = ((round(share * found.n), found.n) for share in (found.warm_start, found.final))
    rise = proportion_difference(before, after, seed)
    why = f"greedy success on {found.n} held-out maps, final minus warm start"
    return _rise(name, rise, limit, len(records.steps), why)


def token_claims(records: Records) -> list[Claim]:
    """Borrowed tokens are as good as dedicated ones."""
    gap: LogprobGap = logprob_gap(records)
    values = {"guest": gap.guest, "dedicated": gap.dedicated, "continued": gap.continued}
    why = "mean absolute difference of engine and trainer logprobs, under the stamped version"
    return [
        _plain(
            f"borrowed tokens: logprob gap of {kind}",
            values[kind],
            "at most",
            MAX_LOGPROB_GAP,
            why,
            f"no {kind} tokens were compared",
        )
        for kind in KINDS
    ]


def _enough_pairs(claim: Claim, found: Harvest) -> Claim:
    """The claim, or why too few pairs decide nothing."""
    if found.pairs >= ENOUGH_PAIRS or claim.verdict == "INCONCLUSIVE":
        return claim
    why = f"{found.pairs} pairs of blocks; {ENOUGH_PAIRS} are enough"
    return replace(claim, verdict="INCONCLUSIVE", why=why)


def harvest_claims(records: Records, seed: int) -> list[Claim]:
    """Lending turns idle host time into rollouts."""
    found = harvest(records, seed)
    missing = "needs leased, frozen and ceiling blocks with tokens"
    why = "rollout tokens/s, leased over frozen; the least is 1 + 0.8 x idle x (ceiling - 1)"
    gain = _plain("harvest: gain", found.gain, "at least", found.required_gain, why, missing)
    gain = replace(gain, ci95=found.gain_ci95)
    low = found.gain_ci95[0] if found.gain_ci95 else None
    surely = _plain(
        "harvest: gain is real",
        low,
        "above",
        1.0,
        "lower end of the gain's 95% interval over pairs of blocks",
        "needs two pairs of blocks for an interval",
    )
    busy = None if found.idle_fraction is None else 1 - found.idle_fraction
    quiet = _plain(
        "harvest: host busy",
        busy,
        "at most",
        MAX_HOST_BUSY,
        "share of time the host was inside a step in frozen blocks",
        "no frozen blocks",
    )
    return [_enough_pairs(gain, found), _enough_pairs(surely, found), quiet]


def host_claims(records: Records, seed: int) -> list[Claim]:
    """The host does not notice."""
    found = host_impact(records, seed)
    return [
        _latency_claim(found, metric, percent)
        for metric in ("ttft", "tpot")
        for percent in (50, 95)
    ]


def _latency_claim(found: HostImpact, metric: str, percent: int) -> Claim:
    name = f"host does not notice: {metric.upper()} p{percent}"
    estimate, limit = found.ratios.get((metric, percent)), MAX_LATENCY_RATIO
    samples, enough = found.samples.get(metric, 0), ENOUGH_REQUESTS[percent]
    verdict: Verdict = "INCONCLUSIVE"
    if estimate is None or samples < enough:
        why = f"{samples} requests compared; {enough} are enough"
    elif estimate.ci95 is None:
        why = "too many failed requests, or too short a run, for an interval"
    elif estimate.ci95[1] <= limit:
        verdict, why = "HOLDS", f"leased over frozen, {samples} replayed requests in each arm"
    elif estimate.ci95[0] > limit:
        verdict, why = "FAILS", f"the whole interval is above {limit:.2f}; {samples} requests"
    else:
        why = f"the interval contains {limit:.2f}; {samples} requests are too few to tell"
    value, ci95 = (estimate.value, estimate.ci95) if estimate else (None, None)
    return Claim(name, value, ci95, "at most", limit, verdict, why)


def delivery_claims(records: Records) -> list[Claim]:
    """Every trajectory arrives once, every token says where it is from."""
    found, sampled = trajectories(records), tokens(records)
    counted = found.started or None
    share = found.spanning_versions / found.delivered if found.delivered else None
    total = sampled.dedicated + sampled.guest + sampled.continued
    none, broken = "no trajectories recorded", found.lost + found.duplicated
    return [
        _plain(
            "trajectories: lost or delivered twice",
            broken if counted else None,
            "at most",
            0,
            f"{found.started} started, {found.delivered} delivered",
            none,
        ),
        _plain(
            "tokens: without version or logprob",
            sampled.unstamped if total else None,
            "at most",
            0,
            f"{total} tokens sampled",
            "no tokens recorded",
        ),
        _plain(
            "trajectories: spanning two versions",
            share,
            "at least",
            MIN_SPANNING_SHARE,
            f"{found.spanning_versions} of {found.delivered} delivered",
            none,
        ),
        _plain(
            "trajectories: staleness",
            found.max_staleness,
            "at most",
            MAX_STALENESS,
            "most versions between the policy trained and the oldest token it trained on",
            none,
        ),
    ]


def safety_claims(records: Records) -> list[Claim]:
    """Weights are proven, and the faults were real."""
    published, storm = weights(records), faults(records)
    return [
        _plain(
            "weights: digest and probe failures",
            published.digest_failures + published.probe_failures if records.activations else None,
            "at most",
            0,
            f"{len(records.activations)} activations of {published.versions} versions",
            "no replica activated a version",
        ),
        _plain(
            "faults: forced revocations mid-turn",
            storm.mid_turn,
            "at least",
            MIN_FORCED_REVOCATIONS,
            f"{storm.forced_revocations} forced; those that moved a turn elsewhere count",
            "",
        ),
        _plain(
            "faults: guest killed with SIGKILL", storm.guest_kills, "at least", 1, "kill -9", ""
        ),
    ]


def claims_of(records: Records, seed: int) -> list[Claim]:
    """All claims, in the order in which the report tells them."""
    return [
        *learning_claims(records, seed),
        *token_claims(records),
        *harvest_claims(records, seed),
        *host_claims(records, seed),
        *delivery_claims(records),
        *safety_claims(records),
    ]


def exit_code(claims: Sequence[Claim], control: str | None) -> int:
    """0 when no claim fails; of a control, when one that it must break did fail."""
    failed = {claim.name for claim in claims if claim.verdict == "FAILS"}
    if control is None:
        return int(bool(failed))
    return int(failed.isdisjoint(BROKEN_BY_CONTROL[control]))
