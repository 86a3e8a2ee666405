"""World of a seed: its processes, and the faults that the seed draws for it.

Faults are a list made before anything runs, so that a failure can be run again with fewer of them.

    0 s ── faults ── FAULTS_S ── everything comes back ── LIVES_S ── drain, stop-all ── END_S
                        │ the operator resumes               │ it does                  │ no guest
"""

import gc
import itertools
import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from elastic_scheduler import HarvestMode
from tests.chaos.invariants import Invariants
from tests.chaos.simulated_clients import SimulatedOperator, SimulatedTrainer
from tests.chaos.simulated_gateway import SimulatedGateway
from tests.chaos.simulated_node import Page, SimulatedEngine, SimulatedNode
from tests.chaos.simulated_scheduler import SimulatedScheduler
from tests.chaos.simulated_store import STORE, SimulatedStore
from tests.chaos.simulation import InvariantError, Simulation, Weather

SCHEDULERS = ("scheduler-0", "scheduler-1")
NODES = ("node-0", "node-1", "node-2")
JOBS = ("a", "b")
# Faults come until then, and none lasts longer.
FAULTS_S = 34.0
# The longest way back: whoever looked for a leader for long pauses for 5 s, a leader's lease is
# over after 2 s, an operator rests for 2 s before it resumes and finds the leader by its third
# call, and a replica that was revoked rests for 1 s.
LIVES_S = FAULTS_S + 12.0
DRAINED_S = LIVES_S + 2.0
END_S = DRAINED_S + 2.0
CALM_REST_S = 0.2
# A turn waits that long for a job's first lease, at most, when nothing is amiss.
TURN_WAITS_S = 3.0
# Time that a scheduler has after SIGTERM.
TERM_S = 0.5
MOST_FAULTS = 24


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of `target` at a time, with its duration."""

    at_s: float
    kind: str
    target: str
    other: str = ""
    for_s: float = 0.0

    def __str__(self) -> str:
        whom = f"{self.target} from {self.other}" if self.other else self.target
        return f"{self.at_s:7.3f} {self.kind} {whom} for {self.for_s:.2f} s"


def engine_of(node: str) -> str:
    """The engine of the node's guest."""
    return node.replace("node", "engine")


def draw_faults(seed: int) -> tuple[Fault, ...]:
    """The faults of a seed, by time."""
    rng = random.Random(f"faults {seed}")
    everybody = (*SCHEDULERS, *NODES, STORE, "gateway")
    processes = (*SCHEDULERS, *SCHEDULERS, *NODES, *map(engine_of, NODES), STORE, "gateway")
    faults = []
    for _ in range(rng.randint(3, MOST_FAULTS)):
        at_s = rng.uniform(1.0, FAULTS_S)
        kind = rng.choice(
            (
                "crash",
                "crash",
                "pause",
                "pause",
                "cut",
                "cut",
                "storm",
                "compact",
                "stop",
                "handover",
                "flap",
            )
        )
        target, other = rng.choice(processes), ""
        for_s = min(rng.choice((0.3, 1.0, 3.0, 8.0)) * rng.uniform(0.5, 1.5), FAULTS_S - at_s)
        if kind == "cut":
            target = rng.choice(SCHEDULERS)
            other = rng.choice([name for name in everybody if name != target])
        if kind in ("storm", "compact"):
            target = STORE
        if kind == "stop":
            target, for_s = rng.choice(SCHEDULERS), max(for_s, 2 * TERM_S)
        if kind == "handover":
            faults += draw_handover(rng, min(at_s, FAULTS_S - 8.0))
            continue
        if kind == "flap":
            faults += draw_flap(rng, min(at_s, FAULTS_S - 8.0))
            continue
        faults.append(Fault(at_s, kind, target, other, for_s))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def draw_handover(rng: random.Random, at_s: float) -> list[Fault]:
    """A node loses the leader, which leases it anew unheard, for no other is free, and then stops.

    Its next leader hears of a lease that still lives there and is over all the same.
    """
    scheduler, node = rng.choice(SCHEDULERS), rng.choice(NODES)
    revoked_s = at_s + rng.uniform(0.05, 0.3)
    return [
        Fault(at_s, "cut", scheduler, node, rng.uniform(3.0, 6.0)),
        *(Fault(revoked_s, "revoke", f"{each}/guest") for each in NODES),
        Fault(at_s + rng.uniform(1.2, 2.5), "stop", scheduler, "", rng.uniform(2.0, 5.0)),
    ]


