"""Stand-in for a hybrid pool: training cards that roll out while nobody trains on them.

    rollout phase ── SWITCH_S ──► engines up, offered ──┐
    batch complete, or window over ──► revoked ── SWITCH_S ──► training

Not windowed (`libra`): they are there until the batch is complete or the leasing policy gave them
back. Windowed (`rlboost`): for a window that adapts from step to step.
"""

from collections.abc import Sequence

from rose.simulation.clock.event_queue import EventQueue
from rose.simulation.fleet.node import ModelledNode
from rose.simulation.fleet.replica import ModelledReplica
from rose.simulation.fleet.trainer import ModelledTrainer
from rose.simulation.policies.libra import SWITCH_S
from rose.simulation.policies.rlboost import OffloadWindow


class ModelledHybridPool:
    """Replicas of these nodes lie on the trainer's cards."""

    def __init__(
        self,
        queue: EventQueue,
        trainer: ModelledTrainer,
        nodes: Sequence[ModelledNode],
        *,
        windowed: bool,
    ) -> None:
        self._queue = queue
        self._nodes = nodes
        self._window = OffloadWindow() if windowed else None
        self._phase = 0
        self._began_s = 0.0
        trainer.on_phase = self._changed

    def _changed(self, rollout: bool) -> float:
        """A phase begins; seconds by which training has to wait for its cards."""
        self._phase += 1
        phase = self._phase
        if rollout:
            self._began_s = self._queue.now_s
            self._queue.after_s(SWITCH_S, lambda: self._lend(phase))
            if self._window is not None:
                self._queue.after_s(self._window.window_s, lambda: self._close(phase))
            return 0.0
        if self._window is not None:
            self._window.step(self._queue.now_s - self._began_s)
        return self._take_back()

    def _lend(self, phase: int) -> None:
        if phase != self._phase:
            return
        for node, replica in self._replicas():
            if not replica.up:
                replica.engine_up()
                node.catch_up(replica)
        for node in self._nodes:
            node.report()

    def _close(self, phase: int) -> None:
        if phase == self._phase:
            self._take_back()

    def _take_back(self) -> float:
        """End what runs there; seconds until the cards can train."""
        blocked = False
        for node, replica in self._replicas():
            if replica.up:
                blocked |= replica.lease_epoch() is not None
                node.revoke(replica, "its cards train")
                replica.engine_down()
        for node in self._nodes:
            node.report()
        return SWITCH_S if blocked else 0.0

    def _replicas(self) -> list[tuple[ModelledNode, ModelledReplica]]:
        return [(node, each) for node in self._nodes for each in node.replicas.values()]
