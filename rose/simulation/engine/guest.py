"""Stand-in for a guest: an engine that asks the gate before each step, with a balloon for its KV.

`decide` is production's, and so are the cap in force, the plan of a shrink and the step model that
is corrected by each step. The real engine asks the gate every half millisecond; the model asks
again `wake_s` seconds after its host published, and at once when its guard grants.
"""

from collections.abc import Callable

from executor.control_page.seqlock_records import Grant, GuestState
from executor.kv.shrink_plan import (
    NO_CAP,
    Granules,
    GranuleUse,
    Rollout,
    cap_in_force,
    granules_over,
    plan_shrink,
)
from executor.step_decision import GateLimits, Run, decide
from rose.simulation.clock import EventQueue
from rose.simulation.engine.batching import ModelledEngine
from rose.simulation.engine.card import GUEST, ModelledCard
from rose.simulation.engine.host import ModelledPage
from rose.simulation.engine_specs import StepWork
from rose.simulation.scenario import GuestSpec
from slo import StepModel

_UNITS = 4


class ModelledGuest(ModelledEngine):
    """Model of a guest's engine beside the host that writes the page `page`."""

    def __init__(
        self,
        name: str,
        spec: GuestSpec,
        page: ModelledPage,
        queue: EventQueue,
        card: ModelledCard,
        limits: GateLimits,
    ) -> None:
        unit_tokens = max(1, spec.granule_tokens // _UNITS)
        engine = spec.engine
        granules = max(2, engine.kv_tokens // (unit_tokens * _UNITS))
        super().__init__(
            name, engine, queue, card, GUEST, unit_tokens, granules * unit_tokens * _UNITS
        )
        self.page = page
        self.granules = Granules(granules * _UNITS, _UNITS)
        self.granule_bytes = unit_tokens * _UNITS * engine.kv_bytes_per_token
        self.base_bytes = spec.kv_base_tokens * engine.kv_bytes_per_token
        self.held = max(0, granules - max(1, self.base_bytes // self.granule_bytes))
        self.kv.resize(self.mapped * _UNITS)
        self.limits = limits
        self.model = StepModel(engine.profile)
        self.policy_version = 0
        self.refusals: dict[str, int] = {}
        self.shrinks = 0
        # Bytes of its host's memory that are lent now.
        self.lent_bytes: Callable[[], int] = int
        self._cap = NO_CAP
        self._wake_s = spec.wake_s
        self._asks = False

    @property
    def mapped(self) -> int:
        """Number of the guest's KV granules that have memory now."""
        return self.granules.count - self.held

    def borrowed_bytes(self) -> int:
        """Return the bytes of KV memory beyond the guest's own, which are lent by its host."""
        return max(0, self.mapped * self.granule_bytes - self.base_bytes)

    def state(self) -> GuestState:
        """Return the guest's section of the control page, as the real engine would write it."""
        return GuestState(
            step_seq=self.steps,
            in_step=self.in_step,
            last_step_ns=self.last_step_ns,
            tokens_total=self.tokens_made,
            running=self.running,
            waiting=len(self.waiting),
            kv_used=self.kv.used,
            bytes_mapped=self.mapped * self.granule_bytes,
            policy_version=self.policy_version,
            heartbeat_ns=self.queue.now_ns,
            granules_total=self.granules.count,
            granules_mapped=self.mapped,
            granule_bytes=self.granule_bytes,
        )

    def heard(self) -> None:
        """Schedule a question to the gate `wake_s` seconds after the host published its page, if
        the guest waits to begin a step.
        """
        if self._asks or self.in_step or not (self.waiting or self.prefilling or self.decoding):
            return
        if not self._wake_s:
            self.wake()
            return
        self._asks = True
        self.queue.after_s(self._wake_s, self._ask)

    def _ask(self) -> None:
        self._asks = False
        self.wake()

    def granted(self, grant: Grant) -> None:
        """Fit KV memory to a new grant, and begin a step if it allows one; during a step nothing is
        done.
        """
        if not self.in_step:
            self._fit(grant)
            self.wake()

    def allowed(self) -> tuple[int, int] | None:
        """Return the tokens and sequences that the gate allows a step now; None if it refuses, or
        memory does not fit the grant.
        """
        grant, now_ns = self.page.grant, self.queue.now_ns
        if grant is None:
            return None
        verdict = decide(
            self.page.view(now_ns), grant, self.model, now_ns, self.limits, self.decode_context
        )
        if not isinstance(verdict, Run):
            self.refusals[verdict.reason] = self.refusals.get(verdict.reason, 0) + 1
            return None
        if not self._fit(grant):
            return None
        tokens = min(verdict.token_budget, self.spec.max_step_tokens)
        return tokens, min(verdict.max_sequences, self.spec.max_sequences)

    def ended(self, work: StepWork, took_ns: int) -> None:
        """Correct the step model by the time that a step took."""
        self.model = self.model.observed(
            work.tokens, work.sequences, took_ns / 1e9, work.context_tokens
        )

    def give_back(self, granules: int) -> None:
        """Free up to so many granules now, all but one at most, for a reclaim; during a step
        nothing is done.
        """
        if granules > 0 and not self.in_step:
            self._shrink(min(granules, self.mapped - 1))

    def _fit(self, grant: Grant) -> bool:
        """Shrink or grow KV memory to the grant's cap; return True if it is within the cap."""
        now_ns = self.queue.now_ns
        self._cap = cap_in_force(grant, now_ns, self.limits, self._cap)
        over = granules_over(self._cap, self.granules, self.held)
        if over > 0:
            self._shrink(over)
        elif over < 0 and self.held:
            # The grant may be older than the host's last reclaim.
            free_bytes = self.base_bytes + self.lent_bytes()
            room = free_bytes // self.granule_bytes - self.mapped
            grown = min(-over, self.held, room)
            if grown > 0:
                self.held -= grown
                self.kv.resize(self.mapped * _UNITS)
        if self.held and self.waiting:
            self._hand_back()
        return granules_over(self._cap, self.granules, self.held) <= 0

    def _shrink(self, count: int) -> None:
        self.shrinks += 1
        rollouts: list[Rollout] = []
        if max(0, self.kv.plain) // _UNITS >= count:
            # With blocks packed the last granules are free, and a plan takes only free ones.
            uses = [GranuleUse(self.mapped - 1 - at, 0, 0) for at in range(count)]
        else:
            rollouts, uses = self._packed()
        plan = plan_shrink(count, self.granules, uses, lambda: rollouts)
        doomed = frozenset(plan.preempt)
        for sequence in [each for each in [*self.decoding, *self.prefilling] if each.id in doomed]:
            self.preempt(sequence)
        self.held += len(plan.granules)
        if not self.kv.resize(self.mapped * _UNITS):
            # Shared prefixes are in no plan: preempt sequences until their units are free.
            while self.running and self.kv.plain < 0:
                self.preempt(next(reversed(self.prefilling or self.decoding)))

    def _packed(self) -> tuple[list[Rollout], list[GranuleUse]]:
        """Return each sequence's blocks and each granule's use, as if all blocks were packed from
        the first granule on.
        """
        rollouts: list[Rollout] = []
        at = 0
        for sequence in [*self.decoding, *self.prefilling]:
            blocks = range(at, at + sequence.units)
            at += sequence.units
            tokens = sequence.context - sequence.prefill_left
            rollouts.append(Rollout(sequence.id, tokens, blocks))
        used_end = at + max(0, self.kv.used - at)
        cached_end = used_end + self.kv.cached
        uses = []
        for granule in range(self.mapped):
            first = granule * _UNITS
            used = min(_UNITS, max(0, used_end - first))
            cached = min(_UNITS - used, max(0, cached_end - max(first, used_end)))
            uses.append(GranuleUse(granule, used, cached))
        return rollouts, uses

    def _hand_back(self) -> None:
        """Abort waiting sequences that would not fit even alone, with reason "revoked": they
        continue elsewhere.
        """
        most = self.kv.units * self.kv.unit_tokens
        doomed = [each for each in self.waiting if each.context + 1 > most]
        for sequence in doomed:
            self.abort(sequence)
        for sequence in doomed:
            sequence.owner.aborted("revoked")
