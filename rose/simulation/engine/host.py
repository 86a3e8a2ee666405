"""Stand-in for a production host: an engine that serves users, publishes its load and lends KV.

Production's `DeadlineTracker` keeps its deadlines, and `LendingCore` decides how much it lends; the
model carries both out. A granule is the host's again as soon as the guest has returned its memory;
until then it is missing from the host's KV memory, and the host does not wait for it.

The page has production's records, without shared memory: host and guest write and read the same
ones at the same moments. Torn sections and dead writers are tested elsewhere, and do not happen
here.
"""

from collections.abc import Callable
from itertools import count

from executor.control_page.page import SETTLE_NS, HostView
from executor.control_page.seqlock_records import Grant, HostState, SeatState
from executor.host.state_publisher import DeadlineTracker
from executor.kv.lending import KvFree, LendingCore, LendingLimits
from executor.kv.shrink_plan import Granules
from rose.simulation.clock import NS, EventQueue
from rose.simulation.engine.batching import ModelledEngine, Sequence
from rose.simulation.engine.card import HOST, ModelledCard
from rose.simulation.engine_specs import EngineFigures, StepWork
from rose.simulation.results import LatencyBook
from rose.simulation.workloads.traffic import UserRequest
from slo import SloSpec

UNIT_TOKENS = 128
# Granules of the host's KV memory, about as many as on a large card.
GRANULES = 512
_LOOK_S = 0.05
_BEAT_NS = NS // 4


class ModelledPage:
    """Control page of a host, without shared memory: its state, seat and guest's grant."""

    def __init__(self, now_ns: int) -> None:
        self.host = HostState(heartbeat_ns=now_ns)
        self.grant: Grant | None = None
        self._taken_ns = now_ns - 2 * SETTLE_NS
        self._view: HostView | None = None
        self._beat_ns = -1

    def publish(self, state: HostState) -> None:
        """Replace the host's section by a new state."""
        self.host = state
        self._view = None

    def view(self, now_ns: int) -> HostView:
        """Return the host's state and seat as a reader sees them; the seat beats four times a
        second.
        """
        beat_ns = now_ns - now_ns % _BEAT_NS
        if self._view is None or beat_ns != self._beat_ns:
            self._beat_ns = beat_ns
            seat = SeatState(taken_ns=self._taken_ns, beat_ns=max(self._taken_ns, beat_ns))
            self._view = HostView(self.host, seat, seated=True, vetoed=False, replaced=False)
        return self._view


class _ServedRequest:
    """User's request at a host, and the owner of its sequence."""

    __slots__ = ("arrival_ns", "first_ns", "host", "sequence")

    def __init__(self, host: "ModelledHost", request: UserRequest, id_: str) -> None:
        self.host = host
        self.arrival_ns = host.queue.now_ns
        self.first_ns = 0
        self.sequence = Sequence(id_, request.prompt_tokens, request.output_tokens, self)

    def first_token(self, now_ns: int) -> None:
        self.first_ns = now_ns

    def finished(self, now_ns: int) -> None:
        self.host.finished(self, now_ns)

    def aborted(self, reason: str) -> None:
        """Do nothing: a host's requests are never aborted."""


