"""Measures of a run: training, harvest and host impact, computed from the raw records.

Training: reward, trajectories, tokens, logprob gap, weights, faults. Harvest: throughput that the
borrowed capacity gave, leased against frozen blocks, and its ceiling. Host impact: latencies of the
same replayed arrivals, leased against frozen.

Each function is pure: records in, one frozen figure out. A figure that the records cannot give is
None, never a guess.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.common.pairing import METRICS, Pair, RequestIndex, Window, latency_s, paired_window
from bench.demo.report.records import (
    CHUNK_REJECTED,
    EVALUATION,
    FORCED_REVOCATION,
    GUEST_KILLED,
    TRAINER_DONE,
    BlockRecord,
    Records,
    StepRow,
    TurnRecord,
)
from bench.load.protocol import Request, join_requests
from rose.compare.bootstrap import (
    Estimate,
    Floats,
    estimate_of_sums,
    percentile,
    ratio_of_percentiles,
    ratio_of_rates,
)
from rose.node.guest.guard import GuestSample

KINDS = ("guest", "dedicated", "continued")
# A revocation takes this long to travel from its order to the streams it ends.
REVOCATION_REACH_S = 0.5
SIGKILL = 9


@dataclass(frozen=True, slots=True)
class Reward:
    """Mean sampled reward; `by_step` in the order of the steps."""

    first_fifth: float | None
    last_fifth: float | None
    by_step: list[float | None]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Share of held-out maps solved greedily, before and after."""

    warm_start: float | None
    final: float | None
    n: int


@dataclass(frozen=True, slots=True)
class Trajectories:
    """Counts of episodes; `spanning_versions`: delivered ones with tokens of two versions."""

    started: int
    delivered: int
    lost: int
    duplicated: int
    spanning_versions: int
    revoked_mid_turn: int
    max_staleness: int | None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Sampled tokens by where they came from; `unstamped` lack a version or a logprob."""

    dedicated: int
    guest: int
    continued: int
    unstamped: int


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """Mean |engine logprob - trainer logprob| under the same version, nats a token."""

    guest: float | None
    dedicated: float | None
    continued: float | None


@dataclass(frozen=True, slots=True)
class WeightMeasures:
    """Published versions; bytes are totals over them."""

    versions: int
    full_bytes: int
    wire_bytes: int
    density_by_step: list[float]
    digest_failures: int
    probe_failures: int


@dataclass(frozen=True, slots=True)
class FaultMeasures:
    """Faults of the storm that really happened."""

    forced_revocations: int
    mid_turn: int
    guest_kills: int


def fifths(records: Records) -> tuple[list[StepRow], list[StepRow]]:
    """Return the first and the last fifth of the steps."""
    steps = records.steps
    size = max(1, len(steps) // 5)
    return (steps[:size], steps[-size:]) if len(steps) >= 2 else ([], [])


def rewards_by_group(records: Records, steps: Iterable[StepRow]) -> list[list[float]]:
    """Rewards of delivered trajectories of these steps, one list for each group (one map)."""
    wanted = {(step.job, step.step) for step in steps}
    groups: dict[tuple[str, int | None, str | int], list[float]] = defaultdict(list)
    for one in records.trajectories:
        if (one.job, one.step) in wanted and one.delivered:
            groups[one.job, one.step, one.group].append(one.reward)
    return list(groups.values())


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _mean_reward(records: Records, steps: Iterable[StepRow]) -> float | None:
    return _mean([reward for group in rewards_by_group(records, steps) for reward in group])


def reward(records: Records) -> Reward:
    """Return the mean sampled reward by step and in the outer fifths."""
    first, last = fifths(records)
    return Reward(
        first_fifth=_mean_reward(records, first),
        last_fifth=_mean_reward(records, last),
        by_step=[_mean_reward(records, [step]) for step in records.steps],
    )


def held_out(records: Records) -> HeldOut:
    """Return the trainer's two evaluations, from its events."""
    found = {event.which: event for event in records.events_named(EVALUATION)}
    warm_start, final = found.get("warm_start"), found.get("final")
    return HeldOut(
        warm_start=warm_start.success if warm_start else None,
        final=final.success if final else None,
        n=min((event.n or 0 for event in (warm_start, final) if event), default=0),
    )


def crossings(records: Records) -> list[tuple[float, float]]:
    """(final, warm start) of each held-out map, 1.0 where it was crossed; empty without both."""
    found = {event.which: event.crossed or "" for event in records.events_named(EVALUATION)}
    before, after = found.get("warm_start", ""), found.get("final", "")
    if len(before) != len(after):
        return []
    return [(float(last), float(first)) for first, last in zip(before, after, strict=True)]


