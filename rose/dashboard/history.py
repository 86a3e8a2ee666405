"""History of the last minutes: hosts' latency beside guests' duty, on one time axis.

    observation, ──► a sample of the fleet and of each node ──► rings of ten minutes
      every 2 s  ──► changes of guests' modes, with reasons ──► the newest of each node
                 ──► requests and misses, with and without a guest ──► minutes of six hours

Bounded by the nodes that may attach: 7 kB each. The history begins anew with each term;
Prometheus keeps figures for longer.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from elastic_scheduler.capacity import NodeVerdict
from rose.advise import DeploymentUsage, UsageStep
from rose.scheduler.core.observed import NodeSeen, Observed
from slo.error_budget import burnt

SAMPLE_S: Final = 2.0
SAMPLES: Final = 300
CHANGES_KEPT: Final = 40
MINUTE_S: Final = 60.0
MINUTES: Final = 361
DEPLOYMENT_LABEL: Final = "rose.dev/deployment"
# Objective without a policy's own.
OBJECTIVE: Final = 0.99
FROZEN: Final = frozenset({"freeze", "drain", "kill"})

NODE_LINES: Final = ("ttft_s", "tpot_s", "busy", "duty", "kv_bytes", "tok_s")
FLEET_LINES: Final = ("kv_bytes", "tok_s", "late", "lending")
Points = list[float | None]
# Least number of requests for a meaningful percentile.
FEWEST_REQUESTS: Final = 20


class Ring:
    """Ring of the newest samples of a few lines of a chart; NaN for unknown values."""

    def __init__(self, lines: int, samples: int = SAMPLES) -> None:
        self._values: NDArray[np.float32] = np.full((lines, samples), np.nan, np.float32)

    def put(self, index: int, values: Sequence[float | None]) -> None:
        """Set the sample at a place of the ring, a value for each line; None is unknown."""
        self._values[:, index] = [np.nan if value is None else value for value in values]

    def read(self, order: NDArray[np.intp]) -> list[Points]:
        """Return each line's values at these places, in order; None is unknown."""
        chosen = self._values[:, order]
        return [
            [None if np.isnan(value) else float(f"{value:.4g}") for value in line]
            for line in chosen
        ]


@dataclass(frozen=True, slots=True)
class ModeChange:
    """Change of a guest's mode from `before` to `after`. at_s: Unix seconds."""

    at_s: float
    replica: str
    before: str
    after: str
    reason: str

    @property
    def is_stop(self) -> bool:
        """True if the change stopped the guest from running."""
        return self.after in FROZEN and self.before not in FROZEN


@dataclass(slots=True)
class _Node:
    ring: Ring
    counted: tuple[int, ...] | None = None
    tokens: dict[str, int] = field(default_factory=dict)
    modes: dict[str, str] = field(default_factory=dict)
    changes: deque[ModeChange] = field(default_factory=lambda: deque(maxlen=CHANGES_KEPT))
    tok_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Number of requests in a window that met their latency targets, and that missed one."""

    good: int = 0
    bad: int = 0

    @property
    def missed(self) -> float | None:
        """Share of requests that missed a target; None without requests."""
        return self.bad / (self.good + self.bad) if self.good + self.bad else None


class RequestLedger:
    """Counts of one deployment's requests by minute, apart for hosts with and without a leased
    guest, and its usage.
    """

    def __init__(self) -> None:
        self.objective = OBJECTIVE
        # minute -> good and bad with a guest, good and bad without
        self._minutes: deque[list[int]] = deque(maxlen=MINUTES)
        # The same minutes: engines' seconds, their idle ones, prompt and output tokens.
        self._use: deque[tuple[float, ...]] = deque(maxlen=MINUTES)

    def add(
        self, minute: int, good: int, bad: int, *, lends: bool, use: Sequence[float] = (0, 0, 0, 0)
    ) -> None:
        """Add requests to this minute: good ones met their targets, bad ones missed one.

        lends: the host has a leased guest. use: engines' seconds, those without requests, and the
        requests' prompt and output tokens.
        """
        if not self._minutes or self._minutes[-1][0] != minute:
            self._minutes.append([minute, 0, 0, 0, 0])
            self._use.append((0, 0, 0, 0))
        at = 1 if lends else 3
        self._minutes[-1][at] += good
        self._minutes[-1][at + 1] += bad
        self._use[-1] = tuple(map(sum, zip(self._use[-1], use, strict=True)))

    def usage(self, name: str) -> DeploymentUsage | None:
        """Return the deployment's usage in whole minutes; None before the first."""
        steps = [
            UsageStep(
                minute * MINUTE_S,
                engine_s / MINUTE_S,
                idle_s / engine_s,
                *(each / MINUTE_S for each in (sum(requests), *tokens)),
            )
            for (minute, *requests), (engine_s, idle_s, *tokens) in zip(
                self._minutes, self._use, strict=True
            )
            if engine_s
        ][1:-1]
        span_s = steps[-1].at_s - steps[0].at_s + MINUTE_S if steps else 0.0
        return DeploymentUsage(name, "", MINUTE_S, span_s, tuple(steps)) if steps else None

    def spent(self, minute: int, minutes: int) -> tuple[RequestCounts, RequestCounts]:
        """Return counts of the last `minutes` until `minute`: with a leased guest, and without."""
        counts = (counts for at, *counts in self._minutes if at > minute - minutes)
        good, bad, alone_good, alone_bad = map(sum, zip((0,) * 4, *counts, strict=True))
        return RequestCounts(good, bad), RequestCounts(alone_good, alone_bad)

    def burn(self, minute: int, minutes: int) -> float | None:
        """Return the SLO burn rate of the last `minutes` until `minute`; None without requests."""
        lent, alone = self.spent(minute, minutes)
        good, bad = lent.good + alone.good, lent.bad + alone.bad
        return burnt(good, bad, self.objective) if good + bad else None


