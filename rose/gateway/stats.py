"""Statistics of one gateway for `/rose/v1/stats` and `/metrics`, with the latency of leases.

A lease's latency runs from the grant to the replica's first token:

    leased -- catches up -- usable -- no turn is sent there -- first attempt -- first token
      |------ counts ---------|             does not             |------ counts ------|

Attempts that are refused until the node has opened the replica count, with the short rests between.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rose.contract.gateway import GatewayCounters
from rose.gateway.event_loop import LoopLag
from rose.gateway.replicas.table import ReplicaEntry

# Longest gap between two attempts that counts as the replica's; a longer one is the router's
# choice.
GAP_S = 1.0


@dataclass(frozen=True, slots=True)
class LeaseLatency:
    """Measured latency of one lease: `took_s` seconds from its grant to the replica's first token,
    idle time left out.
    """

    replica: str
    epoch: int
    took_s: float


@dataclass(slots=True)
class _Opening:
    epoch: int
    leased_s: float
    usable_s: float | None = None
    tried_s: float | None = None
    live: int = 0
    ended_s: float = 0.0


class LeaseLatencyClock:
    """Meter of lease latencies: it holds the leases whose first token is awaited, and measurements
    to report. Times are monotonic seconds.
    """

    def __init__(self) -> None:
        # The lease of each row of the last table, 0 without one.
        self._epochs: dict[str, int] = {}
        self._openings: dict[str, _Opening] = {}
        self._measured: dict[str, LeaseLatency] = {}

    @property
    def awaiting(self) -> bool:
        """True if the first token of any lease is still awaited."""
        return bool(self._openings)

    @property
    def measured(self) -> list[LeaseLatency]:
        """Newest lease latency of each replica, until `told` says that the scheduler has received
        it.
        """
        return list(self._measured.values())

    def told(self, replica: str, epoch: int) -> None:
        """Forget the measurement of this replica and lease: the scheduler has received it."""
        known = self._measured.get(replica)
        if known is not None and known.epoch == epoch:
            del self._measured[replica]

    def set_table(self, entries: Iterable[ReplicaEntry], now_s: float) -> None:
        """Start to time the leases that are new in this table; leases of the first table after an
        empty one are skipped, since their age is unknown.
        """
        blind, before = not self._epochs, self._openings
        epochs: dict[str, int] = {}
        self._openings = {}
        for entry in entries:
            epoch = epochs[entry.id] = entry.lease_epoch if entry.leased else 0
            opening = before.get(entry.id)
            if opening is None or opening.epoch != epoch:
                if blind or not epoch or self._epochs.get(entry.id, 0) == epoch:
                    continue
                opening = _Opening(epoch, now_s)
            self._openings[entry.id] = opening
            if entry.healthy and opening.usable_s is None:
                opening.usable_s = now_s
        self._epochs = epochs

    def tried(self, replica: str, now_s: float) -> None:
        """Record that a turn was sent to the replica; the first under a new lease ends its idle
        time.
        """
        opening = self._openings.get(replica)
        if opening is None:
            return
        if opening.tried_s is None:
            opening.tried_s = now_s
        elif not opening.live and now_s > opening.ended_s + GAP_S:
            opening.tried_s += now_s - opening.ended_s
        opening.live += 1

    def ended(self, replica: str, epoch: int, now_s: float) -> None:
        """Record that an attempt on the replica under the lease `epoch` ended, for the idle time
        between attempts.
        """
        opening = self._openings.get(replica)
        if opening is not None and opening.epoch == epoch:
            opening.live -= 1
            opening.ended_s = now_s

    def token(self, replica: str, epoch: int, now_s: float) -> None:
        """Record a token under the lease `epoch`; the first completes its measurement."""
        opening = self._openings.get(replica)
        if opening is None or opening.epoch != epoch or opening.tried_s is None:
            return
        del self._openings[replica]
        ready_s = opening.leased_s if opening.usable_s is None else opening.usable_s
        took_s = ready_s - opening.leased_s + now_s - opening.tried_s
        self._measured[replica] = LeaseLatency(replica, epoch, took_s)


@dataclass(slots=True)
class GatewayStats:
    """Counters of a gateway since its start.

    tokens: journaled tokens by replica. ends: attempts by how they ended. turns: delivered turns.
    repeated: requests answered by an earlier turn. hedges: second copies of turns; hedge_wins:
    those that answered first. batch_requests: requests of batches by what came of them.
    """

    tokens: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    batch_requests: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    failed: int = 0
    continuations: int = 0
    attempts: int = 0
    repeated: int = 0
    slow_readers: int = 0
    hedges: int = 0
    hedge_wins: int = 0
    loop_lag: LoopLag = field(default_factory=LoopLag)


@dataclass(frozen=True, slots=True)
class GatewayHealth:
    """Health of the gateway's process: current troubles in words, log records lost, restarts by
    background task.

    certificate: Unix times at which its own certificate begins and ends, None without one.
    """

    troubles: Sequence[str] = ()
    log_dropped: int = 0
    restarted: Mapping[str, int] = field(default_factory=dict)
    certificate: tuple[float, float] | None = None

    @property
    def status(self) -> str:
        """ "ok", or "degraded" if there is any trouble: turns are still served, and an operator
        should look.
        """
        return "degraded" if self.troubles else "ok"


@dataclass(frozen=True, slots=True)
class GatewayStatus:
    """State of a gateway at one moment, for an embedding program or a test.

    usable: replicas that get turns. live_turns: running attempts by replica. running: turns that
    are not over. waiting: turns without a replica. sessions_known: sessions that routers remember.
    hedged_groups: groups that may still get second copies.
    """

    usable: int
    live_turns: Mapping[str, int]
    running: int
    waiting: int
    sessions_known: int
    hedged_groups: int


COUNTERS: Final = (
    ("turns", "rose_gateway_turns_total", "Turns that were delivered whole."),
    ("failed", "rose_gateway_failed_turns_total", "Turns that ended with an error."),
    ("continuations", "rose_gateway_continuations_total", "Turns that went on at another replica."),
    ("attempts", "rose_gateway_attempts_total", "Times that a turn was sent to a replica."),
    (
        "repeated",
        "rose_gateway_repeated_requests_total",
        "Requests that were answered from an earlier answer.",
    ),
    (
        "slow_readers",
        "rose_gateway_slow_readers_total",
        "Streams that were ended because nobody read them.",
    ),
    ("hedges", "rose_gateway_hedges_total", "Second copies of turns."),
    ("hedge_wins", "rose_gateway_hedge_wins_total", "Second copies that answered first."),
)
"""Counters of `GatewayStats` that are numbers, with their metrics and what those say."""


def snapshot(stats: GatewayStats, live: dict[str, int], waiting: int) -> GatewayCounters:
    """Return the counters as `/rose/v1/stats` shows them. `live`: running turns by replica."""
    return GatewayCounters(
        tokens=dict(stats.tokens),
        live_turns=live,
        waiting=waiting,
        loop_lag_max_s=stats.loop_lag.max_s,
        loop_busy_max_s=stats.loop_lag.busy_max_s,
        **{name: getattr(stats, name) for name, *_ in COUNTERS},
    )


def exposition(
    stats: GatewayStats, live: dict[str, int], waiting: int, health: GatewayHealth
) -> str:
    """Return the text of `/metrics` in Prometheus' format. `live`: running turns by replica.

    A replica without a row and a turn loses its series: in a changing fleet they would only grow.
    """
    tokens = {replica: count for replica, count in stats.tokens.items() if replica in live}
    lines = [
        *_family(
            "rose_gateway_tokens_total",
            "Tokens that came from a replica and are in the journal.",
            _by("replica", tokens),
        ),
        *_family(
            "rose_gateway_attempt_ends_total",
            "Attempts of turns, by how they ended.",
            _by("end", stats.ends),
        ),
        *_family(
            "rose_gateway_batch_requests_total",
            "Requests of batches that were answered, failed, or have to be sent again.",
            _by("result", stats.batch_requests),
        ),
        *_family(
            "rose_gateway_live_turns", "Turns that run at a replica now.", _by("replica", live)
        ),
    ]
    for name, metric, text in COUNTERS:
        lines += _family(metric, text, {"": getattr(stats, name)})
    lines += [
        *_family("rose_gateway_waiting_turns", "Turns that have no replica yet.", {"": waiting}),
        *stats.loop_lag.exposition(),
        *_family(
            "rose_gateway_log_dropped_total",
            "Records that found no room in a log's queue, and are lost.",
            {"": health.log_dropped},
        ),
        *_family(
            "rose_gateway_task_restarts_total",
            "Background tasks that died and were started again.",
            _by("task", health.restarted),
        ),
    ]
    if health.certificate is not None:
        for (name, text), at_s in zip(CERTIFICATE, health.certificate, strict=True):
            lines += _family(name, text, {"": at_s})
    return "\n".join(lines) + "\n"


CERTIFICATE: Final = (
    ("rose_certificate_not_before_timestamp_seconds", "When the process's own certificate begins."),
    ("rose_certificate_not_after_timestamp_seconds", "When the process's own certificate is over."),
)


def _by(label: str, values: Mapping[str, int]) -> dict[str, int]:
    return {f'{{{label}="{_escaped(name)}"}}': count for name, count in values.items()}


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _family(name: str, text: str, values: Mapping[str, float]) -> list[str]:
    return [
        f"# HELP {name} {text}",
        f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}",
        *(f"{name}{label} {value}" for label, value in values.items()),
    ]
