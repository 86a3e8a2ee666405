"""Simulated clock, network and processes: one seed, one history.

    at(delay) ──► heap ──► the process is up? paused? ──► its handler runs, in no time at all
    send ──► dropped, late, out of order, or lost in a partition ──► heap
    Stream ──► in order, late, held back by a partition, or broken ──► heap

Processes are objects with handlers; one that runs asyncio has a `SimulatedLoop`. A crash forgets
every timer and message of the life before; a pause holds them back, and they come together when it
ends, as after SIGSTOP and SIGCONT. Each process has a clock of its own, which may run fast, slow or
ahead. Nothing here reads a real clock or a source of randomness besides the seed.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

# Delay of a message between two undisturbed processes.
LEAST_DELAY_S, MOST_DELAY_S = 0.001, 0.02
LATE_S = 1.5
HISTORY_LINES = 4_000
# After `rose.rpc.channel`: a ping after 2 s, which waits for 3 s.
KEEPALIVE_S = 1.0
KEEPALIVE_MISSES = 5
# Result of a call that did nothing at all, and is not an event.
SKIPPED = object()


class InvariantError(AssertionError):
    """An invariant was broken."""


@dataclass(frozen=True, slots=True)
class Weather:
    """Treatment of messages by the network: probabilities for each one."""

    drop: float = 0.0
    late: float = 0.0


class SimulatedProcess:
    """Process of a simulation. A subclass says what happens at its start and at each message."""

    def __init__(self, world: "Simulation", name: str) -> None:
        self.world = world
        self.name = name
        self.life = 0
        self.up = False
        self.paused = False
        # Total true time during which it was paused.
        self.paused_s = 0.0
        self.pause_began_s = 0.0
        # Its monotonic clock: offset + rate * time of the simulation.
        self.clock_offset_s = 0.0
        self.clock_rate = 1.0
        world.processes[name] = self

    def started(self) -> None:
        """Start, for the first time or after a crash, which lost all its state."""

    def crashed(self) -> None:
        """End it without a message."""

    def heard(self, sender: str, message: object) -> None:
        """A message came."""

    def stream_opened(self, stream: "Stream") -> None:
        """Somebody opened a stream to it."""

    def stream_heard(self, stream: "Stream", message: object) -> None:
        """A message came on a stream."""

    def stream_ended(self, stream: "Stream") -> None:
        """A stream is over, by the other end or since none could be opened."""

    def now_s(self) -> float:
        """Its own monotonic clock."""
        return self.clock_offset_s + self.clock_rate * self.world.now_s

    def after(self, delay_s: float, call: Callable[[], object]) -> None:
        """Call after so long by its own clock, in this life."""
        self.world.at(delay_s / self.clock_rate, self, call)

    def every(self, period_s: float, call: Callable[[], None]) -> None:
        """Call again and again, in this life."""

        def again() -> None:
            call()
            self.after(period_s, again)

        self.after(period_s, again)

    def send(self, to: str, message: object) -> None:
        """Send without knowing whether it arrives."""
        self.world.send(self.name, to, message)

    def open_stream(self, to: str) -> "Stream":
        """Open a stream; the other end hears of it, or this one that it is over."""
        return self.world.open_stream(self.name, to)


class Stream:
    """An ordered stream between two processes, as a gRPC call has: nothing is lost but its end."""

    def __init__(self, world: "Simulation", number: int, opener: str, acceptor: str) -> None:
        self.number = number
        self.ends = (opener, acceptor)
        self.closed: set[str] = set()
        # Times at which the current message was sent, and reached the receiver's machine.
        self.sent_s = self.arrived_s = 0.0
        # Reason given by the side that closed it.
        self.reason: object = None
        self.missed = 0
        self._world = world
        self._lives = {name: world.processes[name].life for name in self.ends}
        self._last_s = {opener: 0.0, acceptor: 0.0}
        self._held: list[tuple[str, Callable[[], None]]] = []

    def other(self, name: str) -> str:
        """The other end."""
        return self.ends[1] if name == self.ends[0] else self.ends[0]

    def send(self, sender: str, message: object) -> None:
        """Send after everything that was sent before."""
        if sender in self.closed:
            return
        receiver, sent_s = self._world.processes[self.other(sender)], self._world.now_s

        def heard() -> None:
            self.sent_s = sent_s
            receiver.stream_heard(self, message)

        self._pass_on(sender, heard)

    def close(self, by: str, reason: object = None) -> None:
        """End it: at this end now, at the other one once that hears it, with a reason."""
        if by in self.closed:
            return
        receiver = self._world.processes[self.other(by)]

        def ended() -> None:
            self.reason = reason
            self.closed.add(receiver.name)
            self._world.drop_stream(self)
            receiver.stream_ended(self)

        self._pass_on(by, ended)
        self.closed.add(by)
        self._world.drop_stream(self)

    def broke(self) -> None:
        """Nobody answers at the other end: both ends find it over by themselves."""
        for name in self.ends:
            process = self._world.processes[name]
            if name not in self.closed and self._lives[name] == process.life:
                self._world.at(0.0, process, lambda process=process: self._found_broken(process))  # type: ignore[misc]

    def _found_broken(self, process: SimulatedProcess) -> None:
        if process.name not in self.closed:
            self.closed.add(process.name)
            process.stream_ended(self)

    def opened(self) -> None:
        """Tell the acceptor."""
        acceptor = self._world.processes[self.ends[1]]
        self._pass_on(self.ends[0], lambda: acceptor.stream_opened(self))

    def healed(self) -> None:
        """Deliver the messages that the partition held back."""
        held, self._held = self._held, []
        for sender, call in held:
            self._pass_on(sender, call)

    def _pass_on(self, sender: str, call: Callable[[], None]) -> None:
        world, to = self._world, self.other(sender)
        receiver, life = world.processes[to], self._lives[to]

        def arrive() -> None:
            if to in self.closed or receiver.life != life:
                return
            if world.is_cut(sender, to):
                self._held.append((sender, call))
                return
            self.arrived_s = due_s
            call()

        due_s = max(world.now_s + world.delay_s(), self._last_s[to] + 1e-6)
        self._last_s[to] = due_s
        world.at(due_s - world.now_s, receiver, arrive)


class Simulation:
    """The world: runs events in the order of their times until none is due."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.events = 0
        self.weather = Weather()
        self.processes: dict[str, SimulatedProcess] = {}
        self.history: list[str] = []
        self._streams: dict[int, Stream] = {}
        self._cuts: set[frozenset[str]] = set()
        self._heap: list[tuple[float, int, SimulatedProcess | None, int, Callable[[], object]]] = []
        self._number = itertools.count(1)
        self._held: dict[str, list[Callable[[], object]]] = {}
        self._failure: BaseException | None = None
        self.at(KEEPALIVE_S, None, self._keep_alive)

    def at(
        self, delay_s: float, process: SimulatedProcess | None, call: Callable[[], object]
    ) -> None:
        """Have `call` run in the process's life of now; None: a fault, which nothing holds up."""
        life = process.life if process is not None else 0
        entry = (self.now_s + max(0.0, delay_s), next(self._number), process, life, call)
        heapq.heappush(self._heap, entry)

    def delay_s(self) -> float:
        """Return the delay of a message that arrives."""
        delay_s = self.rng.uniform(LEAST_DELAY_S, MOST_DELAY_S)
        if self.weather.late and self.rng.random() < self.weather.late:
            delay_s += self.rng.uniform(0.0, LATE_S)
        return delay_s

    def send(self, sender: str, to: str, message: object) -> None:
        """Hand a message to the network."""
        weather = self.weather
        if weather.drop and self.rng.random() < weather.drop:
            return
        receiver = self.processes[to]

        def arrive() -> None:
            if not self.is_cut(sender, to):
                receiver.heard(sender, message)

        self.at(self.delay_s(), receiver, arrive)

    def open_stream(self, opener: str, acceptor: str) -> Stream:
        """Begin a stream; where nobody answers its opener hears of its end."""
        stream = Stream(self, next(self._number), opener, acceptor)
        process = self.processes[opener]
        if self.processes[acceptor].up:
            self._streams[stream.number] = stream
            stream.opened()
        else:
            self.at(MOST_DELAY_S, process, lambda: process.stream_ended(stream))
        return stream

    def drop_stream(self, stream: Stream) -> None:
        """Forget a stream that one end closed, but for what is still on its way."""
        if len(stream.closed) == len(stream.ends):
            self._streams.pop(stream.number, None)

    def run(self, until_s: float) -> None:
        """Run until that time. Raises what `failed` was told first."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            due_s, _, process, life, call = heapq.heappop(heap)
            self.now_s = max(self.now_s, due_s)
            if process is not None:
                if process.life != life or not process.up:
                    continue
                if process.paused:
                    self._held.setdefault(process.name, []).append(call)
                    continue
            if call() is not SKIPPED:
                self.events += 1
            if self._failure is not None:
                raise self._failure
        self.now_s = max(self.now_s, until_s)

    def failed(self, error: BaseException) -> None:
        """Something broke that nobody else would hear of: the world ends with this event."""
        self._failure = self._failure or error

    def note(self, line: str) -> None:
        """Add a line to the history that a failure prints."""
        self.history.append(f"{self.now_s:9.3f} {line}")
        if len(self.history) > HISTORY_LINES:
            del self.history[: HISTORY_LINES // 2]

    def _keep_alive(self) -> None:
        """Both ends of each connection ping the other, and give it up when no answer comes."""
        for stream in list(self._streams.values()):
            deaf = any(self.processes[name].paused for name in stream.ends)
            stream.missed = stream.missed + 1 if deaf or self.is_cut(*stream.ends) else 0
            if stream.missed >= KEEPALIVE_MISSES:
                stream.broke()
                self._streams.pop(stream.number)
        self.at(KEEPALIVE_S, None, self._keep_alive)

    # ---- faults ----

    def start(self, name: str) -> None:
        """Start a process, or start it again."""
        process = self.processes[name]
        if process.up:
            return
        process.up, process.life, process.paused = True, process.life + 1, False
        process.started()

    def crash(self, name: str) -> None:
        """End a process without a word; its kernel ends its streams."""
        process = self.processes[name]
        if not process.up:
            return
        for stream in list(self._streams.values()):
            if name in stream.ends:
                stream.close(name)
        process.up, process.paused, process.life = False, False, process.life + 1
        self._held.pop(name, None)
        process.crashed()

    def pause(self, name: str) -> None:
        """Stop a process in its tracks; its timers and messages wait."""
        process = self.processes[name]
        if process.up and not process.paused:
            process.paused, process.pause_began_s = True, self.now_s

    def resume(self, name: str) -> None:
        """Let it go on: all that waited comes now."""
        process = self.processes[name]
        if not process.paused:
            return
        process.paused = False
        process.paused_s += self.now_s - process.pause_began_s
        for call in self._held.pop(name, []):
            self.at(0.0, process, call)

    def cut(self, one: str, other: str) -> None:
        """No message passes between the two until `heal`."""
        self._cuts.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
        """Messages pass again; of those sent meanwhile only what streams hold is not lost."""
        self._cuts.discard(frozenset((one, other)))
        for stream in list(self._streams.values()):
            if {one, other} == set(stream.ends):
                stream.healed()

    def is_cut(self, one: str, other: str) -> bool:
        """Return True if a partition is between the two."""
        return bool(self._cuts) and frozenset((one, other)) in self._cuts
