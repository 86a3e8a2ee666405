"""Figures of the training side: reward, trajectories, tokens, logprob gap, weights, faults.

Each function is pure: records in, one frozen figure out. A figure that the records cannot give is
None, never a guess.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rose.demo.records import (
    CHUNK_REJECTED,
    EVALUATION,
    FORCED_REVOCATION,
    GUEST_KILLED,
    TRAINER_DONE,
    Records,
    Turn,
)

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
class Weights:
    """Published versions; bytes are totals over them."""

    versions: int
    full_bytes: int
    wire_bytes: int
    density_by_step: list[float]
    digest_failures: int
    probe_failures: int


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults of the storm that really happened."""

    forced_revocations: int
    mid_turn: int
    guest_kills: int


def fifths(records: Records) -> tuple[list[int], list[int]]:
    """Numbers of the first and of the last fifth of the steps."""
    steps = [step.step for step in records.steps]
    size = max(1, len(steps) // 5)
    return (steps[:size], steps[-size:]) if len(steps) >= 2 else ([], [])


def rewards_by_group(records: Records, steps: Iterable[int]) -> list[list[float]]:
    """Rewards of delivered trajectories of these steps, one list for each group (one map)."""
    wanted = set(steps)
    groups: dict[tuple[int | None, str | int], list[float]] = defaultdict(list)
    for trajectory in records.trajectories:
        if trajectory.step in wanted and trajectory.delivered:
            groups[trajectory.step, trajectory.group].append(trajectory.reward)
    return list(groups.values())


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _mean_reward(records: Records, steps: Iterable[int]) -> float | None:
    return _mean([reward for group in rewards_by_group(records, steps) for reward in group])


def reward(records: Records) -> Reward:
    """Mean sampled reward by step and in the outer fifths."""
    first, last = fifths(records)
    return Reward(
        first_fifth=_mean_reward(records, first),
        last_fifth=_mean_reward(records, last),
        by_step=[_mean_reward(records, [step.step]) for step in records.steps],
    )


def held_out(records: Records) -> HeldOut:
    """The trainer's two evaluations, from its events."""
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
    trained = {step.step: step.version - 1 for step in records.steps}
    return max(
        (
            trained[trajectory.step] - min(trajectory.versions)
            for trajectory in records.trajectories
            if trajectory.step in trained and trajectory.versions
        ),
        default=None,
    )


def trajectories(records: Records) -> Trajectories:
    """Counts from trajectory and turn records; the trainer's own count may only make it worse."""
    copies: Counter[str | int] = Counter()
    for trajectory in records.trajectories:
        copies[trajectory.trajectory] += trajectory.delivered
    # A trajectory of which only turns were recorded was started and never delivered.
    for turn in records.turns:
        copies[turn.trajectory] += 0
    done = records.events_named(TRAINER_DONE)
    delivered = [t for t in records.trajectories if t.delivered]
    return Trajectories(
        started=max([len(copies), *(event.started or 0 for event in done)]),
        delivered=sum(count > 0 for count in copies.values()),
        lost=max([sum(n == 0 for n in copies.values()), *(event.lost or 0 for event in done)]),
        duplicated=max(
            [sum(n > 1 for n in copies.values()), *(event.duplicated or 0 for event in done)]
        ),
        spanning_versions=sum(len(set(t.versions)) > 1 for t in delivered),
        revoked_mid_turn=sum(t.revoked_mid_turn for t in records.trajectories),
        max_staleness=_max_staleness(records),
    )


def _unstamped(turn: Turn) -> int:
    """Tokens of a turn without a version span, or that the trainer counted as unstamped."""
    stamped = sum(end - start for _, start, end in turn.versions)
    return max(turn.unstamped, turn.output_tokens - stamped, 0)


def tokens(records: Records) -> Tokens:
    """Tokens by kind of segment."""
    by_kind: Counter[str] = Counter()
    for turn in records.turns:
        for _, kind, start, end in turn.segments:
            by_kind[kind] += end - start
    unstamped = sum(map(_unstamped, records.turns))
    return Tokens(by_kind["dedicated"], by_kind["guest"], by_kind["continued"], unstamped)


def logprob_gap(records: Records) -> LogprobGap:
    """Mean absolute logprob difference of each kind of segment."""
    sums: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    counts: Counter[str] = Counter()
    for turn in records.turns:
        for kind, (total, count) in turn.gap.items():
            sums[kind] = sums.get(kind, 0.0) + total
            counts[kind] += count
    means = {kind: sums[kind] / counts[kind] if counts[kind] else None for kind in KINDS}
    return LogprobGap(means["guest"], means["dedicated"], means["continued"])


def weights(records: Records) -> Weights:
    """What was published, and every proof of a replica that failed."""
    rejected = len(records.events_named(CHUNK_REJECTED))
    return Weights(
        versions=len({step.version for step in records.steps}),
        full_bytes=sum(step.full_bytes for step in records.steps),
        wire_bytes=sum(step.wire_bytes for step in records.steps),
        density_by_step=[step.density for step in records.steps],
        digest_failures=rejected + sum(not a.digest_ok for a in records.activations),
        probe_failures=sum(a.digest_ok and not a.probe_ok for a in records.activations),
    )


def faults(records: Records) -> Faults:
    """Forced revocations, and how many of them ended a turn that then went on elsewhere.

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
    return Faults(len(forced), mid_turn, len(kills))
