"""Measures of a run: training, harvest, host impact and sharing, computed from the raw records.

Harvest: throughput that the borrowed capacity gave, leased against frozen blocks, and its ceiling.
Host impact: latencies of the same replayed arrivals, leased against frozen. Sharing: the time of
several jobs' leases of a guest, in blocks in which it was lent and every job wanted it.

Each function is pure: records in, figures out, by the names that `report.json` has them under. A
figure that the records cannot give is None, never a guess.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from bench.common.stats import METRICS, Pair, RequestIndex, Window, latency_s, paired_window
from bench.demo.report.records import (
    CHUNK_REJECTED,
    ENGINE_SWITCHED,
    EVALUATION,
    FIRST_TOKEN,
    FORCED_REVOCATION,
    GUEST_KILLED,
    LEASE_ENDS,
    LEASE_GRANTED,
    TRAINER_DONE,
    BlockRecord,
    Records,
    StepRow,
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

Figures = dict[str, Any]
BlockPair = tuple[BlockRecord, BlockRecord]
KINDS = ("guest", "dedicated", "continued")
# A revocation takes this long to travel from its order to the streams it ends.
REVOCATION_REACH_S = 0.5
SIGKILL = 9
SECONDS_PER_HOUR = 3_600
# A guest with a small batch waits for demand, not for its host: a third of its seats.
LEAST_RUNNING = 16
# Requests near the end of a block may be served in the next one, under another arm.
EDGE_S = 0.5
# Arrivals this close together share bursts and batches, so they are resampled together.
WINDOW_S = 2.0
PERCENTS = (50, 95)
BORROWED, ANOTHER_JOB = "guest", "job"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# ---- training ----


def fifths(records: Records) -> tuple[list[StepRow], list[StepRow]]:
    """Return the first and the last fifth of the steps."""
    steps = records.steps
    size = max(1, len(steps) // 5)
    return (steps[:size], steps[-size:]) if len(steps) >= 2 else ([], [])


def rewards_by_group(records: Records, steps: Iterable[StepRow]) -> list[list[float]]:
    """Return rewards of delivered trajectories of these steps, a list for each group (one map)."""
    wanted = {(step.job, step.step) for step in steps}
    groups: dict[tuple[str, int | None, str | int], list[float]] = defaultdict(list)
    for one in records.trajectories:
        if (one.job, one.step) in wanted and one.delivered:
            groups[one.job, one.step, one.group].append(one.reward)
    return list(groups.values())


def reward(records: Records) -> Figures:
    """Return the mean sampled reward in the outer fifths and by step, in the order of the steps."""

    def mean(steps: Iterable[StepRow]) -> float | None:
        return _mean([one for group in rewards_by_group(records, steps) for one in group])

    first, last = fifths(records)
    by_step = [mean([step]) for step in records.steps]
    return {"first_fifth": mean(first), "last_fifth": mean(last), "by_step": by_step}


def held_out(records: Records) -> Figures:
    """Return the share of held-out maps solved greedily, before and after, and their number."""
    found = {event.which: event for event in records.events_named(EVALUATION)}
    both = {which: found.get(which) for which in ("warm_start", "final")}
    figures: Figures = {which: event.success if event else None for which, event in both.items()}
    return figures | {"n": min((event.n or 0 for event in both.values() if event), default=0)}


def crossings(records: Records) -> list[tuple[float, float]]:
    """Return (final, warm start) of each held-out map, 1.0 where it was crossed.

    The list is empty without both evaluations.
    """
    found = {event.which: event.crossed or "" for event in records.events_named(EVALUATION)}
    before, after = found.get("warm_start", ""), found.get("final", "")
    if len(before) != len(after):
        return []
    return [(float(last), float(first)) for first, last in zip(before, after, strict=True)]


def trajectories(records: Records) -> Figures:
    """Count trajectories by records and turns; the trainer's own count may only add faults.

    spanning_versions: delivered ones with tokens of two versions. max_staleness: most versions
    between the policy that a step trained and the oldest token it trained on.
    """
    copies: Counter[tuple[str, str | int]] = Counter()
    for trajectory in records.trajectories:
        copies[trajectory.job, trajectory.trajectory] += trajectory.delivered
    # A trajectory of which only turns were recorded was started and never delivered.
    for turn in records.turns:
        copies[turn.job, turn.trajectory] += 0
    done = records.events_named(TRAINER_DONE)
    trained = {(step.job, step.step): step.version - 1 for step in records.steps}
    stale = [
        trained[one.job, one.step] - min(one.versions)  # type: ignore[index]
        for one in records.trajectories
        if (one.job, one.step) in trained and one.versions
    ]

    def counted(copies_are: Callable[[int], bool], name: str) -> int:
        told = sum(getattr(event, name) or 0 for event in done)
        return max(sum(map(copies_are, copies.values())), told)

    return {
        "started": counted(lambda count: True, "started"),
        "delivered": sum(count > 0 for count in copies.values()),
        "lost": counted(lambda count: count == 0, "lost"),
        "duplicated": counted(lambda count: count > 1, "duplicated"),
        "spanning_versions": sum(
            len(set(one.versions)) > 1 for one in records.trajectories if one.delivered
        ),
        "revoked_mid_turn": sum(one.revoked_mid_turn for one in records.trajectories),
        "max_staleness": max(stale, default=None),
    }


def tokens(records: Records) -> Figures:
    """Count sampled tokens by kind of segment; `unstamped` lack a version or a logprob."""
    by_kind: Counter[str] = Counter()
    unstamped = 0
    for turn in records.turns:
        for _, kind, start, end in turn.segments:
            by_kind[kind] += end - start
        stamped = sum(end - start for _, start, end in turn.versions)
        unstamped += max(turn.unstamped, turn.output_tokens - stamped, 0)
    kinds = {kind: by_kind[kind] for kind in ("dedicated", "guest", "continued")}
    return {**kinds, "unstamped": unstamped}


def logprob_gap(records: Records) -> Figures:
    """Return mean |engine logprob - trainer logprob| under the same version, nats a token."""
    sums: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for turn in records.turns:
        for kind, (total, count) in turn.gap.items():
            sums[kind] += total
            counts[kind] += count
    return {kind: sums[kind] / counts[kind] if counts[kind] else None for kind in KINDS}


def weights(records: Records) -> Figures:
    """Count published versions and bytes, and every proof of a replica that failed."""
    rejected = len(records.events_named(CHUNK_REJECTED))
    return {
        "versions": len({(step.job, step.version) for step in records.steps}),
        "full_bytes": sum(step.full_bytes for step in records.steps),
        "wire_bytes": sum(step.wire_bytes for step in records.steps),
        "density_by_step": [step.density for step in records.steps],
        "digest_failures": rejected + sum(not a.digest_ok for a in records.activations),
        "probe_failures": sum(a.digest_ok and not a.probe_ok for a in records.activations),
    }


def faults(records: Records) -> Figures:
    """Count forced revocations, those that ended a turn that went on elsewhere, and kills.

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
    kills = sum(event.signal == SIGKILL for event in records.events_named(GUEST_KILLED))
    return {"forced_revocations": len(forced), "mid_turn": mid_turn, "guest_kills": kills}


