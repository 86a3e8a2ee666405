"""Stand-in for an inference engine: continuous batching with chunked prefill, as vLLM does it.

    submit ──► waiting ── KV for its prompt ──► prefilling ── first token ──► decoding ──► ended
                  ▲                                                  │ no KV for one more unit
                  └────────── preempted: computed again ─────────────┘

A step has one token of every decoding sequence, or several with drafts, then prompt tokens up to
its bound; running sequences go before waiting ones, the last admitted is preempted first.

The cost of simulating a step does not grow with the sequences in it. All decoding sequences get as
many tokens in the same step, so one counter of those stands for all of them, and a heap holds the
counts at which a sequence ends or needs more KV. A sequence that a step leaves out lags behind by
its tokens. With drafts that number is the average, rounded so that no fraction is lost.

An engine that has its card alone takes all steps up to the next such count as one event (`leaps`).
Each step has its own time: a question or a request in between finds the engine in its present
step.
"""

import heapq
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Protocol

from rose.simulation.clock import NS, EventQueue
from rose.simulation.engine.card import ModelledCard, ModelledKv
from rose.simulation.engine_specs import EngineFigures, StepWork

MOST_LEAP = 512
_OVER, _WAITING, _PREFILLING, _DECODING = range(4)


class SequenceOwner(Protocol):
    """Protocol of a sequence's owner, whose methods the engine calls as the sequence proceeds."""

    def first_token(self, now_ns: int) -> None:
        """Handle the sequence's first token, made at virtual time `now_ns`."""
        ...

    def finished(self, now_ns: int) -> None:
        """Handle the end of the sequence, whose last token was made at virtual time `now_ns`."""
        ...

    def aborted(self, reason: str) -> None:
        """Handle the engine's end of the sequence before its last token.

        reason: such as "revoked".
        """
        ...


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in an engine: its lengths, and its engine's bookkeeping. `ModelledEngine.made`
    counts its tokens.

    session, prefix: names under which its KV cache is found again. prefix_tokens: tokens of the
    prompt that others share. context: its prompt and, after a preemption, the tokens made before
    it.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    owner: SequenceOwner
    session: str = ""
    prefix: str = ""
    prefix_tokens: int = 0
    state: int = _OVER
    context: int = 0
    base_made: int = 0
    prefill_left: int = 0
    start: int = 0
    lag: int = 0
    mark: int = 0
    order: int = 0
    units: int = 0
    uses_prefix: bool = False
    filling: bool = False

    def __post_init__(self) -> None:
        self.context = self.prompt_tokens
        self.prefix_tokens = min(self.prefix_tokens, self.prompt_tokens)

    @property
    def over(self) -> bool:
        """True if the engine has finished or dropped the sequence."""
        return self.state == _OVER


@dataclass(slots=True, eq=False)
class _Step:
    """Step that is running. chunks: prompt tokens of each sequence. count: decoding sequences in
    it. left_out: those not in it.

    lost: sequences of `count` that ended while it ran. ends_ns: end of each step of a leap. tokens:
    those of a sequence of `count` up to the end of each, or of the one step. passed: number of
    those steps that are over and counted.
    """

    chunks: list[tuple[Sequence, int]]
    count: int
    left_out: tuple[Sequence, ...]
    work: StepWork
    lost: int = 0
    ends_ns: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    passed: int = 0