class ModelledHost(ModelledEngine):
    """Model of a serving engine with number `index` in its pool, which serves users and may lend KV
    memory.
    """

    def __init__(
        self,
        index: int,
        spec: EngineFigures,
        slo: SloSpec,
        queue: EventQueue,
        card: ModelledCard,
        users: LatencyBook,
        lending: LendingLimits | None,
    ) -> None:
        """Create the host. lending: None for a host without a guest, which publishes no page."""
        alone = lending is None
        super().__init__(f"host-{index}", spec, queue, card, HOST, UNIT_TOKENS, leaps=alone)
        self.index = index
        self.page = ModelledPage(queue.now_ns)
        self.on_publish: Callable[[], None] | None = None
        # Bytes of this host's memory that its guest has pages on now.
        self.borrowed_bytes: Callable[[], int] = int
        self.granule_units = max(1, self.kv.units // GRANULES)
        self.granule_bytes = self.granule_units * UNIT_TOKENS * spec.kv_bytes_per_token
        self.lent = 0
        self._units = self.kv.units
        self._granules = Granules(self._units, self.granule_units)
        self._lender = LendingCore(self._granules, lending) if lending is not None else None
        self._wanted = 0
        self._users = users
        self._deadlines = DeadlineTracker(slo.ttft_ns, slo.tpot_ns)
        # Tokens of each request in the running step, updated and not made anew for each step.
        self._scheduled: dict[str, int] = {}
        self._chunks: list[tuple[Sequence, int]] = []
        self._requests: dict[str, _ServedRequest] = {}
        self._gone: list[str] = []
        self._ids = count()
        self._told_idle = True
        if self._lender is not None:
            queue.every_s(_LOOK_S, self._look)

    def serve(self, request: UserRequest) -> None:
        """Take in a user's request that arrives now."""
        mine = _ServedRequest(self, request, f"r{next(self._ids)}")
        if self._lender is None:
            self.submit(mine.sequence)
            return
        self._requests[mine.sequence.id] = mine
        self._deadlines.arrived(mine.sequence.id, self.queue.now_ns, mine.sequence.prompt_tokens)
        self._lend(idle=False)
        self.submit(mine.sequence)
        if self._told_idle:
            self._publish()

    def finished(self, request: _ServedRequest, now_ns: int) -> None:
        """Record the latencies of a request that has its last token."""
        sequence = request.sequence
        if self._requests.pop(sequence.id, None) is not None:
            self._gone.append(sequence.id)
        made = sequence.output_tokens
        decode_ns = now_ns - request.first_ns
        self._users.served(
            now_ns / NS,
            (request.first_ns - request.arrival_ns) / NS,
            decode_ns / NS / (made - 1) if made > 1 else 0.0,
        )

    # ---- steps ----

    def begun(self, work: StepWork) -> None:
        """Record the prompts in the step, and publish the page."""
        if self._lender is None:
            return
        assert self._step is not None
        self._chunks = self._step.chunks
        self._scheduled.update((each.id, chunk) for each, chunk in self._chunks)
        self._deadlines.begun([each.id for each, _ in self._chunks])
        self._publish()

    def ended(self, work: StepWork, took_ns: int) -> None:
        """Update deadlines, lend or take back KV memory, and publish if idle."""
        if self._lender is None:
            return
        self._deadlines.stepped(self.queue.now_ns, self._scheduled, self._has_token)
        for each, _ in self._chunks:
            if each not in self.decoding:
                self._scheduled.pop(each.id, None)
        if self._gone:
            for id_ in self._gone:
                self._scheduled.pop(id_, None)
            self._deadlines.finished(self._gone)
            self._gone.clear()
        self._lend(idle=self.idle)
        if self.idle:
            self._publish()

    def preempt(self, sequence: Sequence, *, counts: bool = True) -> None:
        """Preempt a sequence as the engine does, and remove it from the step's requests."""
        super().preempt(sequence, counts=counts)
        self._scheduled.pop(sequence.id, None)

    def _has_token(self, id_: str) -> bool:
        request = self._requests.get(id_)
        return request is None or request.sequence.base_made > 0

    def _publish(self) -> None:
        now_ns = self.queue.now_ns
        deadlines, kv = self._deadlines, self.kv
        self._told_idle = self.idle
        self.page.publish(
            HostState(
                self.steps,
                self._step is not None,
                len(self.prefilling) + len(self.decoding),
                len(self.waiting),
                deadlines.queued_prefill_tokens,
                deadlines.earliest_prefill_ns,
                deadlines.earliest_decode_ns,
                kv.used,
                self._units,
                self.card.busy_ns[HOST],
                self.last_step_ns,
                now_ns,
                self._granules.count,
                self.lent,
                self.lent * self.granule_bytes,
                self._missing(),
            )
        )
        if self.on_publish is not None:
            self.on_publish()

    # ---- lending ----

    def lent_bytes(self) -> int:
        """Return the bytes of KV memory that are lent now, on which a guest may have pages."""
        return self.lent * self.granule_bytes

    def _free(self) -> KvFree:
        return KvFree(max(0, self.kv.plain), self.kv.cached, self.lent)

    def _missing(self) -> int:
        if self._lender is None:
            return 0
        return max(self._lender.missing(self._free()), self._wanted)

    def _look(self) -> None:
        """Change what an idle host lends, between its steps, and publish if that changed."""
        if self.idle or self._wanted:
            before = self.lent, self._wanted
            self._lend(idle=self.idle)
            if (self.lent, self._wanted) != before:
                self._publish()

    def _lend(self, *, idle: bool) -> None:
        core = self._lender
        if core is None:
            return
        now_ns, kv = self.queue.now_ns, self.kv
        queued = sum(kv.need(each.context) for each in self.waiting)
        demand = 0 if idle else queued + self.running
        free = self._free()
        lends = core.step(now_ns, free, demand, idle=idle)
        if lends > 0:
            self._wanted = 0
            self._set_lent(self.lent + min(lends, max(0, kv.plain) // self.granule_units))
        elif lends < 0:
            self._wanted = -lends
        if core.wants(now_ns, free, demand, idle=idle) and idle:
            kv.forget_cold(4 * self.granule_units)
        if self._wanted:
            out = -(-self.borrowed_bytes() // self.granule_bytes)
            back = min(self._wanted, max(0, self.lent - out))
            self._wanted -= back
            self._set_lent(self.lent - back)

    def _set_lent(self, lent: int) -> None:
        self.lent = lent
        self.kv.resize(self._units - lent * self.granule_units)