class History:
    """Samples of the last ten minutes, of the fleet and of each node, for charts.

    Use it in one thread at a time; times are passed in.
    """

    def __init__(self) -> None:
        self._times: NDArray[np.float64] = np.full(SAMPLES, np.nan)
        self._fleet = Ring(len(FLEET_LINES))
        self._nodes: dict[str, _Node] = {}
        self.ledgers: dict[str, RequestLedger] = {}
        self._taken = 0
        self._last_s: float | None = None
        self._wall_s = 0.0

    def take(self, seen: Observed, now_s: float, wall_s: float) -> bool:
        """Add a sample of the fleet if 2 s have passed since the last one; return True if added."""
        if self._last_s is not None and now_s < self._last_s + SAMPLE_S - 0.1:
            return False
        step_s = None if self._last_s is None else now_s - self._last_s
        self._last_s, self._wall_s = now_s, wall_s
        index = self._taken % SAMPLES
        self._taken += 1
        self._times[index] = wall_s
        leased = {each.lease.replica for each in seen.leases}
        rows = [self._take_node(node, index, step_s, leased) for node in seen.nodes]
        known = [row for row in rows if row is not None]
        self._fleet.put(
            index,
            (
                known_sum(row[0] for row in known),
                known_sum(row[1] for row in known),
                float(sum(row[2] for row in known)),
                float(sum(row[3] for row in known)),
            ),
        )
        self._forget(seen)
        return True

    @property
    def minute(self) -> int:
        """Minute of the newest sample, since the Unix epoch."""
        return int(self._wall_s // MINUTE_S)

    def usages(self) -> list[DeploymentUsage]:
        """Return the usage of each deployment that has one, by name."""
        found = (ledger.usage(name or "(none)") for name, ledger in sorted(self.ledgers.items()))
        return [usage for usage in found if usage is not None]

    def fleet(self) -> tuple[Points, list[Points]]:
        """Return the sample times and the fleet's lines (`FLEET_LINES`), oldest first."""
        order = self._order()
        return self._at(order), self._fleet.read(order)

    def node(self, name: str) -> tuple[Points, list[Points]]:
        """Return the sample times and a node's lines (`NODE_LINES`); all None if unknown."""
        order = self._order()
        known = self._nodes.get(name)
        if known is None:
            return self._at(order), [[None] * len(order) for _ in NODE_LINES]
        return self._at(order), known.ring.read(order)

    def changes(self, name: str) -> tuple[ModeChange, ...]:
        """Return the latest changes of modes of a node's guests, newest first; () if unknown."""
        known = self._nodes.get(name)
        return tuple(reversed(known.changes)) if known else ()

    def tok_s(self, name: str) -> float | None:
        """Return the tokens per second of the node's guests at the newest sample; or None."""
        known = self._nodes.get(name)
        return known.tok_s if known else None

    def fleet_tok_s(self) -> float | None:
        """Return the tokens per second of all nodes' guests, None if unknown."""
        return known_sum(node.tok_s for node in self._nodes.values())

    # ---- a sample ----

    def _take_node(
        self, node: NodeSeen, index: int, step_s: float | None, leased: set[str]
    ) -> tuple[float | None, float | None, bool, bool] | None:
        known = self._nodes.get(node.node)
        if known is None:
            known = self._nodes[node.node] = _Node(Ring(len(NODE_LINES)))
        host = node.telemetry.host if node.telemetry.HasField("host") else None
        guests = [each for each in node.telemetry.guests if each.replica in leased]
        known.tok_s = self._tokens(known, node, step_s)
        self._modes(known, node)
        if host is not None:
            self._requests(known, node, step_s or 0.0, lends=bool(guests))
        kv_bytes = float(sum(each.kv_bytes for each in guests)) if guests else 0.0
        duty = sum(each.duty for each in guests) / len(guests) if guests else None
        latencies = (host.ttft_p95_s, host.tpot_p95_s) if host and host.window_requests else ()
        known.ring.put(
            index, (*(latencies or (None, None)), node.busy, duty, kv_bytes, known.tok_s)
        )
        return kv_bytes, known.tok_s, is_late(node), bool(guests)

    def _tokens(self, known: _Node, node: NodeSeen, step_s: float | None) -> float | None:
        before = known.tokens
        known.tokens = {each.replica: each.tokens_total for each in node.telemetry.guests}
        both = before.keys() & known.tokens.keys()
        if not step_s or not both:
            return None
        # An engine that was started again counts from 0.
        made = (
            known.tokens[each] - (before[each] if known.tokens[each] >= before[each] else 0)
            for each in both
        )
        return sum(made) / step_s

    def _modes(self, known: _Node, node: NodeSeen) -> None:
        for each in node.telemetry.guests:
            before = known.modes.get(each.replica)
            if before is not None and before != each.mode:
                known.changes.append(
                    ModeChange(self._wall_s, each.replica, before, each.mode, each.reason)
                )
        known.modes = {each.replica: each.mode for each in node.telemetry.guests}

    def _requests(self, known: _Node, node: NodeSeen, step_s: float, *, lends: bool) -> None:
        host = node.telemetry.host
        counts = host.slo_good, host.slo_bad, host.prompt_tokens, host.output_tokens
        before, known.counted = known.counted, counts
        ledger = self._ledger(node.labels, node.verdict)
        if before is None:
            return
        since = [now - then for now, then in zip(counts, before, strict=True)]
        if min(since) < 0:  # of a daemon that was started anew
            since = list(counts)
        good, bad, *tokens = since
        hosts = node.telemetry.hosts or [host]
        idle = sum(not each.running for each in hosts)
        use = step_s * len(hosts), step_s * idle, *tokens
        ledger.add(self.minute, good, bad, lends=lends, use=use)

    def _ledger(self, labels: Mapping[str, str], verdict: NodeVerdict) -> RequestLedger:
        name = labels.get(DEPLOYMENT_LABEL, "")
        ledger = self.ledgers.setdefault(name, RequestLedger())
        budget = verdict.policy.slo_budget
        ledger.objective = budget.objective if budget is not None else OBJECTIVE
        return ledger

    def _forget(self, seen: Observed) -> None:
        there = {node.node for node in seen.nodes}
        away = {each.node for each in seen.away}
        for name in [n for n in self._nodes if n not in there]:
            if name in away:
                self._nodes[name].tok_s = None
                self._nodes[name].ring.put((self._taken - 1) % SAMPLES, (None,) * len(NODE_LINES))
            else:
                del self._nodes[name]
        named = {node.labels.get(DEPLOYMENT_LABEL, "") for node in seen.nodes}
        for name in [n for n in self.ledgers if n not in named]:
            del self.ledgers[name]

    # ---- reading ----

    def _order(self) -> NDArray[np.intp]:
        kept = min(self._taken, SAMPLES)
        return (np.arange(self._taken - kept, self._taken) % SAMPLES).astype(np.intp)

    def _at(self, order: NDArray[np.intp]) -> Points:
        return [round(float(at_s), 1) for at_s in self._times[order]]


def is_late(node: NodeSeen) -> bool:
    """Return True if the p95 latency of a node's host misses its target, by 20 requests or more."""
    if not node.telemetry.HasField("host"):
        return False
    host = node.telemetry.host
    if host.window_requests < FEWEST_REQUESTS:
        return False
    pairs = (host.ttft_p95_s, host.ttft_target_s), (host.tpot_p95_s, host.tpot_target_s)
    return any(0 < target_s < said_s for said_s, target_s in pairs)


def known_sum(values: Iterable[float | None]) -> float | None:
    """Return the sum of the known values; None if all are None."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