def draw_flap(rng: random.Random, at_s: float) -> list[Fault]:
    """All guests change hands, and change them again before the weights of the first have come."""
    pauses_s = [rng.uniform(1.1, 2.0) for _ in range(rng.randint(1, 3))]
    times_s = itertools.accumulate([at_s, *pauses_s])
    return [Fault(time_s, "revoke", f"{each}/guest") for time_s in times_s for each in NODES]


class ChaosWorld:
    """One world. `faults` None: those of the seed. `bugs`: planted ones, by name."""

    def __init__(
        self, seed: int, faults: Sequence[Fault] | None = None, bugs: Collection[str] = ()
    ) -> None:
        self.seed = seed
        self.faults = draw_faults(seed) if faults is None else tuple(faults)
        self.simulation = world = Simulation(seed)
        planted = frozenset(bugs)
        # Number of present faults, and the time since when there is none.
        self._faults = 0
        self._calm_since_s = 0.0
        self.invariants = Invariants(
            lambda: world.now_s,
            world.note,
            world.failed,
            lambda: math.inf if self._faults else self._calm_since_s,
        )
        self.store = SimulatedStore(world, self.invariants.before_write)
        self.invariants.store = self.store
        self.schedulers = [
            SimulatedScheduler(world, name, self.invariants, planted) for name in SCHEDULERS
        ]
        engines = {}
        self.nodes = []
        for node in NODES:
            page, replica = Page(), f"{node}/guest"
            engine = SimulatedEngine(
                world, engine_of(node), replica, page, self.invariants, planted
            )
            engines[replica] = engine.name
            self.nodes.append(
                SimulatedNode(world, node, SCHEDULERS, engine, page, self.invariants, planted)
            )
        for job in JOBS:
            SimulatedTrainer(world, job, SCHEDULERS, self.invariants)
        self.operator = SimulatedOperator(world, SCHEDULERS, self.invariants, self.store.compact)
        self.gateway = SimulatedGateway(world, SCHEDULERS, engines, JOBS, self.invariants, planted)
        self._skew()

    def run(self) -> None:
        """Live through it. Raises InvariantError."""
        world = self.simulation
        for name in list(world.processes):
            if not name.startswith("engine"):
                world.start(name)
        for fault in self.faults:
            world.at(fault.at_s, None, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
        try:
            world.run(FAULTS_S)
            self.operator.insist(HarvestMode.ACTIVE)
            world.run(LIVES_S)
            self._must_live()
            self.operator.insist(HarvestMode.HOLD_AND_DRAIN, CALM_REST_S)
            world.run(DRAINED_S)
            self.operator.insist(HarvestMode.OFF, CALM_REST_S)
            world.run(END_S)
            self._must_be_over()
            self.invariants.end()
        finally:
            for each in (*self.schedulers, *self.nodes):
                if each.up:
                    each.loop.end()

    def _must_live(self) -> None:
        """With no fault left: one leads, every node is attached, who has turns has a lease."""
        leaders = [each for each in self.schedulers if each.leads()]
        if len(leaders) != 1:
            raise InvariantError(f"{[each.name for each in leaders]} lead at {LIVES_S} s")
        core, now_s = leaders[0].core, leaders[0].now_s()
        assert core is not None
        status = core.status(now_s)
        lost = [each.name for each in self.nodes if not each.attached]
        offered = {row.node for row in status.replicas}
        if lost or offered != set(NODES):
            raise InvariantError(f"{lost} are not attached, {sorted(offered)} offer")
        leased = {lease.job for lease in status.leases}
        served = {each.leased_to for each in self.nodes}
        # A job whose last turn has just ended may have given its leases back.
        wait = self.gateway.jobs_waiting(TURN_WAITS_S)
        if not wait <= leased & served:
            raise InvariantError(
                f"{sorted(wait)} wait, {sorted(leased)} are leased, nodes serve {sorted(served)}"
            )

    def _must_be_over(self) -> None:
        """A stop that nothing disturbed was obeyed: no lease, and no guest."""
        said = [each.core.status(each.now_s()) for each in self.schedulers if each.core]
        leases = [lease.id for status in said for lease in status.leases]
        processes = self.simulation.processes
        guests = [name for name in map(engine_of, NODES) if processes[name].up]
        if leases or guests or self.operator.said is not HarvestMode.OFF:
            raise InvariantError(f"after stop-all there are {leases}, {guests}")

    def _skew(self) -> None:
        """Clocks that started at other times, and some that run a little fast or slow."""
        rng = self.simulation.rng
        for name, process in self.simulation.processes.items():
            if name.startswith("engine"):
                continue
            process.clock_offset_s = rng.uniform(100.0, 1_000.0)
            process.clock_rate = rng.choice((1.0, 1.0, 0.99, 1.01))
        for node in NODES:
            engine, daemon = (self.simulation.processes[n] for n in (engine_of(node), node))
            engine.clock_offset_s, engine.clock_rate = daemon.clock_offset_s, daemon.clock_rate

    def _strike(self, fault: Fault) -> None:
        world = self.simulation
        world.note(f"FAULT {fault.kind} {fault.target} {fault.other} for {fault.for_s:.2f} s")
        undo: Callable[[], None] | None = None
        match fault.kind:
            case "crash":
                world.crash(fault.target)
                # An engine is started by its node.
                if not fault.target.startswith("engine"):
                    undo = partial(world.start, fault.target)
            case "pause":
                world.pause(fault.target)
                undo = partial(world.resume, fault.target)
            case "cut":
                world.cut(fault.target, fault.other)
                undo = partial(world.heal, fault.target, fault.other)
            case "storm":
                world.weather = Weather(drop=0.1, late=0.2)
                undo = self._calm
            case "compact":
                self.store.compact()
            case "revoke":
                self.operator.revoke(fault.target)
            case "stop":
                scheduler = next(each for each in self.schedulers if each.name == fault.target)
                scheduler.stop()
                world.at(TERM_S, None, partial(world.crash, fault.target))
                undo = partial(world.start, fault.target)
        # Neither of these is in anybody's way.
        if fault.kind not in ("compact", "revoke"):
            self._faults += 1
            world.at(fault.for_s, None, partial(self._over, undo))

    def _over(self, undo: Callable[[], None] | None) -> None:
        if undo is not None:
            undo()
        self._faults -= 1
        self._calm_since_s = self.simulation.now_s

    def _calm(self) -> None:
        self.simulation.weather = Weather()


@dataclass(frozen=True, slots=True)
class SeedOutcome:
    """Result of a seed; `broken` is empty if every invariant held."""

    seed: int
    events: int
    broken: str
    faults: tuple[Fault, ...]
    history: tuple[str, ...]


def live(
    seed: int, faults: Sequence[Fault] | None = None, bugs: Collection[str] = ()
) -> SeedOutcome:
    """Run a world to its end, or until an invariant is broken."""
    world = ChaosWorld(seed, faults, bugs)
    broken = ""
    collects = gc.isenabled()
    gc.disable()  # a world is short, and full of cycles
    try:
        world.run()
    except InvariantError as error:
        broken = str(error)
    except Exception as error:
        broken = repr(error)
    finally:
        if collects:
            gc.enable()
    simulation = world.simulation
    return SeedOutcome(seed, simulation.events, broken, world.faults, tuple(simulation.history))


def shrink(failed: SeedOutcome, bugs: Collection[str] = ()) -> SeedOutcome:
    """The same failure with fewer faults: each is left out that it does not need."""
    for fault in failed.faults:
        fewer = [each for each in failed.faults if each != fault]
        again = live(failed.seed, fewer, bugs)
        if again.broken:
            failed = again
    return failed
