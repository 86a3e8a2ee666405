"""Simulated clients of the scheduler: trainers that announce versions, an operator.

A call whose answer does not come is made again, of another scheduler, until it is answered: what is
promised is what was answered. Each client makes one call at a time. `LeaderFinder` is the product's
own; the rest follows `rose.rpc.leader_channel.LeaderChannel.call`, with less patience.
"""

import itertools
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from elastic_scheduler import HarvestMode
from elastic_scheduler.capacity import CapacityPolicy, policy_of
from rose.rpc import rose_pb2 as pb
from rose.rpc.leader_channel import LeaderFinder
from rose.scheduler.persistence import save_stop
from rose.scheduler.wire import MODE_TO
from tests.chaos.invariants import CLOSED, OPERATOR, Invariants
from tests.chaos.simulated_grpc import Call, Reply, addresses_of, name_of
from tests.chaos.simulated_store import Answer, StoreClient, Txn
from tests.chaos.simulation import SKIPPED, SimulatedProcess, Simulation

ANSWER_S = 1.0
RETRY_S = 0.3
PAUSE_S = 0.5
# Longer than any message is late: what was asked before is over by then.
LEAST_REST_S, MOST_REST_S = 2.0, 14.0
# Probability that history is gone before a watch has looked.
COMPACTED_AT_ONCE = 0.4
METHOD = "/rose.v1.Scheduler/"
# Whoever refuses so did not do it, or may be asked again.
AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class SimulatedClient(SimulatedProcess):
    """Calls the scheduler that leads, wherever it is."""

    def __init__(
        self, world: Simulation, name: str, schedulers: tuple[str, ...], invariants: Invariants
    ) -> None:
        super().__init__(world, name)
        self._finder = LeaderFinder(addresses_of(schedulers))
        self.invariants = invariants
        self._numbers = itertools.count(1)
        self._open: tuple[int, str, Message, Callable[[Any], None]] | None = None

    def started(self) -> None:
        self._open = None
        self.after(PAUSE_S, self.work)

    def work(self) -> None:
        """Make the next call."""

    def call(self, method: str, request: Message, then: Callable[[Any], None]) -> None:
        """Call `then` with the answer, None when it was refused."""
        number = next(self._numbers)
        self._open = (number, method, request, then)
        self.send(name_of(self._finder.address), Call(number, METHOD + method, request))
        self.after(ANSWER_S, lambda: self._again(number))

    def heard(self, sender: str, message: object) -> None:
        if not isinstance(message, Reply) or self._open is None or self._open[0] != message.number:
            return
        number, _, _, then = self._open
        if message.code in AGAIN:
            self.after(RETRY_S, lambda: self._again(number, message.leader))
            return
        self._finder.answered()
        self._open = None
        then(message.message)

    def _again(self, number: int, leader: str = "") -> None:
        if self._open is not None and self._open[0] == number:
            self._finder.missed(leader)
            self.call(*self._open[1:])


class SimulatedTrainer(SimulatedClient):
    """Registers its job, and announces one version after another.

    Each life of it is a process of one run: it comes back with its root.
    """

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
        self._lives = 0

    def started(self) -> None:
        self._lives += 1
        super().started()

    @property
    def _claim(self) -> pb.Claim:
        return pb.Claim(run=f"root-{self.job}", process=str(self._lives), holder=self.name)

    def work(self) -> None:
        life = self._lives

        def registered(reply: pb.RegisterJobReply | None) -> None:
            if reply is not None:
                self.invariants.promised.jobs.add(self.job)
                self.invariants.promised.runs[self.job] = life
                self._version = max(self._version, reply.latest_version)
            self.after(PAUSE_S, self._announce)

        request = pb.RegisterJobRequest(job=self.job, max_staleness=2, claim=self._claim)
        self.call("RegisterJob", request, registered)

    def _announce(self) -> None:
        parent, version = self._version, self._version + 1
        url = f"http://trainer/{self.job}"

        def announced(reply: pb.AnnounceVersionReply | None) -> None:
            if reply is None:  # An earlier life announced it, or the job is not known.
                self.after(PAUSE_S, self.work)
                return
            self._version = version
            self.invariants.promised.versions[self.job] = version
            self.after(self.world.rng.uniform(1.0, 5.0), self._announce)

        request = pb.AnnounceVersionRequest(
            job=self.job, version=version, parent=parent, url=url, claim=self._claim
        )
        self.call("AnnounceVersion", request, announced)


