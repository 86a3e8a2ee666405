"""Advice in figures: the capacity that a node would lend by its policies, now and since it
attached.

    verdict, KV memory of guests, busy share of the host ──> bytes, share of compute ──> sums

Memory is the KV memory of its guests, at most `maxHarvest.memory`; compute the share of time in
which its host is idle, at most `maxHarvest.compute`. Both are 0 while the verdict does not lend. A
busy host's slack (`slackShare`) is unknown: it would come on top. A figure that a node does not
report is None, and adds nothing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from elastic_scheduler.capacity.effective import EffectivePolicy
from elastic_scheduler.leases.lease_table import HarvestMode


@dataclass(frozen=True, slots=True)
class Lendable:
    """Capacity that a node lends, or would: bytes of KV memory, and share of each second."""

    memory_bytes: int | None = None
    compute: float | None = None


NOTHING = Lendable(0, 0.0)


def lendable(
    would: HarvestMode, policy: EffectivePolicy, guest_bytes: int | None, busy: float | None
) -> Lendable:
    """Return a verdict's figures; `guest_bytes`: the guests' KV memory, `busy`: of its host."""
    if would is not HarvestMode.ACTIVE:
        return NOTHING
    memory, compute = guest_bytes, None if busy is None else max(0.0, 1.0 - busy)
    if memory is not None and policy.memory_bytes is not None:
        memory = min(memory, policy.memory_bytes)
    if compute is not None and policy.compute is not None:
        compute = min(compute, policy.compute)
    return Lendable(memory, compute)


@dataclass(slots=True)
class Advice:
    """Figures of one node: now, and their sums over `over_s` seconds of judgements."""

    now: Lendable = field(default_factory=Lendable)
    over_s: float = 0.0
    byte_s: float = 0.0
    compute_s: float = 0.0


# Longer gaps between a scheduler's judgements were a pause, and count for nothing.
MOST_STEP_S = 10.0


class AdviceBook:
    """Advice of all nodes. No clock: `now_s` is passed with each judgement."""

    def __init__(self) -> None:
        self._guest_bytes: dict[str, int] = {}
        self._of: dict[str, Advice] = {}
        self._judged_s: float | None = None

    def heard(self, node: str, guest_bytes: int) -> None:
        """Record the KV memory of a node's guests when all of it is lent."""
        self._guest_bytes[node] = guest_bytes

    def forget(self, node: str) -> None:
        """Forget a lost node."""
        self._guest_bytes.pop(node, None)
        self._of.pop(node, None)

    def judged(
        self,
        verdicts: Iterable[tuple[str, HarvestMode, EffectivePolicy]],
        busy: Callable[[str], float | None],
        now_s: float,
    ) -> None:
        """Add the state since the last judgement; from now on the new verdicts hold."""
        since_s = now_s - self._judged_s if self._judged_s is not None else 0.0
        step_s = min(max(0.0, since_s), MOST_STEP_S)
        self._judged_s = now_s
        for node, would, policy in verdicts:
            advice = self._of.get(node)
            if advice is None:
                advice = self._of[node] = Advice()
            else:
                advice.over_s += step_s
                advice.byte_s += step_s * (advice.now.memory_bytes or 0)
                advice.compute_s += step_s * (advice.now.compute or 0.0)
            advice.now = lendable(would, policy, self._guest_bytes.get(node), busy(node))

    def of(self, node: str) -> Advice:
        """Return a node's figures; empty ones before its first judgement."""
        return self._of.get(node) or Advice()
