"""Usage by the owner of the node and the job: lent time, compute, KV memory and tokens.

    telemetry of a node ──► its guests that are leased, each since it was heard last ──► sums
    sums ──► /metrics, and each minute what came on top ──► usage.jsonl ──► `rose usage`

The time between two reports counts if the guest was leased to the same job in both. Time in which a
guest changed jobs, or in which its node sent no report, counts for no job.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from rose.clock import utc_text

# Label of a node's owner; without it the deployment of its hosts counts.
OWNER_LABEL: Final = "rose.dev/owner"
DEPLOYMENT_LABEL: Final = "rose.dev/deployment"
# A node that was silent for longer lends nothing meanwhile.
MOST_STEP_S: Final = 10.0
# Bounds on a node's reported figures in one step.
MOST_BYTES: Final = 1 << 50
MOST_TOKENS: Final = 1 << 24
MOST_RANKS: Final = 64
MOST_PAIRS: Final = 512
OTHERS: Final = "(others)"
# A job's sums are shown for so long after its last guest.
KEPT_S: Final = 900.0


@dataclass(frozen=True, slots=True)
class Lent:
    """Sums of lent capacity. seconds: leased time; compute_s: that time times the guest's duty and
    its ranks, which are its GPUs if it has any.

    byte_s: KV memory times leased time, in byte seconds. tokens: generated tokens.
    """

    seconds: float = 0.0
    compute_s: float = 0.0
    byte_s: float = 0.0
    tokens: int = 0

    def plus(self, other: "Lent") -> "Lent":
        """Return the sum of these amounts and `other`'s."""
        return Lent(
            self.seconds + other.seconds,
            self.compute_s + other.compute_s,
            self.byte_s + other.byte_s,
            self.tokens + other.tokens,
        )

    def minus(self, earlier: "Lent") -> "Lent":
        """Return these amounts less those of an earlier sum."""
        return self.plus(
            Lent(-earlier.seconds, -earlier.compute_s, -earlier.byte_s, -earlier.tokens)
        )


Pair = tuple[str, str]
"""Owner and job."""


@dataclass(frozen=True, slots=True)
class GuestReading:
    """A guest's state in one telemetry report. job: the job that leases it, "" without a lease.

    duty: share of time in which the guest may compute. tokens_total: tokens since the engine began.
    ranks: number of its ranks.
    """

    replica: str
    job: str
    duty: float
    kv_bytes: int
    tokens_total: int
    ranks: int = 1


def owner_of(labels: Mapping[str, str]) -> str:
    """Return a node's owner: its label `rose.dev/owner`, else its deployment label, else ""."""
    return labels.get(OWNER_LABEL) or labels.get(DEPLOYMENT_LABEL, "")


class UsageBook:
    """Lent time, compute, KV memory and tokens by (owner, job), since this scheduler began to lead.

    Times are monotonic seconds passed in.
    """

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, tuple[float, GuestReading]]] = {}
        self._sums: dict[Pair, Lent] = {}
        self._added_s: dict[Pair, float] = {}

    def heard(self, node: str, owner: str, guests: Iterable[GuestReading], now_s: float) -> None:
        """Add a node's usage since its last report, for guests leased to the same job in both."""
        before, self._seen[node] = self._seen.get(node, {}), {}
        for guest in guests:
            self._seen[node][guest.replica] = now_s, guest
            earlier = before.get(guest.replica)
            if earlier is not None and guest.job and earlier[1].job == guest.job:
                self._add(
                    (owner, guest.job), _between(earlier[1], guest, now_s - earlier[0]), now_s
                )

    def forget(self, node: str) -> None:
        """Forget a node's last report, so that the time until its next one does not count."""
        self._seen.pop(node, None)

    def sums(self, now_s: float) -> dict[Pair, Lent]:
        """Return the sums by (owner, job), and delete those without usage for 15 minutes."""
        for pair in [p for p, added_s in self._added_s.items() if now_s > added_s + KEPT_S]:
            del self._sums[pair], self._added_s[pair]
        return dict(self._sums)

    def _add(self, pair: Pair, lent: Lent, now_s: float) -> None:
        if pair not in self._sums and len(self._sums) >= MOST_PAIRS:
            pair = OTHERS, OTHERS
        self._sums[pair] = self._sums.get(pair, Lent()).plus(lent)
        self._added_s[pair] = now_s


def _between(before: GuestReading, now: GuestReading, took_s: float) -> Lent:
    if not 0 < took_s <= MOST_STEP_S:
        return Lent()
    # An engine that was started again counts from 0.
    made = now.tokens_total - before.tokens_total
    tokens = now.tokens_total if made < 0 else made
    return Lent(
        took_s,
        took_s * min(1.0, now.duty) * max(1, min(MOST_RANKS, now.ranks)),
        took_s * min(MOST_BYTES, now.kv_bytes),
        min(MOST_TOKENS, tokens),
    )


class UsageLog:
    """Writer of usage records: the increase since the last call, one for each owner and job."""

    def __init__(self, write: Callable[[Mapping[str, object]], None]) -> None:
        self._write = write
        self._before: dict[Pair, Lent] = {}

    def take(self, sums: Mapping[Pair, Lent], wall_s: float) -> None:
        """Write a record for each pair whose sum grew. wall_s: Unix seconds, the record's time."""
        for (owner, job), lent in sums.items():
            more = lent.minus(self._before.get((owner, job), Lent()))
            if more.seconds > 0:
                self._write(
                    {
                        "time": utc_text(wall_s),
                        "t": wall_s,
                        "owner": owner,
                        "job": job,
                        "seconds": round(more.seconds, 3),
                        "compute_s": round(more.compute_s, 3),
                        "byte_s": round(more.byte_s),
                        "tokens": more.tokens,
                    }
                )
        self._before = dict(sums)
