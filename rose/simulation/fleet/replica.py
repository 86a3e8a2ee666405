"""Stand-in for one replica of a node: its lease state machine, its engine and its weights.

The state machine is production's (`rose.node.lease`); admitting, draining and updating the
engine take no longer here than a message does, and activation `apply_s`.
"""

from collections.abc import Callable

from elastic_scheduler import Offer, ReplicaKind
from rose.node.lease import (
    Admit,
    Drain,
    Ended,
    EngineAdmitted,
    EngineDown,
    EngineDrained,
    EngineUp,
    Event,
    LeaseStateMachine,
    LeaseTakenBack,
)
from rose.simulation.clock.event_queue import EventQueue
from rose.simulation.engine.batching import ModelledEngine
from rose.simulation.step_times import StepWork

OFFER_TTL_S = 3.0
# A sequence's context, where a rate at full batch is offered.
TYPICAL_CONTEXT = 4_096


class ModelledReplica:
    """One replica; `tell` takes what the scheduler must hear."""

    def __init__(
        self,
        name: str,
        node: str,
        kind: ReplicaKind,
        engine: ModelledEngine,
        queue: EventQueue,
        tell: Callable[["ModelledReplica", LeaseTakenBack | Ended], None],
        *,
        far: bool,
        up: bool = True,
    ) -> None:
        """far: behind the slow link. up: its engine is there from the beginning."""
        self.name = name
        self.node = node
        self.kind = kind
        self.engine = engine
        self.far = far
        self.lease = LeaseStateMachine()
        self.job = ""
        self.held_job = ""
        self.version = 0
        self.updating = False
        self.up = False
        self.admits = False
        self.leased_s = 0.0
        self._leased_since_s: float | None = None
        self._queue = queue
        self._tell = tell
        self._offer: Offer | None = None
        decode_s, batch = self._full_batch()
        self._decode_tok_s = batch / decode_s
        chunk = engine.spec.max_step_tokens
        self._prefill_tok_s = chunk / engine.spec.steps.seconds(StepWork(chunk, 0, 1, 0))
        if up:
            self.engine_up()

    def _full_batch(self) -> tuple[float, int]:
        spec = self.engine.spec
        batch = max(1, min(spec.max_sequences, spec.kv_tokens // TYPICAL_CONTEXT))
        return spec.steps.seconds(StepWork(0, batch, 0, batch * TYPICAL_CONTEXT)), batch

    def engine_up(self) -> None:
        """The engine answers, with the model that it began with."""
        self.up = True
        self.step(EngineUp())

    def engine_down(self) -> None:
        """The engine is gone, with its turns, KV and newer weights."""
        self.up = self.admits = self.updating = False
        self.version, self.held_job = 0, ""
        self.engine.abort_all("broken")
        self.engine.kv.forget()
        self.step(EngineDown())

    def lease_epoch(self) -> int | None:
        """Under which lease turns may run now."""
        status = self.lease.status()
        return status.epoch if status.active(self._queue.now_s) else None

    def offer(self) -> Offer:
        """Return its node's present offer."""
        spec = self.engine.spec
        said = Offer(
            replica=self.name,
            kind=self.kind,
            url=f"http://{self.name}:1",
            node=self.node,
            kv_tokens=self.engine.kv.units * self.engine.kv.unit_tokens
            if self.kind is ReplicaKind.DEDICATED
            else spec.kv_tokens,
            decode_tok_s=self._decode_tok_s,
            prefill_tok_s=self._prefill_tok_s,
            policy_version=self.version,
            healthy=self.up,
            ttl_s=OFFER_TTL_S,
            epoch=self.lease.status().epoch,
            max_sequences=spec.max_sequences,
            job=self.held_job,
        )
        if said != self._offer:
            self._offer = said
        assert self._offer is not None
        return self._offer

    def step(self, event: Event) -> None:
        """Let the state machine take an event, and carry out what it says."""
        events = [event]
        while events:
            for action in self.lease.step(events.pop(), self._queue.now_s):
                match action:
                    case Admit():
                        self.admits = True
                        events.append(EngineAdmitted(action.epoch, action.life))
                    case Drain():
                        self.admits = False
                        aborted = self.engine.abort_all("revoked")
                        events.append(EngineDrained(action.life, aborted))
                    case LeaseTakenBack() | Ended():
                        self._tell(self, action)
        self._count_lease()

    def _count_lease(self) -> None:
        active = self.lease_epoch() is not None
        now_s = self._queue.now_s
        if active and self._leased_since_s is None:
            self._leased_since_s = now_s
        elif not active and self._leased_since_s is not None:
            self.leased_s += now_s - self._leased_since_s
            self._leased_since_s = None

    def leased_until_now_s(self) -> float:
        """Seconds under a lease so far."""
        since_s = self._leased_since_s
        return self.leased_s + (self._queue.now_s - since_s if since_s is not None else 0.0)

    def activate(self, version: int, job: str, apply_s: float) -> None:
        """Take a version: the engine pauses, and computes its KV anew."""
        self.version, self.held_job = version, job
        self.engine.recompute()
        self.engine.pause(apply_s)
