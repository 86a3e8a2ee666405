"""World of a seed: its processes, and the faults that the seed draws for it.

Faults are a list made before anything runs, so that a failure can be run again with fewer of them.
"""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

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
# Faults come until then; afterwards the world has to come to rest.
FAULTS_S = 40.0
END_S = 48.0
MOST_FAULTS = 24


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to `target` at a time, and is over so much later."""

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
        kind = rng.choice(("crash", "crash", "pause", "pause", "cut", "cut", "storm", "compact"))
        target, other = rng.choice(processes), ""
        for_s = min(rng.choice((0.3, 1.0, 3.0, 8.0)) * rng.uniform(0.5, 1.5), FAULTS_S - at_s)
        if kind == "cut":
            target = rng.choice(SCHEDULERS)
            other = rng.choice([name for name in everybody if name != target])
        if kind in ("storm", "compact"):
            target = STORE
        faults.append(Fault(at_s, kind, target, other, for_s))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


class ChaosWorld:
    """One world. `faults` None: those of the seed. `bugs`: planted ones, by name."""

    def __init__(
        self, seed: int, faults: Sequence[Fault] | None = None, bugs: Collection[str] = ()
    ) -> None:
        self.seed = seed
        self.faults = draw_faults(seed) if faults is None else tuple(faults)
        self.simulation = world = Simulation(seed)
        planted = frozenset(bugs)
        self.invariants = Invariants(lambda: world.now_s, world.note)
        self.store = SimulatedStore(world, self.invariants.before_write)
        self.invariants.store = self.store
        for name in SCHEDULERS:
            SimulatedScheduler(world, name, self.invariants, planted)
        engines = {}
        for node in NODES:
            page, replica = Page(), f"{node}/guest"
            engine = SimulatedEngine(world, engine_of(node), replica, page, self.invariants)
            engines[replica] = engine.name
            SimulatedNode(world, node, SCHEDULERS, engine, page, self.invariants, planted)
        for job in JOBS:
            SimulatedTrainer(world, job, SCHEDULERS, self.invariants)
        SimulatedOperator(world, SCHEDULERS, self.invariants)
        SimulatedGateway(world, SCHEDULERS, engines, JOBS, self.invariants, planted)
        self._skew()

    def run(self) -> None:
        """Live through it. Raises InvariantError."""
        world = self.simulation
        for name in list(world.processes):
            if not name.startswith("engine"):
                world.start(name)
        for fault in self.faults:
            world.at(fault.at_s, None, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
        world.run(END_S)
        self.invariants.end()

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
        world, later = self.simulation, self._later
        world.note(f"FAULT {fault.kind} {fault.target} {fault.other} for {fault.for_s:.2f} s")
        match fault.kind:
            case "crash":
                world.crash(fault.target)
                if not fault.target.startswith("engine"):
                    later(fault, lambda: world.start(fault.target))
            case "pause":
                world.pause(fault.target)
                later(fault, lambda: world.resume(fault.target))
            case "cut":
                world.cut(fault.target, fault.other)
                later(fault, lambda: world.heal(fault.target, fault.other))
            case "storm":
                world.weather = Weather(drop=0.1, late=0.2)
                later(fault, self._calm)
            case "compact":
                self.store.compact()

    def _later(self, fault: Fault, call: Callable[[], None]) -> None:
        self.simulation.at(fault.for_s, None, call)

    def _calm(self) -> None:
        self.simulation.weather = Weather()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a seed; `broken` is empty where every invariant held."""

    seed: int
    events: int
    broken: str
    faults: tuple[Fault, ...]
    history: tuple[str, ...]


def live(seed: int, faults: Sequence[Fault] | None = None, bugs: Collection[str] = ()) -> Outcome:
    """Run a world to its end, or until an invariant is broken."""
    world = ChaosWorld(seed, faults, bugs)
    broken = ""
    try:
        world.run()
    except InvariantError as error:
        broken = str(error)
    except Exception as error:
        broken = repr(error)
    simulation = world.simulation
    return Outcome(seed, simulation.events, broken, world.faults, tuple(simulation.history))


def shrink(failed: Outcome, bugs: Collection[str] = ()) -> Outcome:
    """The same failure with fewer faults: each is left out that it does not need."""
    for fault in failed.faults:
        fewer = [each for each in failed.faults if each != fault]
        again = live(failed.seed, fewer, bugs)
        if again.broken:
            failed = again
    return failed
