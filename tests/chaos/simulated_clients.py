"""Simulated clients of the scheduler: trainers that announce versions, an operator.

A call whose answer does not come is made again, of another scheduler, until it is answered: what is
promised is what was answered. Each client makes one call at a time.
"""

import itertools
from collections.abc import Callable

from elastic_scheduler import HarvestMode
from elastic_scheduler.capacity import CapacityPolicy, policy_of
from rose.scheduler.messages import (
    HarvestSet,
    JobRegistered,
    PolicyApplied,
    StoredEvent,
    VersionAnnounced,
)
from tests.chaos.invariants import CLOSED, Invariants
from tests.chaos.simulated_scheduler import Call, Reply
from tests.chaos.simulation import SimulatedProcess, Simulation

ANSWER_S = 1.0
RETRY_S = 0.3
PAUSE_S = 0.5


class SimulatedClient(SimulatedProcess):
    """Calls the scheduler that leads, wherever it is."""

    def __init__(
        self, world: Simulation, name: str, schedulers: tuple[str, ...], invariants: Invariants
    ) -> None:
        super().__init__(world, name)
        self._schedulers = schedulers
        self.invariants = invariants
        self._at = 0
        self._numbers = itertools.count(1)
        self._open: tuple[int, StoredEvent, Callable[[int | None], None]] | None = None

    def started(self) -> None:
        self._open = None
        self.after(PAUSE_S, self.work)

    def work(self) -> None:
        """Make the next call."""

    def call(self, event: StoredEvent, then: Callable[[int | None], None]) -> None:
        """Call `then` with the answer, None when it was refused."""
        number = next(self._numbers)
        self._open = (number, event, then)
        self.send(self._schedulers[self._at], Call(number, event))
        self.after(ANSWER_S, lambda: self._again(number))

    def heard(self, sender: str, message: object) -> None:
        if not isinstance(message, Reply) or self._open is None or self._open[0] != message.number:
            return
        number, _, then = self._open
        if not message.leads:
            self.after(RETRY_S, lambda: self._again(number))
            return
        self._open = None
        then(message.value)

    def _again(self, number: int) -> None:
        if self._open is not None and self._open[0] == number:
            self._at = (self._at + 1) % len(self._schedulers)
            self.call(self._open[1], self._open[2])


class SimulatedTrainer(SimulatedClient):
    """Registers its job, and announces one version after another."""

    def __init__(
        self,
        world: Simulation,
        job: str,
        schedulers: tuple[str, ...],
        invariants: Invariants,
    ) -> None:
        super().__init__(world, f"trainer-{job}", schedulers, invariants)
        self.job = job
        self._version = 0

    def work(self) -> None:
        def registered(latest: int | None) -> None:
            if latest is not None:
                self.invariants.promised.jobs.add(self.job)
                self._version = max(self._version, latest)
            self.after(PAUSE_S, self._announce)

        self.call(JobRegistered(self.job, max_staleness=2), registered)

    def _announce(self) -> None:
        parent, version = self._version, self._version + 1
        url = f"http://trainer/{self.job}"

        def announced(nodes: int | None) -> None:
            if nodes is None:  # An earlier life announced it, or the job is not known.
                self.after(PAUSE_S, self.work)
                return
            self._version = version
            self.invariants.promised.versions[self.job] = version
            self.after(self.world.rng.uniform(1.0, 5.0), self._announce)

        self.call(VersionAnnounced(self.job, version, parent, url), announced)


class SimulatedOperator(SimulatedClient):
    """Puts policies in force, stops the harvest and resumes it."""

    def __init__(
        self, world: Simulation, schedulers: tuple[str, ...], invariants: Invariants
    ) -> None:
        super().__init__(world, "operator", schedulers, invariants)
        self._policies = 0

    def work(self) -> None:
        rng = self.world.rng
        draw = rng.random()
        if not self._policies or draw < 0.2:
            self._apply()
        elif draw < 0.5:
            self._set(rng.choice((*CLOSED, HarvestMode.HOLD)))
        else:
            self._set(HarvestMode.ACTIVE)

    def _rest(self) -> None:
        self.after(self.world.rng.uniform(2.0, 14.0), self.work)

    def _apply(self) -> None:
        policy = policy_named(f"p{self._policies % 3}", self.world.rng.choice((2, 3, 5)))

        def applied(changed: int | None) -> None:
            if changed is not None:
                self._policies += 1
                self.invariants.promised.policies.add(policy.name)
            self._rest()

        self.call(PolicyApplied(policy), applied)

    def _set(self, mode: HarvestMode) -> None:
        if mode not in CLOSED:
            self.invariants.resume_asked()

        def done(released: int | None) -> None:
            self.world.note(f"operator: {mode.value} {'refused' if released is None else 'done'}")
            if released is not None:
                self.invariants.stop_promised(mode)
            self._rest()

        self.call(HarvestSet(mode, None, opens=False), done)


def policy_named(name: str, stale_after_s: int) -> CapacityPolicy:
    """A policy that lends everything, for nodes that hear a scheduler."""
    said = {
        "name": name,
        "mode": "Active",
        "maxHostBusy": None,
        "sloBudget": None,
        "staleAfter": f"{stale_after_s}s",
    }
    return policy_of(said)