# ---- harvest ----


def block_pairs(records: Records) -> list[BlockPair]:
    """Return (leased, frozen) blocks of each complete pair."""
    frozen = {block.pair: block for block in records.blocks_of("frozen")}
    return [(b, frozen[b.pair]) for b in records.blocks_of("leased") if b.pair in frozen]


def harvest(records: Records, seed: int) -> Figures:
    """Return the gain over complete pairs, with its interval over pairs.

    `gain` is rollout throughput leased over frozen; `ceiling` is host load off over frozen. `busy`
    is the host's busy share in frozen blocks. `idle_efficiency` is the guest's throughput when
    leased, as a share of what it has alone (at the ceiling) in the host's idle time; both while it
    holds `LEAST_RUNNING` turns or more.
    """
    pairs = block_pairs(records)
    arms = {arm: records.blocks_of(arm) for arm in ("leased", "frozen", "ceiling")}
    tokens_per_s = {arm: _rate(blocks, "tokens") for arm, blocks in arms.items()}
    steps_per_hour = {
        arm: None if (rate := _rate(blocks, "steps")) is None else rate * SECONDS_PER_HOUR
        for arm, blocks in arms.items()
    }
    above, below = tokens_per_s["ceiling"], tokens_per_s["frozen"]
    busy = [(block.host_busy_s, block.duration_s) for block in arms["frozen"]]
    return {
        "gain": _gain(pairs, "tokens", seed),
        "ceiling": above / below if above is not None and below else None,
        "busy": ratio_of_rates(busy, [(1.0, 1.0)] * len(busy), seed) if busy else None,
        "idle_efficiency": _idle_efficiency(records, pairs, seed),
        "steps_gain": _gain(pairs, "steps", seed),
        "pairs": len(pairs),
        "tokens_per_s": tokens_per_s,
        "steps_per_hour": steps_per_hour,
    }