def _max_staleness(records: Records) -> int | None:
    """Most versions between the policy a step trained and the oldest token it trained on."""
    trained: dict[tuple[str, int | None], int] = {
        (step.job, step.step): step.version - 1 for step in records.steps
    }
    return max(
        (
            trained[one.job, one.step] - min(one.versions)
            for one in records.trajectories
            if (one.job, one.step) in trained and one.versions
        ),
        default=None,
    )


def trajectories(records: Records) -> Trajectories:
    """Count trajectories by records and turns; the trainer's own count may only add faults."""
    copies: Counter[tuple[str, str | int]] = Counter()
    for trajectory in records.trajectories:
        copies[trajectory.job, trajectory.trajectory] += trajectory.delivered
    # A trajectory of which only turns were recorded was started and never delivered.
    for turn in records.turns:
        copies[turn.job, turn.trajectory] += 0
    done = records.events_named(TRAINER_DONE)
    delivered = [t for t in records.trajectories if t.delivered]
    return Trajectories(
        started=max(len(copies), sum(event.started or 0 for event in done)),
        delivered=sum(count > 0 for count in copies.values()),
        lost=max(sum(n == 0 for n in copies.values()), sum(event.lost or 0 for event in done)),
        duplicated=max(
            sum(n > 1 for n in copies.values()), sum(event.duplicated or 0 for event in done)
        ),
        spanning_versions=sum(len(set(t.versions)) > 1 for t in delivered),
        revoked_mid_turn=sum(t.revoked_mid_turn for t in records.trajectories),
        max_staleness=_max_staleness(records),
    )


def _unstamped(turn: TurnRecord) -> int:
    """Tokens of a turn without a version span, or that the trainer counted as unstamped."""
    stamped = sum(end - start for _, start, end in turn.versions)
    return max(turn.unstamped, turn.output_tokens - stamped, 0)


def tokens(records: Records) -> Tokens:
    """Count tokens by kind of segment."""
    by_kind: Counter[str] = Counter()
    for turn in records.turns:
        for _, kind, start, end in turn.segments:
            by_kind[kind] += end - start
    unstamped = sum(map(_unstamped, records.turns))
    return Tokens(by_kind["dedicated"], by_kind["guest"], by_kind["continued"], unstamped)


def logprob_gap(records: Records) -> LogprobGap:
    """Return the mean absolute logprob difference of each kind of segment."""
    sums: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    counts: Counter[str] = Counter()
    for turn in records.turns:
        for kind, (total, count) in turn.gap.items():
            sums[kind] = sums.get(kind, 0.0) + total
            counts[kind] += count
    means = {kind: sums[kind] / counts[kind] if counts[kind] else None for kind in KINDS}
    return LogprobGap(means["guest"], means["dedicated"], means["continued"])


def weights(records: Records) -> WeightMeasures:
    """Count published versions and bytes, and every proof of a replica that failed."""
    rejected = len(records.events_named(CHUNK_REJECTED))
    return WeightMeasures(
        versions=len({(step.job, step.version) for step in records.steps}),
        full_bytes=sum(step.full_bytes for step in records.steps),
        wire_bytes=sum(step.wire_bytes for step in records.steps),
        density_by_step=[step.density for step in records.steps],
        digest_failures=rejected + sum(not a.digest_ok for a in records.activations),
        probe_failures=sum(a.digest_ok and not a.probe_ok for a in records.activations),
    )


def faults(records: Records) -> FaultMeasures:
    """Count forced revocations, and those that ended a turn that then went on elsewhere.

    A turn of n attempts was moved n - 1 times, so it vouches for at most n - 1 revocations.
    """
    left = {id(turn): turn.attempts - 1 for turn in records.turns}
    forced = records.events_named(FORCED_REVOCATION)
    mid_turn = 0
    for event in forced:
        moved = [
            turn
            for turn in records.turns
            if left[id(turn)] > 0
            and turn.start_s < event.t_s + REVOCATION_REACH_S
            and turn.end_s > event.t_s
        ]
        for turn in moved:
            left[id(turn)] -= 1
        mid_turn += bool(moved)
    kills = [event for event in records.events_named(GUEST_KILLED) if event.signal == SIGKILL]
    return FaultMeasures(len(forced), mid_turn, len(kills))


SECONDS_PER_HOUR = 3_600
# A guest with a small batch waits for demand, not for its host: a third of its seats.
LEAST_RUNNING = 16


@dataclass(frozen=True, slots=True)
class ByArm:
    """One rate in each arm; None where the arm has no blocks."""

    leased: float | None
    frozen: float | None
    ceiling: float | None