class SimulatedOperator(SimulatedClient):
    """Puts policies in force, stops the harvest and resumes it; also with no scheduler's help."""

    def __init__(
        self,
        world: Simulation,
        schedulers: tuple[str, ...],
        invariants: Invariants,
        compact: Callable[[], None],
    ) -> None:
        """`compact`: makes the store forget its history."""
        super().__init__(world, OPERATOR, schedulers, invariants)
        self._schedulers = schedulers
        self._compact = compact
        self._policies = 0
        self.said = HarvestMode.ACTIVE
        self._finale: HarvestMode | None = None
        self._rest_s = LEAST_REST_S

    def started(self) -> None:
        self._store = StoreClient(self)
        self._storing = False
        self._rests = 0
        super().started()

    def work(self) -> None:
        rng = self.world.rng
        draw = rng.random()
        if not self._policies or (draw < 0.2 and self._finale is None):
            self._apply()
        elif self._finale is not None:
            self._insist()
        elif draw < 0.45:
            self._set(rng.choice((*CLOSED, HarvestMode.HOLD)))
        elif draw < 0.6:
            self._leave_in_store()
        else:
            self._set(HarvestMode.ACTIVE)

    def insist(self, mode: HarvestMode, rest_s: float = LEAST_REST_S) -> None:
        """From now on nothing but this mode, after a rest."""
        self._finale, self._rest_s = mode, rest_s
        if self._open is None and not self._storing:
            self._rest()

    def revoke(self, replica: str) -> None:
        """Have a lease ended, whoever leads; nobody waits for the answer."""
        request = pb.RevokeRequest(replica=replica, reason="an operator wants it")
        for name in self._schedulers:
            self.send(name, Call(0, METHOD + "Revoke", request))

    def heard(self, sender: str, message: object) -> None:
        if isinstance(message, Answer):
            self._store.heard(message)
        else:
            super().heard(sender, message)

    def _insist(self) -> None:
        assert self._finale is not None
        if self.said is self._finale:
            self._rest()
        else:
            self._set(self._finale)

    def _rest(self) -> None:
        self._rests += 1
        number = self._rests
        rest_s = self.world.rng.uniform(LEAST_REST_S, MOST_REST_S)
        if self._finale is not None:
            rest_s = self._rest_s
        self.after(rest_s, lambda: self.work() if number == self._rests else SKIPPED)

    def _apply(self) -> None:
        policy = policy_named(f"p{self._policies % 3}", self.world.rng.choice((2, 3, 5)))

        def applied(reply: pb.ApplyPolicyReply | None) -> None:
            if reply is not None:
                self._policies += 1
                self.invariants.promised.policies.add(policy.name)
            self._rest()

        self.call("ApplyPolicy", pb.ApplyPolicyRequest(policy=policy.to_json()), applied)

    def _set(self, mode: HarvestMode) -> None:
        self.invariants.asked(mode)

        def done(reply: pb.SetHarvestReply | None) -> None:
            self.world.note(f"operator: {mode.value} {'refused' if reply is None else 'done'}")
            if reply is not None:
                self.said = mode
                self.invariants.stop_promised(mode)
            self._rest()

        request = pb.SetHarvestRequest(mode=MODE_TO[mode], stop_alone=True)
        self.call("SetHarvest", request, done)

    def _leave_in_store(self) -> None:
        """After `rose stop-all --store`, for when no scheduler answers; one may all the same."""
        writes = (save_stop(HarvestMode.OFF),)

        def written(revision: object, known: bool) -> None:
            if not known:
                self._store.ask(Txn((), writes), written)
                return
            self._storing = False
            self.world.note("operator: off is in the store")
            self.said = HarvestMode.OFF
            self.invariants.stop_stored()
            if self.world.rng.random() < COMPACTED_AT_ONCE:
                self._compact()
            self._rest()

        self._storing = True
        self._store.ask(Txn((), writes), written)


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