def _rate(blocks: Sequence[BlockRecord], what: str) -> float | None:
    duration_s = sum(block.duration_s for block in blocks)
    return sum(getattr(block, what) for block in blocks) / duration_s if duration_s > 0 else None


def _gain(pairs: Sequence[BlockPair], what: str, seed: int) -> Estimate | None:
    if not pairs or any(getattr(frozen, what) <= 0 for _, frozen in pairs):
        return None
    arms = zip(*pairs, strict=True)
    leased, frozen = ([(getattr(b, what), b.duration_s) for b in arm] for arm in arms)
    return ratio_of_rates(leased, frozen, seed)


class _AtWork:
    """The guest's samples, and the time between them in which it holds enough turns."""

    def __init__(self, samples: Sequence[GuestSample]) -> None:
        self._t_s = np.array([sample.t_s for sample in samples])
        self._tokens = np.array([sample.tokens_total for sample in samples])
        self._running = np.array([sample.running for sample in samples])
        self._busy_s = np.array([sample.host_busy_ns / 1e9 for sample in samples])

    def spent(self, block: BlockRecord, like: BlockRecord | None = None) -> tuple[float, ...]:
        """Return tokens, seconds, and seconds of a busy host at these times of the block `like`."""
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


def _idle_efficiency(records: Records, pairs: Sequence[BlockPair], seed: int) -> Estimate | None:
    """Return guest tokens/s leased over (its tokens/s at the ceiling x the host's idle share).

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


# ---- host impact ----


@dataclass(frozen=True, slots=True)
class HostImpact:
    """Latencies of both arms and of every arrival; leased over frozen by (metric, percent).

    arms: `frozen`, `leased` and `all`, as the report has them. samples: arrivals by metric.
    """

    arms: Figures
    ratios: dict[tuple[str, int], Estimate]
    samples: dict[str, int]


def _comparable(pair: Pair) -> bool:
    """Return True if the same instrument measured both, or one was not served."""
    served = pair.arm.status == pair.alone.status == "ok"
    return not served or pair.arm.source == pair.alone.source


def paired_requests(records: Records, joined: Sequence[Request]) -> list[Window]:
    """Return (leased, frozen) requests of the common prefix, a list for each window of a pair."""
    index = RequestIndex(joined)
    found = []
    for leased, frozen in block_pairs(records):
        prefix_s = min(leased.duration_s, frozen.duration_s) - EDGE_S
        for window in index.windows(leased, frozen, WINDOW_S):
            found.append([p for p in window if p.arm.offset_s <= prefix_s and _comparable(p)])
    return [window for window in found if window]


def _host_arm(requests: Sequence[Request], latencies: dict[str, list[float]]) -> Figures:
    """Return percentiles of one arm; failed requests count as infinitely late."""
    found: Figures = {
        f"{metric}_p{percent}_s": percentile(values, percent) if values else None
        for metric, values in latencies.items()
        for percent in PERCENTS
    }
    failed = sum(request.status != "ok" for request in requests)
    return found | {"requests": len(requests), "failed": failed}


def host_impact(records: Records, seed: int) -> HostImpact:
    """Compare the arms over all arrivals that both of them saw."""
    joined = join_requests(records.client_requests, records.host_latency)
    pairs = paired_requests(records, joined)
    windows = {
        metric: [w for w in (paired_window(window, metric) for window in pairs) if w.above]
        for metric in METRICS
    }
    both = [pair for window in pairs for pair in window]
    every = {
        metric: [value for r in joined if (value := latency_s(r, metric)) is not None]
        for metric in METRICS
    }
    return HostImpact(
        {
            "frozen": _host_arm(
                [pair.alone for pair in both],
                {m: [s for w in found for s in w.below] for m, found in windows.items()},
            ),
            "leased": _host_arm(
                [pair.arm for pair in both],
                {m: [s for w in found for s in w.above] for m, found in windows.items()},
            ),
            "all": _host_arm(joined, every),
        },
        {
            (metric, percent): ratio_of_percentiles(found, percent, seed)
            for metric, found in windows.items()
            for percent in PERCENTS
            if found
        },
        {metric: sum(len(w.above) for w in found) for metric, found in windows.items()},
    )


# ---- sharing ----


@dataclass(frozen=True, slots=True)
class GuestLease:
    """A job's lease of a guest; monotonic seconds."""

    job: str
    replica: str
    start_s: float
    end_s: float