@dataclass(frozen=True, slots=True)
class HarvestMeasures:
    """`gain` is rollout throughput leased over frozen; `ceiling` is host load off over frozen.

    `busy` is the host's busy share in frozen blocks. `idle_efficiency` is the guest's throughput
    when leased, as a share of what it has alone (at the ceiling) in the host's idle time; both
    while it holds `LEAST_RUNNING` turns or more.
    """

    gain: Estimate | None
    ceiling: float | None
    busy: Estimate | None
    idle_efficiency: Estimate | None
    steps_gain: Estimate | None
    pairs: int
    tokens_per_s: ByArm
    steps_per_hour: ByArm


def block_pairs(records: Records) -> list[tuple[BlockRecord, BlockRecord]]:
    """(leased, frozen) blocks of each complete pair."""
    frozen = {block.pair: block for block in records.blocks_of("frozen")}
    return [(b, frozen[b.pair]) for b in records.blocks_of("leased") if b.pair in frozen]


def _rate(blocks: Sequence[BlockRecord], amounts: Sequence[int]) -> float | None:
    duration_s = sum(block.duration_s for block in blocks)
    return sum(amounts) / duration_s if duration_s > 0 else None


def _tokens_per_s(blocks: Sequence[BlockRecord]) -> float | None:
    return _rate(blocks, [block.tokens for block in blocks])


def _steps_per_hour(blocks: Sequence[BlockRecord]) -> float | None:
    rate = _rate(blocks, [block.steps for block in blocks])
    return None if rate is None else rate * SECONDS_PER_HOUR


def _busy(frozen: Sequence[BlockRecord], seed: int) -> Estimate | None:
    """Share of time in which the host was inside a step."""
    if not frozen:
        return None
    times = [(block.host_busy_s, block.duration_s) for block in frozen]
    return ratio_of_rates(times, [(1.0, 1.0)] * len(times), seed)


def _gain(pairs: Sequence[tuple[BlockRecord, BlockRecord]], of: str, seed: int) -> Estimate | None:
    if not pairs or any(getattr(frozen, of) <= 0 for _, frozen in pairs):
        return None
    return ratio_of_rates(
        [(getattr(leased, of), leased.duration_s) for leased, _ in pairs],
        [(getattr(frozen, of), frozen.duration_s) for _, frozen in pairs],
        seed,
    )


class _AtWork:
    """The guest's samples, and the time between them in which it holds enough turns."""

    def __init__(self, samples: Sequence[GuestSample]) -> None:
        self._t_s = np.array([sample.t_s for sample in samples])
        self._tokens = np.array([sample.tokens_total for sample in samples])
        self._running = np.array([sample.running for sample in samples])
        self._busy_s = np.array([sample.host_busy_ns / 1e9 for sample in samples])

    def spent(self, block: BlockRecord, like: BlockRecord | None = None) -> tuple[float, ...]:
        """(tokens, seconds, seconds that the host was busy at these times of the block `like`)."""
        inside = np.flatnonzero((self._t_s >= block.start_s) & (self._t_s <= block.end_s))
        first, last = inside[:-1], inside[1:]
        enough = np.minimum(self._running[first], self._running[last]) >= LEAST_RUNNING
        first, last = first[enough], last[enough]
        busy_s = 0.0
        if like is not None and len(first):
            shift_s = like.start_s - block.start_s
            ends_s = (self._busy_at(self._t_s[at] + shift_s) for at in (last, first))
            busy_s = float(next(ends_s) - next(ends_s))
        tokens = (self._tokens[last] - self._tokens[first]).sum()
        return float(tokens), float((self._t_s[last] - self._t_s[first]).sum()), busy_s

    def _busy_at(self, t_s: Floats) -> float:
        return float(np.interp(t_s, self._t_s, self._busy_s).sum())


def _idle_efficiency(
    records: Records, pairs: Sequence[tuple[BlockRecord, BlockRecord]], seed: int
) -> Estimate | None:
    """Guest tokens/s when leased over (guest tokens/s at the ceiling x the host's idle share).

    The idle share is the frozen block's, at the times of the leased one that count: a guest that
    makes its host busier gains nothing by it.
    """
    samples = _AtWork(records.guest)
    lent = [samples.spent(leased, frozen) for leased, frozen in pairs]
    alone = [samples.spent(block) for block in records.blocks_of("ceiling")]
    if not all(sum(seconds for _, seconds, _ in arm) > 0 for arm in (lent, alone)):
        return None

    def efficiency(sums: Sequence[Floats]) -> Floats:
        both, ceiling = sums
        idle_s = both[..., 1] - both[..., 2]
        result: Floats = (both[..., 0] / idle_s) / (ceiling[..., 0] / ceiling[..., 1])
        return result

    return estimate_of_sums([lent, alone], efficiency, seed)


