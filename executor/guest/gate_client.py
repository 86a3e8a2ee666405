"""Guest's clients of the control page: the gate before a step, the gate of a start, the watchdog.

`StartGate` lets each forward pass of an engine's start wait for an idle host, as steps do later:

    profile run, warm-up, graph capture ──► model(...) ──► gate: host idle, grant live? ──► runs

The scheduler that asks the gate is made last, so nothing else holds back the passes of a start.

`Watchdog` ends the process when it is orphaned or to be killed. It is a thread of its own, because
an idle engine core runs no scheduler code at all and an orphaned guest must still end itself.
"""

import logging
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple, Self

from executor.control_page.page import ControlPage
from executor.control_page.seqlock_records import Grant, GrantMode, GuestState
from executor.engine_settings import GUEST, POLICY_VERSION, EngineSettings
from executor.freeze_reason import FreezeReason
from executor.step_decision import GateLimits, Run, Yield, decide, may_use_idle_host
from executor.step_log import StepLog
from slo import StepModel, StepProfile

# A first guess, which measured steps correct within a few; they may move it further than a profile.
FIRST_MODEL: Final = StepModel(
    StepProfile(base_s=0.005, per_token_s=20e-6, per_sequence_s=10e-6), max_correction=32.0
)
YIELD_SLEEP_S = 0.0005
# A refused step is asked for again this often before the engine takes an empty one, which all of
# its ranks would hear of; the engine looks at its aborts only then.
YIELD_SLEEPS: Final = 8
BEAT_NS = 50_000_000
TICK_S: Final = 0.02
EXIT_ORPHANED: Final = 75
EXIT_KILLED: Final = 76
EXIT_BROKEN: Final = 77
GATED_START: Final = "ROSE_GATED_START"
PAUSE_S: Final = 0.002

logger = logging.getLogger("vllm.rose.start")


class EngineLoad(NamedTuple):
    """Load of the guest's scheduler: running and waiting requests, and KV blocks in use."""

    running: int
    waiting: int
    kv_used: int


class KvMapped(NamedTuple):
    """KV memory of the guest at one moment, in bytes and granules of `granule_bytes`."""

    bytes_mapped: int
    granules_mapped: int = 0
    granules_total: int = 0
    granule_bytes: int = 0