def guest_leases(records: Records) -> list[GuestLease]:
    """Return leases of borrowed engines within the blocks in which they were lent, in order."""
    ends = {
        (event.replica, event.epoch): event.t_s
        for name in LEASE_ENDS
        for event in records.events_named(name)
    }
    found = []
    for granted in records.events_named(LEASE_GRANTED):
        if granted.kind != BORROWED:
            continue
        key = granted.replica, granted.epoch
        for start_s, end_s in _lent_spans(records):
            begin_s, over_s = max(start_s, granted.t_s), min(end_s, ends.get(key, end_s))
            if begin_s < over_s:
                lease = GuestLease(granted.job or "", granted.replica or "", begin_s, over_s)
                found.append(lease)
    return found


def job_measures(records: Records) -> list[Figures]:
    """Return every job's own figures; empty where there is one job.

    guest_s: time of its leases; share: its part of all jobs' such time.
    """
    had_s = dict.fromkeys(records.jobs, 0.0)
    for lease in guest_leases(records):
        if lease.job in had_s:
            had_s[lease.job] += lease.end_s - lease.start_s
    whole_s = sum(had_s.values())
    own_measures = (reward, trajectories, tokens, logprob_gap, weights)
    return [
        {
            "job": job,
            "guest_s": seconds,
            "share": seconds / whole_s if whole_s else None,
            "steps": len(own.steps),
            **{each.__name__: each(own) for each in own_measures},
        }
        for job, seconds in had_s.items()
        for own in [records.of_job(job)]
    ]


def sharing(records: Records) -> Figures | None:
    """Return the changes of the guest's job; None where there is one job.

    leased_share: part of the blocks' time in which somebody had a lease. engine_starts: new engines
    that a change took. change_s: mean time from a lease of another job's guest to its first token.
    """
    if not records.jobs:
        return None
    leases = guest_leases(records)
    seconds = sum(end_s - start_s for start_s, end_s in _lent_spans(records))
    replicas = {lease.replica for lease in leases}
    leased_s = sum(lease.end_s - lease.start_s for lease in leases)
    took_s = [
        event.took_s
        for event in records.events_named(FIRST_TOKEN)
        if event.switch == ANOTHER_JOB and event.took_s is not None
    ]
    return {
        "seconds": seconds,
        "leased_share": leased_s / (seconds * len(replicas)) if seconds and replicas else None,
        "changes": sum(
            first.job != then.job
            for replica in replicas
            for first, then in pairwise(lease for lease in leases if lease.replica == replica)
        ),
        "engine_starts": len(records.events_named(ENGINE_SWITCHED)),
        "change_s": _mean(took_s),
    }


def _lent_spans(records: Records) -> Iterator[tuple[float, float]]:
    return ((block.start_s, block.end_s) for block in records.blocks_of("leased"))