def harvest(records: Records, seed: int) -> HarvestMeasures:
    """Return the gain over complete pairs, with its interval over pairs."""
    pairs = block_pairs(records)
    arms = {arm: records.blocks_of(arm) for arm in ("leased", "frozen", "ceiling")}
    tokens = {arm: _tokens_per_s(blocks) for arm, blocks in arms.items()}
    steps = {arm: _steps_per_hour(blocks) for arm, blocks in arms.items()}
    above, below = tokens["ceiling"], tokens["frozen"]
    return HarvestMeasures(
        gain=_gain(pairs, "tokens", seed),
        ceiling=above / below if above is not None and below else None,
        busy=_busy(arms["frozen"], seed),
        idle_efficiency=_idle_efficiency(records, pairs, seed),
        steps_gain=_gain(pairs, "steps", seed),
        pairs=len(pairs),
        tokens_per_s=ByArm(**tokens),
        steps_per_hour=ByArm(**steps),
    )


# Requests near the end of a block may be served in the next one, under another arm.
EDGE_S = 0.5
# Arrivals this close together share bursts and batches, so they are resampled together.
WINDOW_S = 2.0

PERCENTS = (50, 95)


@dataclass(frozen=True, slots=True)
class HostArm:
    """Latencies of one arm over the compared arrivals; failed requests count as infinitely late."""

    ttft_p50_s: float | None
    ttft_p95_s: float | None
    tpot_p50_s: float | None
    tpot_p95_s: float | None
    requests: int
    failed: int


@dataclass(frozen=True, slots=True)
class HostImpact:
    """Both arms, every arrival of the run, and leased over frozen for each (metric, percent)."""

    frozen: HostArm
    leased: HostArm
    all: HostArm
    ratios: dict[tuple[str, int], Estimate]
    samples: dict[str, int]


def _comparable(pair: Pair) -> bool:
    """Return True if the same instrument measured both, or one was not served."""
    served = pair.arm.status == pair.alone.status == "ok"
    return not served or pair.arm.source == pair.alone.source


def paired_requests(records: Records, joined: Sequence[Request]) -> list[Window]:
    """(leased, frozen) requests of the common prefix, one list for each window of each pair."""
    index = RequestIndex(joined)
    found = []
    for leased, frozen in block_pairs(records):
        prefix_s = min(leased.duration_s, frozen.duration_s) - EDGE_S
        for window in index.windows(leased, frozen, WINDOW_S):
            found.append([p for p in window if p.arm.offset_s <= prefix_s and _comparable(p)])
    return [window for window in found if window]


def _known(requests: Sequence[Request], metric: str) -> list[float]:
    found = (latency_s(request, metric) for request in requests)
    return [latency_s for latency_s in found if latency_s is not None]


def _arm(requests: Sequence[Request], windows: dict[str, Sequence[Sequence[float]]]) -> HostArm:
    def value(metric: str, percent: int) -> float | None:
        values = [latency for window in windows[metric] for latency in window]
        return percentile(values, percent) if values else None

    return HostArm(
        ttft_p50_s=value("ttft", 50),
        ttft_p95_s=value("ttft", 95),
        tpot_p50_s=value("tpot", 50),
        tpot_p95_s=value("tpot", 95),
        requests=len(requests),
        failed=sum(request.status != "ok" for request in requests),
    )


def host_impact(records: Records, seed: int) -> HostImpact:
    """Compare the arms over all arrivals that both of them saw."""
    joined = join_requests(records.client_requests, records.host_latency)
    pairs = paired_requests(records, joined)
    windows = {
        metric: [w for w in (paired_window(window, metric) for window in pairs) if w.above]
        for metric in METRICS
    }
    ratios = {
        (metric, percent): ratio_of_percentiles(found, percent, seed)
        for metric, found in windows.items()
        for percent in PERCENTS
        if found
    }
    return HostImpact(
        frozen=_arm(
            [pair.alone for window in pairs for pair in window],
            {metric: [w.below for w in found] for metric, found in windows.items()},
        ),
        leased=_arm(
            [pair.arm for window in pairs for pair in window],
            {metric: [w.above for w in found] for metric, found in windows.items()},
        ),
        all=_arm(joined, {metric: [_known(joined, metric)] for metric in METRICS}),
        ratios=ratios,
        samples={metric: sum(len(w.above) for w in found) for metric, found in windows.items()},
    )