class ModelledEngine:
    """Model of one inference engine on a card. tenant: HOST or GUEST of the card."""

    def __init__(
        self,
        name: str,
        spec: EngineFigures,
        queue: EventQueue,
        card: ModelledCard,
        tenant: int,
        unit_tokens: int,
        kv_tokens: int | None = None,
        *,
        leaps: bool = False,
    ) -> None:
        """Create an engine without requests.

        leaps: it has its card alone, and may take many decode steps as one event.
        """
        self.name = name
        self.leaps = leaps
        self.spec = spec
        self.queue = queue
        self.card = card
        self.tenant = tenant
        self.kv = ModelledKv(max(1, (kv_tokens or spec.kv_tokens) // unit_tokens), unit_tokens)
        self.waiting: deque[Sequence] = deque()
        self.prefilling: dict[Sequence, None] = {}
        self.decoding: dict[Sequence, None] = {}
        self.steps = self.tokens_made = self.preemptions = self.prefilled_tokens = 0
        self.hit_tokens = 0
        # Tokens of a sequence that decodes all the time, and KV tokens of all that decode now.
        self.count = 0
        self.decode_context = 0
        self.last_step_ns = 0
        self.last_end_ns = 0
        self.paused_until_ns = 0
        self._marks: list[tuple[int, int, Sequence]] = []
        self._number = self._joined = 0
        self._step: _Step | None = None
        self._ending = False
        self._began_ns = 0
        # Fraction of a token that steps with drafts have made so far.
        self._fraction = 0.0

    # ---- requests ----

    def submit(self, sequence: Sequence) -> None:
        """Add a sequence to the engine's waiting queue, and begin a step if none runs."""
        sequence.state = _WAITING
        self.waiting.append(sequence)
        self._land()
        self.wake()

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence, wherever it is; its owner is not called."""
        self._land()
        if sequence.state == _WAITING:
            self.waiting.remove(sequence)
        elif sequence.state != _OVER:
            self._release(sequence)
        sequence.state = _OVER

    def abort_all(self, reason: str) -> int:
        """Drop all sequences, call `aborted` of their owners, and return their number."""
        doomed = [*self.decoding, *self.prefilling, *self.waiting]
        for sequence in doomed:
            self.abort(sequence)
        for sequence in doomed:
            sequence.owner.aborted(reason)
        return len(doomed)

    def made(self, sequence: Sequence) -> int:
        """Return the number of tokens that a sequence has generated by now."""
        if sequence.state != _DECODING:
            return sequence.base_made
        self.settle()
        return sequence.base_made + self.count - sequence.start - sequence.lag

    @property
    def running(self) -> int:
        """Number of sequences that have KV memory: those in prefill or decode."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def in_step(self) -> bool:
        """True while a step runs."""
        return self._step is not None

    @property
    def idle(self) -> bool:
        """True if no step runs and no sequence waits or runs."""
        return not (self.waiting or self.prefilling or self.decoding or self._step)

    @property
    def queued_prefill_tokens(self) -> int:
        """Number of prompt tokens that are still to be computed, of sequences that run or wait."""
        left = sum(each.prefill_left for each in self.prefilling)
        return left + sum(each.context for each in self.waiting)

    # ---- steps ----

    def wake(self) -> None:
        """Begin a step if none runs, a sequence is there, and neither a pause nor `allowed` forbids
        it.
        """
        if self._step is not None or self._ending:
            return
        if not (self.waiting or self.prefilling or self.decoding):
            return
        if self.queue.now_ns < self.paused_until_ns:
            return
        allowed = self.allowed()
        if allowed is None:
            return
        self._begin(*allowed)

    def allowed(self) -> tuple[int, int] | None:
        """Return the most tokens and sequences of a step that begins now; None if none may begin.

        Guests override it.
        """
        return self.spec.max_step_tokens, self.spec.max_sequences

    def pause(self, seconds: float) -> None:
        """Begin no step for so many seconds, as for an activation, then wake the engine."""
        self._land()
        self.paused_until_ns = max(self.paused_until_ns, self.queue.now_ns + round(seconds * NS))
        self.queue.at_ns(self.paused_until_ns, self.wake)

    def recompute(self) -> None:
        """Preempt all running sequences and drop cached prefixes, since their KV is of older
        weights.
        """
        self._land()
        for sequence in [*reversed(self.decoding), *reversed(self.prefilling)]:
            self.preempt(sequence, counts=False)
        self.kv.forget()

    # ---- leaps ----

    def _leap(self, step: _Step) -> None:
        """Plan all steps until a sequence ends or needs KV memory, as one event; used while nothing
        waits.
        """
        marks = self._marks
        while marks and (marks[0][2].mark != marks[0][1] or marks[0][2].state != _DECODING):
            heapq.heappop(marks)
        most = min(MOST_LEAP, marks[0][0] - self.count) if marks else 1
        if most < 2:
            return
        count, tokens = step.count, 0
        end_ns, context = self.queue.now_ns, self.decode_context
        while tokens < most:
            seconds, made = self._decode(StepWork(0, count, 0, context))
            end_ns += round(seconds * NS)
            tokens += made
            context += count * made
            step.ends_ns.append(end_ns)
            step.tokens.append(tokens)

    def _decode(self, work: StepWork) -> tuple[float, int]:
        """Return the seconds of a step that begins now, and each decoding sequence's tokens."""
        seconds, made = self.spec.decode(work)
        made += self._fraction
        self._fraction = made % 1
        return seconds, int(made)

    def settle(self) -> None:
        """Bring the counters up to date with the steps of a leap that are over by now."""
        step = self._step
        if step is None or not step.ends_ns:
            return
        over = min(bisect_right(step.ends_ns, self.queue.now_ns), len(step.ends_ns) - 1)
        new = over - step.passed
        if new <= 0:
            return
        made = self._since(step, over)
        step.passed = over
        self.count += made
        self.steps += new
        self.decode_context += made * step.count
        self.tokens_made += made * step.count
        self.last_end_ns = self._began_ns = step.ends_ns[over - 1]
        self.last_step_ns = step.ends_ns[over - 1] - step.ends_ns[over - 2] if over > 1 else 0

    @staticmethod
    def _since(step: _Step, over: int) -> int:
        """Return a sequence's tokens of the steps up to `over`, which are not counted yet."""
        return step.tokens[over - 1] - (step.tokens[step.passed - 1] if step.passed else 0)

    def _land(self) -> None:
        """Cut a leap short, so that it ends with the step that runs now."""
        step = self._step
        if step is None or not step.ends_ns:
            return
        self.settle()
        if step.passed + 1 < len(step.ends_ns):
            del step.ends_ns[step.passed + 1 :], step.tokens[step.passed + 1 :]
            self.card.shorten(self.tenant, step.ends_ns[-1])

    # ---- a step ----

    def _begin(self, tokens: int, sequences: int) -> None:
        decoding = self.decoding
        count = min(len(decoding), tokens, sequences)
        left_out = tuple(islice(reversed(decoding), len(decoding) - count))
        left = tokens - count
        chunks: list[tuple[Sequence, int]] = []
        prefill = context = 0
        places = sequences - count
        for sequence in self.prefilling:
            if left <= 0 or places <= 0:
                break
            chunk = min(left, sequence.prefill_left)
            chunks.append((sequence, chunk))
            left -= chunk
            places -= 1
        most = min(self.spec.max_sequences, sequences)
        while left > 0 and places > 0 and self.waiting and self.running < most:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            self.waiting.popleft()
            chunk = min(left, sequence.prefill_left)
            chunks.append((sequence, chunk))
            left -= chunk
            places -= 1
        for sequence, chunk in chunks:
            prefill += chunk
            context += sequence.context - sequence.prefill_left
        if count == 0 and prefill == 0:
            return
        share = count / len(decoding) if decoding else 0.0
        context += round(self.decode_context * share)
        work = StepWork(prefill, count, len(chunks), context)
        step = self._step = _Step(chunks, count, left_out, work)
        now_ns = self._began_ns = self.queue.now_ns
        self.steps += 1
        if self.leaps and not (chunks or left_out or self.waiting):
            self._leap(step)
        self.begun(work)
        if step.ends_ns:
            takes_s = (step.ends_ns[-1] - now_ns) / NS
        else:
            takes_s, made = self._decode(work)
            step.tokens.append(made)
        self.card.begin(self.tenant, takes_s, self._end)

    def begun(self, work: StepWork) -> None:
        """Do nothing; subclasses override it to observe the begin of a step."""

    def ended(self, work: StepWork, took_ns: int) -> None:
        """Do nothing; subclasses override it to observe the end of a step, after its sequences'
        owners were called.
        """

    def _end(self) -> None:
        self.settle()
        step = self._step
        assert step is not None
        now_ns = self.queue.now_ns
        self._step, self._ending = None, True
        took_ns = now_ns - self._began_ns
        self.last_step_ns, self.last_end_ns = took_ns, now_ns
        self.prefilled_tokens += step.work.prefill_tokens
        if step.count:
            made = self._since(step, len(step.tokens))
            self.count += made
            for left_out in step.left_out:
                left_out.lag += made
            self.decode_context += made * (step.count - step.lost)
            self.tokens_made += made * (step.count - step.lost)
            self._reach_marks(now_ns)
        for sequence, chunk in step.chunks:
            if sequence.state != _PREFILLING:
                continue  # Ended or preempted meanwhile.
            sequence.prefill_left -= chunk
            if sequence.prefill_left <= 0:
                self._prefilled(sequence, now_ns)
        self._ending = False
        self.ended(step.work, took_ns)
        self.wake()

    def _admit(self, sequence: Sequence) -> bool:
        """Allocate a sequence's KV memory and begin its prefill; return False if there is no room
        now.
        """
        kv, context = self.kv, sequence.context
        cached = units = 0
        if sequence.session:
            cached, units = kv.resume(sequence.session)
            if cached >= context:
                # The prompt's last token is always computed, cached or not.
                cached = context - 1
        held = False
        if not cached and sequence.prefix and kv.need(sequence.prefix_tokens) < kv.units:
            cached, held = kv.join(sequence.prefix, sequence.prefix_tokens)
            if held:
                units = kv.shared_units(sequence.prefix)
                cached = min(cached, context - 1)
        need = kv.need(context + 1)
        if not kv.allocate(max(0, need - units)):
            if held:
                kv.leave(sequence.prefix)
            elif units:
                kv.keep(sequence.session, cached, units)
            return False
        sequence.uses_prefix = held
        sequence.filling = held and cached == 0
        # Units of the sequence alone; a shared prefix has its own.
        sequence.units = need - (kv.shared_units(sequence.prefix) if held else 0)
        if not held and units > need:
            sequence.units = units
        sequence.prefill_left = context - cached
        sequence.state = _PREFILLING
        self.hit_tokens += cached
        self.prefilling[sequence] = None
        return True

    def _prefilled(self, sequence: Sequence, now_ns: int) -> None:
        """Move a sequence from prefill to decode, with its next token made, and call its owner."""
        del self.prefilling[sequence]
        if sequence.filling:
            self.kv.fill(sequence.prefix)
            sequence.filling = False
        self.tokens_made += 1
        first = sequence.base_made == 0
        sequence.base_made += 1
        sequence.context += 1
        sequence.state = _DECODING
        sequence.start, sequence.lag = self.count, 0
        self._joined += 1
        sequence.order = self._joined
        self.decoding[sequence] = None
        self.decode_context += sequence.context
        if first:
            sequence.owner.first_token(now_ns)
            if sequence.state != _DECODING:
                return
        if sequence.base_made >= sequence.output_tokens:
            self._finish(sequence, now_ns)
        else:
            self._mark(sequence)

    def _mark(self, sequence: Sequence) -> None:
        """Record the count of decode steps at which the sequence ends or needs its next KV unit."""
        made = self.count - sequence.start - sequence.lag
        left = sequence.output_tokens - sequence.base_made - made
        context = sequence.context + made
        room = (sequence.units + self._prefix_units(sequence)) * self.kv.unit_tokens - context
        self._number += 1
        sequence.mark = self._number
        due = self.count + min(left, max(1, room))
        heapq.heappush(self._marks, (due, self._number, sequence))

    def _prefix_units(self, sequence: Sequence) -> int:
        return self.kv.shared_units(sequence.prefix) if sequence.uses_prefix else 0

    def _reach_marks(self, now_ns: int) -> None:
        marks = self._marks
        due: list[tuple[int, int, Sequence]] = []
        while marks and marks[0][0] <= self.count:
            _, number, sequence = heapq.heappop(marks)
            due.append((sequence.order, number, sequence))
        if len(due) > 1:
            # Sequences take memory in vLLM's order: the one that was admitted first comes first.
            due.sort(key=itemgetter(0))
        for _, number, sequence in due:
            if sequence.mark != number or sequence.state != _DECODING:
                continue
            made = self.count - sequence.start - sequence.lag
            beyond = sequence.base_made + made - sequence.output_tokens
            if beyond >= 0:
                self.tokens_made -= beyond
                self._finish(sequence, now_ns)
                continue
            held = (sequence.units + self._prefix_units(sequence)) * self.kv.unit_tokens
            if sequence.context + made >= held:
                self._grow(sequence)
            if sequence.state == _DECODING:
                self._mark(sequence)

    def _grow(self, sequence: Sequence) -> None:
        """Allocate one more KV unit for a sequence; preempt the last admitted sequences until there
        is room.
        """
        while not self.kv.allocate(1):
            last = next(reversed(self.prefilling or self.decoding))
            self.preempt(last)
            if last is sequence:
                return
        sequence.units += 1

    def preempt(self, sequence: Sequence, *, counts: bool = True) -> None:
        """Move a running sequence to the front of the waiting queue without its KV, which is
        computed again.
        """
        made = self.made(sequence)
        self._leave(sequence)
        self.kv.free(sequence.units)
        sequence.units = 0
        sequence.context = sequence.prompt_tokens + made
        sequence.base_made = made
        sequence.state = _WAITING
        self.waiting.appendleft(sequence)
        self.preemptions += counts

    def _finish(self, sequence: Sequence, now_ns: int) -> None:
        self._release(sequence)
        sequence.base_made = sequence.output_tokens
        sequence.state = _OVER
        sequence.owner.finished(now_ns)

    def _release(self, sequence: Sequence) -> None:
        """Take a running sequence out of the engine; its session's prefix stays in the KV cache."""
        made = self.made(sequence)
        prefilled = sequence.state == _DECODING
        prefix_units = self._prefix_units(sequence)
        self._leave(sequence)
        computed = sequence.prompt_tokens + made if prefilled else 0
        if sequence.session and computed and not prefix_units:
            self.kv.keep(sequence.session, computed, sequence.units)
        elif sequence.session and computed:
            # The session keeps a copy of the shared part, as it would on another replica.
            extra = self.kv.allocate(prefix_units)
            units = sequence.units + (prefix_units if extra else 0)
            if extra:
                self.kv.keep(sequence.session, computed, units)
            else:
                self.kv.free(units)
        else:
            self.kv.free(sequence.units)
        sequence.units = 0
        sequence.base_made = made

    def _leave(self, sequence: Sequence) -> None:
        if sequence.state == _DECODING:
            made = self.count - sequence.start - sequence.lag
            self.decode_context -= sequence.context + made
            del self.decoding[sequence]
            if self._step is not None and sequence not in self._step.left_out:
                self._step.lost += 1
        else:
            del self.prefilling[sequence]
        if sequence.uses_prefix:
            self.kv.leave(sequence.prefix)
            sequence.uses_prefix = sequence.filling = False
