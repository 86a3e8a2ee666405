"""Shell of the scheduler core under the virtual clock, after `rose.scheduler.service`.

The core is production's, with all its decisions; messages take `latency_s` here, and a write to the
store takes `STORE_S`. The core ticks less often than in production, with the same decisions.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial

from elastic_scheduler import HarvestMode, Policy
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.leasing import LeaseTimes
from rose.scheduler.core.messages import (
    Answer,
    CloseStream,
    Command,
    Event,
    LogRecord,
    PublishTable,
    Reserve,
    Save,
    StoredEvent,
    Tick,
)
from rose.scheduler.core.scheduler_core import SchedulerCore
from rose.scheduler.persistence import Saved
from rose.simulation.clock import EventQueue
from rose.simulation.fleet.node import ModelledNode

TICK_S = 0.25
STORE_S = 0.002


class ModelledScheduler:
    """Model of the scheduler process: production's core, whose actions go to modelled nodes and the
    gateway.
    """

    def __init__(
        self,
        queue: EventQueue,
        policy: Policy,
        latency_s: float,
        on_table: Callable[[pb.ReplicaTable], None],
    ) -> None:
        self._core = SchedulerCore(Saved(), HarvestMode.ACTIVE, LeaseTimes(), policy)
        self._queue = queue
        self._latency_s = latency_s
        self._on_table = on_table
        self._nodes: dict[int, ModelledNode] = {}
        self.log: Counter[str] = Counter()

    def start(self) -> None:
        """Schedule the core's ticks."""
        self._queue.every_s(TICK_S, lambda: self._step(Tick()))

    def attach(self, node: ModelledNode) -> None:
        """Send commands for the node's stream to this node from now on."""
        self._nodes[node.stream] = node

    def hear(self, event: Event) -> None:
        """Deliver an event to the core after the latency of a message."""
        self._queue.after_s(self._latency_s, lambda: self._step(event))

    def _step(self, event: Event) -> None:
        if isinstance(event, StoredEvent):
            self._core.writes(event)
        for action in self._core.step(event, self._queue.now_s):
            match action:
                case Reserve():
                    self._queue.after_s(STORE_S, partial(self._step, action.then))
                case Command():
                    if (node := self._nodes.get(action.stream)) is not None:
                        self._queue.after_s(self._latency_s, partial(node.obey, action.command))
                case PublishTable():
                    self._queue.after_s(self._latency_s, partial(self._on_table, action.table))
                case LogRecord():
                    self.log[action.event] += 1
                    if action.event in ("policy_broken", "replica_broken"):
                        raise RuntimeError(f"{action.event}: {action.fields}")
                case CloseStream() | Save() | Answer():
                    pass