class GateClient:
    """Guest's client of the control page: asks the gate before each step and publishes the guest.

    The engine's thread and the watchdog's both write the guest section, under one lock.
    """

    def __init__(
        self,
        page: ControlPage,
        kv: KvMapped,
        limits: GateLimits | None = None,
        model: StepModel = FIRST_MODEL,
        block_tokens: int = 0,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Publish a first state on the page.

        kv: KV memory mapped now. model: predicts the guest's steps, by the KV in use too.
        block_tokens: tokens of KV in a block.
        """
        self._page = page
        self._limits = limits or GateLimits()
        self._model = model
        self._block_tokens = block_tokens
        self._clock_ns = clock_ns
        self._sleep = sleep
        self._environ = environ
        self._step_log = StepLog.from_environ(environ, GUEST)
        self._lock = threading.Lock()
        self._state = GuestState(**kv._asdict())
        self._in_flight = 0
        self._step_began_ns = 0
        self._yielding_since_ns: int | None = None
        self.beat(clock_ns())

    @property
    def model(self) -> StepModel:
        """Step model of the guest, corrected by the measured steps so far."""
        return self._model

    def ask(
        self, load: EngineLoad, memory_wanted: Callable[[], bool] = lambda: False
    ) -> Run | Yield:
        """Return the gate's verdict on a step; call it once before each, with requests pending.

        A refusal is returned after YIELD_SLEEPS sleeps, without which the engine's loop would spin;
        after the first one if `memory_wanted` then, or a step in flight has an output to process.
        """
        verdict = self._decide(load)
        for _ in range(YIELD_SLEEPS):
            if isinstance(verdict, Run):
                break
            self._sleep(YIELD_SLEEP_S)
            verdict = self._decide(load)
            if self._in_flight or memory_wanted():
                break
        return verdict

    def _decide(self, load: EngineLoad) -> Run | Yield:
        # Read before the clock: a state written meanwhile is not from the future.
        view = self._page.host_view()
        now_ns = self._clock_ns()
        verdict = decide(
            view,
            self._page.grant.peek(),
            self._model,
            now_ns,
            self._limits,
            load.kv_used * self._block_tokens,
        )
        yields = isinstance(verdict, Yield)
        since_ns, self._yielding_since_ns = self._yielding_since_ns, now_ns if yields else None
        with self._lock:
            state = self._state
            silent = verdict.reason == state.gate_reason and now_ns - state.heartbeat_ns < BEAT_NS
            self._state = replace(
                state,
                yielded_ns=state.yielded_ns + (now_ns - since_ns if since_ns is not None else 0),
                gate_reason=verdict.reason,
            )
            if yields and not silent:
                self._publish(now_ns, load)
        return verdict

    def idle(self, load: EngineLoad) -> None:
        """Publish the load of a guest without requests, whose time no longer counts as yielded."""
        self._yielding_since_ns = None
        with self._lock:
            self._publish(self._clock_ns(), load)

    def mapped(self, kv: KvMapped, load: EngineLoad) -> None:
        """Set the guest's mapped KV memory, and publish it with `load` if it changed."""
        with self._lock:
            state = replace(self._state, **kv._asdict())
            if state != self._state:
                self._state = state
                self._publish(self._clock_ns(), load)

    def grant(self) -> Grant | None:
        """Return the grant on the page; None if there is none or it cannot be read."""
        return self._page.grant.peek()

    def scheduled(self, load: EngineLoad, tokens: int) -> None:
        """Record and publish that a step of `tokens` begins; with 0 tokens do nothing."""
        if tokens == 0:
            return
        now_ns = self._clock_ns()
        if self._in_flight == 0:
            self._step_began_ns = now_ns
            if self._step_log is not None:
                self._step_log.begin()
        self._in_flight += 1
        with self._lock:
            self._state = replace(self._state, step_seq=self._state.step_seq + 1, in_step=True)
            self._publish(now_ns, load)

    def stepped(self, load: EngineLoad, tokens: int, sequences: int, sampled: int) -> None:
        """Record and publish that a step ended, and correct the step model by its time.

        tokens, sequences: of the step; with 0 tokens do nothing. sampled: new output tokens.
        """
        if tokens == 0:
            return
        now_ns = self._clock_ns()
        took_ns = now_ns - self._step_began_ns
        if self._step_log is not None:
            self._step_log.step(self._step_began_ns, now_ns, tokens, sequences, sampled)
        self._step_began_ns = now_ns
        self._in_flight = max(0, self._in_flight - 1)
        context_tokens = load.kv_used * self._block_tokens
        self._model = self._model.observed(tokens, sequences, took_ns / 1e9, context_tokens)
        with self._lock:
            self._state = replace(
                self._state,
                in_step=self._in_flight > 0,
                last_step_ns=took_ns,
                tokens_total=self._state.tokens_total + sampled,
            )
            self._publish(now_ns, load)

    def beat(self, now_ns: int) -> None:
        """Publish the last state again, unless one was published within BEAT_NS; for any thread."""
        with self._lock:
            if now_ns - self._state.heartbeat_ns >= BEAT_NS:
                self._publish(now_ns, None)

    def _publish(self, now_ns: int, load: EngineLoad | None) -> None:
        # Under the lock. Without a load the last requests are still the latest known.
        state = replace(
            self._state,
            policy_version=int(self._environ.get(POLICY_VERSION, "0")),
            heartbeat_ns=now_ns,
        )
        if load is not None:
            state = replace(state, running=load.running, waiting=load.waiting, kv_used=load.kv_used)
        self._state = state
        self._page.guest.write(state)


class GrantLiveness:
    """Rule by which a guest ends itself: its grant says so, or is older than `orphan_ns`.

    A grant that old means that the node daemon is gone. The clock is passed in.
    """

    def __init__(self, started_ns: int, orphan_ns: int) -> None:
        """Begin at `started_ns`, from which a guest without any grant counts. Raises ValueError."""
        if orphan_ns <= 0:
            raise ValueError(f"orphan_ns is {orphan_ns}; give a positive time")
        self._last_sign_ns = started_ns
        self._orphan_ns = orphan_ns

    def step(self, now_ns: int, grant: Grant | None) -> FreezeReason | None:
        """Return the reason to end the process now, None to continue.

        grant: None if it cannot be read.
        """
        if grant is not None:
            if grant.mode is GrantMode.KILL:
                return FreezeReason.KILLED
            # A heartbeat from the future is not a sign of life.
            if grant.heartbeat_ns <= now_ns:
                self._last_sign_ns = max(self._last_sign_ns, grant.heartbeat_ns)
        return FreezeReason.ORPHANED if now_ns - self._last_sign_ns > self._orphan_ns else None


class Watchdog(threading.Thread):
    """Thread that checks the grant and beats on the page, and ends the process if it must.

    An engine over several ranks ends whole: with the first rank that ends, and no rank outlives it.
    """

    def __init__(
        self,
        page: ControlPage,
        orphan: GrantLiveness,
        beat: Callable[[int], None],
        leave: Callable[[int], object] = os._exit,
        tick_s: float = TICK_S,
        ranks: Collection[int] = (),
    ) -> None:
        """Prepare to watch; ranks: process ids of the engine's ranks. Raises ProcessLookupError."""
        super().__init__(name="rose-watchdog", daemon=True)
        self._page = page
        self._orphan = orphan
        self._beat = beat
        self._leave = leave
        self._tick_s = tick_s
        self._ranks = [os.pidfd_open(pid) for pid in ranks]
        self._ended = select.poll()
        for rank in self._ranks:
            self._ended.register(rank, select.POLLIN)

    def run(self) -> None:
        """Watch until the process has to end, then call `leave` with the exit code.

        An error of the watchdog ends the process too.
        """
        code = EXIT_BROKEN
        try:
            code = self._watch()
        finally:
            for rank in self._ranks:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(rank, signal.SIGKILL)
            self._leave(code)

    def _watch(self) -> int:
        # Bounded by the life of the process: there is nothing else for this thread to return to.
        while True:
            now_ns = time.monotonic_ns()
            why = self._orphan.step(now_ns, self._page.grant.peek())
            if why is not None:
                # os._exit flushes nothing, and a frozen engine may hold every lock of logging.
                os.write(sys.stderr.fileno(), f"rose: guest ends itself: {why}\n".encode())
                return EXIT_KILLED if why is FreezeReason.KILLED else EXIT_ORPHANED
            if self._ended.poll(0):
                os.write(sys.stderr.fileno(), b"rose: guest ends itself: a rank of it ended\n")
                return EXIT_BROKEN
            self._beat(now_ns)
            time.sleep(self._tick_s)


class StartGate:
    """Gate for the forward passes of a guest's start: opens on an idle host and a live grant."""

    def __init__(
        self,
        page: ControlPage,
        limits: GateLimits | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._page = page
        self._limits = limits or GateLimits()
        self._clock_ns = clock_ns
        self._sleep = sleep
        self.passes = 0
        self.waited_ns = 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self | None:
        """Return the gate of this process; None for an engine that is no guest or starts ungated.

        Raises ExecutorError for invalid settings or a page that cannot be opened.
        """
        settings = EngineSettings.from_environ(environ)
        if settings.role != GUEST or environ.get(GATED_START) != "1":
            return None
        return cls(ControlPage.open(settings.page_path, settings.page_group))

    def wait(self, most_s: float = math.inf) -> bool:
        """Block until a pass may begin, or for `most_s`; return True if the pass may begin.

        The watchdog ends an orphaned guest.
        """
        began_ns, waited_s = self._clock_ns(), 0.0
        logged = self.passes > 0 or self.waited_ns > 0
        while not (opened := self._open) and waited_s < most_s:
            if not logged:
                logger.info("the start waits until its host is idle and a grant is live")
                logged = True
            self._sleep(PAUSE_S)
            waited_s = (self._clock_ns() - began_ns) / 1e9
        self.passes += opened
        self.waited_ns += self._clock_ns() - began_ns
        return opened

    @property
    def _open(self) -> bool:
        grant = self._page.grant.peek()
        view = self._page.host_view()
        return may_use_idle_host(view, grant, self._clock_ns(), self._limits)

    def tell(self) -> None:
        """Log how long the passes of the start waited; warn if no pass asked."""
        if self.passes:
            waited_s = self.waited_ns / 1e9
            logger.info("%d passes of the start waited %.1f s for the host", self.passes, waited_s)
        else:
            logger.warning("the start asked the gate for no pass: this model runs beside its host")
