"""The claims of the demo, and the verdict of the records on each.

An exact claim is a count: it is what it is, and one too many is a failure. A measured claim comes
with the interval in which its true value lies:

    HOLDS          the measured value meets the limit
    INCONCLUSIVE   it misses, but the interval contains the limit; or there is too little data
    FAILS          the whole interval misses the limit

so noise alone never makes a claim fail. Where noise must not make it hold either (a gain that may
be none), the whole interval has to meet the limit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bench.common.checks import FAILS, HOLDS, INCONCLUSIVE, Bound, Check, Verdict, meets, verdict_of
from bench.demo.report import measures
from bench.demo.report.measures import KINDS, Figures
from bench.demo.report.records import Records
from rose.compare.bootstrap import Estimate, mean_difference, paired_difference

MIN_REWARD_RISE = 0.10
MIN_HELD_OUT_RISE = 0.10
ENOUGH_MAPS = 512
MAX_LOGPROB_GAP = 0.01
MIN_IDLE_EFFICIENCY = 0.7
MAX_HOST_BUSY = 0.5
ENOUGH_PAIRS = 3
MAX_LATENCY_RATIO = 1.10
ENOUGH_REQUESTS = {50: 50, 95: 200}
MIN_SPANNING_SHARE = 0.05
MIN_FORCED_REVOCATIONS = 10
MAX_STALENESS = 1
# Neither of two jobs of equal weight has less, so neither has more than 60%.
MIN_GUEST_SHARE = 0.4
MIN_LEASED_SHARE = 0.9
MIN_CHANGES = 2
SPANNING = "trajectories: spanning two versions"
_LEARNS = ("learns: sampled reward", "learns: held-out success")
_BAD_WEIGHTS = ("weights: digest and probe failures", "borrowed tokens: logprob gap of guest")
_LATENCIES = tuple((metric, percent) for metric in ("ttft", "tpot") for percent in (50, 95))
# A control is a run that must fail: one of these claims has to, or the measurement sees nothing.
BROKEN_BY_CONTROL: dict[str, tuple[str, ...]] = {
    "shuffled-advantage": _LEARNS,
    "lr0": _LEARNS[1:],
    "corrupt-chunk": _BAD_WEIGHTS[:1],
    "wrong-chunk": _BAD_WEIGHTS,
    "stale-guest": _BAD_WEIGHTS[1:],
    "drop-token": ("borrowed tokens: logprob gap of continued",),
    "naive": tuple(f"host does not notice: {m.upper()} p{percent}" for m, percent in _LATENCIES),
}


@dataclass(frozen=True, slots=True)
class DemoClaim(Check):
    """Check with the reason of its verdict.

    `exact`: a count, or too exact for an interval to matter.
    """

    why: str = ""
    exact: bool = False


def exact(
    name: str, value: float | None, bound: Bound, limit: float, why: str, missing: str = ""
) -> DemoClaim:
    """Judge a claim by its value alone; `missing` names what a None value lacked."""
    verdict = INCONCLUSIVE if value is None else verdict_of(value, bound, limit)
    why = missing if value is None else why
    return DemoClaim(name, value, None, limit, verdict, bound=bound, why=why, exact=True)


def measured(
    name: str,
    found: Estimate | None,
    bound: Bound,
    limit: float,
    why: str,
    missing: str,
    *,
    throughout: bool = False,
) -> DemoClaim:
    """Judge a claim by value and interval; `missing` names what None, or no interval, lacked.

    throughout: it holds only where the whole interval meets the limit.
    """
    if found is None or found.ci95 is None:
        value = found.value if found else None
        return DemoClaim(name, value, None, limit, INCONCLUSIVE, bound=bound, why=missing)
    met = [meets(end, bound, limit) for end in found.ci95]
    verdict: Verdict = INCONCLUSIVE
    if all(met) if throughout else meets(found.value, bound, limit):
        verdict = HOLDS
    elif not any(met):
        verdict, why = FAILS, f"{why}; the whole interval misses"
    else:
        why = f"{why}; the interval contains the limit"
    return DemoClaim(name, found.value, found.ci95, limit, verdict, bound=bound, why=why)


def learning_claims(records: Records, seed: int) -> Iterator[DemoClaim]:
    """Judge that reward rises, and success on maps never trained on."""
    first, last = (measures.rewards_by_group(records, steps) for steps in measures.fifths(records))
    yield measured(
        _LEARNS[0], mean_difference(first, last, seed) if first and last else None,
        "at least", MIN_REWARD_RISE,
        "mean of the last fifth of steps minus the first; interval over maps",
        "no delivered trajectories in the first or the last fifth of the steps",
    )  # fmt: skip
    crossed = measures.crossings(records)
    enough = len(crossed) >= ENOUGH_MAPS
    yield measured(
        _LEARNS[1], paired_difference([[pair] for pair in crossed], seed) if enough else None,
        "at least", MIN_HELD_OUT_RISE,
        f"greedy success on {len(crossed)} held-out maps, final minus warm start, map by map",
        f"both evaluations must cover {ENOUGH_MAPS} maps",
    )  # fmt: skip


def token_claims(records: Records) -> Iterator[DemoClaim]:
    """Judge that borrowed tokens are as good as dedicated ones."""
    gap = measures.logprob_gap(records)
    why = "mean absolute difference of engine and trainer logprobs, under the stamped version"
    for kind in KINDS:
        name, none = f"borrowed tokens: logprob gap of {kind}", f"no {kind} tokens were compared"
        yield exact(name, gap[kind], "at most", MAX_LOGPROB_GAP, why, none)


def harvest_claims(found: Figures) -> Iterator[DemoClaim]:
    """Judge that lending turns idle host time into rollouts."""
    enough = found["pairs"] >= ENOUGH_PAIRS
    missing = f"needs {ENOUGH_PAIRS} pairs of blocks with tokens, and ceiling blocks"
    yield measured(
        "harvest: gain", found["gain"] if enough else None, "above", 1.0,
        "rollout tokens/s, leased over frozen; interval over pairs of blocks", missing,
        throughout=True,
    )  # fmt: skip
    yield measured(
        "harvest: idle efficiency", found["idle_efficiency"] if enough else None,
        "at least", MIN_IDLE_EFFICIENCY,
        "guest tokens/s when leased over (guest tokens/s with the host idle x idle share)", missing,
    )  # fmt: skip
    yield measured(
        "harvest: host busy", found["busy"], "at most", MAX_HOST_BUSY,
        "share of time the host was inside a step in frozen blocks", "needs two frozen blocks",
    )  # fmt: skip


def host_claims(records: Records, seed: int) -> Iterator[DemoClaim]:
    """Judge that host latencies stay as they are."""
    found = measures.host_impact(records, seed)
    for metric, percent in _LATENCIES:
        samples, enough = found.samples.get(metric, 0), ENOUGH_REQUESTS[percent]
        missing = "too many failed requests, or too short a run, for an interval"
        if samples < enough:
            missing = f"{samples} requests compared; {enough} are enough"
        yield measured(
            f"host does not notice: {metric.upper()} p{percent}",
            found.ratios.get((metric, percent)) if samples >= enough else None,
            "at most", MAX_LATENCY_RATIO,
            f"leased over frozen, {samples} replayed requests in each arm", missing,
        )  # fmt: skip


def delivery_claims(records: Records) -> Iterator[DemoClaim]:
    """Judge that every trajectory arrives once, and every token has its version."""
    found, sampled = measures.trajectories(records), measures.tokens(records)
    total = sum(sampled[kind] for kind in KINDS)
    started, delivered, spanning = (
        found[name] for name in ("started", "delivered", "spanning_versions")
    )
    none = "no trajectories recorded"
    yield exact(
        "trajectories: lost or delivered twice",
        found["lost"] + found["duplicated"] if started else None,
        "at most", 0, f"{started} started, {delivered} delivered", none,
    )  # fmt: skip
    yield exact(
        "tokens: without version or logprob", sampled["unstamped"] if total else None,
        "at most", 0, f"{total} tokens sampled", "no tokens recorded",
    )  # fmt: skip
    yield exact(
        SPANNING, spanning / delivered if delivered else None, "at least", MIN_SPANNING_SHARE,
        f"{spanning} of {delivered} delivered", none,
    )  # fmt: skip
    yield exact(
        "trajectories: staleness", found["max_staleness"], "at most", MAX_STALENESS,
        "most versions between the policy trained and the oldest token it trained on", none,
    )  # fmt: skip


def safety_claims(records: Records, least_revocations: int) -> Iterator[DemoClaim]:
    """Judge that weights are proven, and the faults were real."""
    published, storm = measures.weights(records), measures.faults(records)
    activations, failures = len(records.activations), ("digest_failures", "probe_failures")
    yield exact(
        _BAD_WEIGHTS[0], sum(published[name] for name in failures) if activations else None,
        "at most", 0, f"{activations} activations of {published['versions']} versions",
        "no replica activated a version",
    )  # fmt: skip
    yield exact(
        "faults: forced revocations mid-turn", storm["mid_turn"], "at least", least_revocations,
        f"{storm['forced_revocations']} forced; those that moved a turn elsewhere count",
    )  # fmt: skip
    kills = storm["guest_kills"]
    yield exact("faults: guest killed with SIGKILL", kills, "at least", 1, "kill -9")


def sharing_claims(records: Records) -> Iterator[DemoClaim]:
    """Judge that jobs of equal weight get equal time of the guest, and lose none to waiting."""
    found, none = measures.sharing(records), "the guest was never leased"
    if found is None:
        return
    for each in measures.job_measures(records):
        yield exact(
            f"sharing: part of the guest's time that {each['job']} had", each["share"],
            "at least", MIN_GUEST_SHARE,
            f"{each['guest_s']:.0f} s of its leases, over those of all jobs", none,
        )  # fmt: skip
    yield exact(
        "sharing: time in which a job had the guest", found["leased_share"],
        "at least", MIN_LEASED_SHARE, f"of {found['seconds']:.0f} s in which it was lent", none,
    )  # fmt: skip
    yield exact(
        "sharing: changes from one job to another", found["changes"], "at least", MIN_CHANGES,
        "leases of the guest that followed another job's",
    )  # fmt: skip
    yield exact(
        "sharing: engines started anew for that", found["engine_starts"], "at most", 0,
        "a running engine takes the other job's base and deltas",
    )  # fmt: skip


def _claims_of_jobs(records: Records) -> Iterator[DemoClaim]:
    """Judge how jobs share the guest, what each job gets, and the proof of weights."""
    yield from sharing_claims(records)
    # They have no dedicated engine. How many span two versions is a matter of a minute's luck.
    left_out = (SPANNING, "borrowed tokens: logprob gap of dedicated")
    for job in records.jobs:
        own = records.of_job(job)
        for claim in (*token_claims(own), *delivery_claims(own)):
            if claim.name not in left_out:
                yield replace(claim, name=f"{job}: {claim.name}")
    yield next(safety_claims(records, least_revocations=0))


def claims_of(records: Records, seed: int) -> list[DemoClaim]:
    """Return the claims that the run was for, in the order of the report.

    The quickstart proves what is exact, but not how many trajectories span two versions: of its few
    some dozen do, or none. A control proves only what it must break.
    """
    quickstart, control = (records.run.settings.get(name) for name in ("quickstart", "control"))
    if records.jobs:
        return list(_claims_of_jobs(records))
    if quickstart:
        return [
            *token_claims(records),
            *(claim for claim in delivery_claims(records) if claim.name != SPANNING),
            *safety_claims(records, least_revocations=1),
        ]
    claims = [
        *learning_claims(records, seed),
        *token_claims(records),
        *harvest_claims(measures.harvest(records, seed)),
        *host_claims(records, seed),
        *delivery_claims(records),
        *safety_claims(records, MIN_FORCED_REVOCATIONS),
    ]
    if isinstance(control, str):
        return [claim for claim in claims if claim.name in BROKEN_BY_CONTROL[control]]
    return claims


def exit_code(claims: Sequence[DemoClaim], control: str | None) -> int:
    """Return 0 when no claim fails; of a control, when one that it must break did fail."""
    failed = {claim.name for claim in claims if claim.verdict == "FAILS"}
    if control is None:
        return int(bool(failed))
    return int(failed.isdisjoint(BROKEN_BY_CONTROL[control]))
