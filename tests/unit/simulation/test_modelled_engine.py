"""The modelled engine batches as one that looks at every sequence in every step does."""

import random
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation_cases import ENGINE

from rose.simulation import EngineFigures, StepWork
from rose.simulation.clock import NS, EventQueue
from rose.simulation.engine.batching import ModelledEngine, Sequence
from rose.simulation.engine.card import GUEST, HOST, ModelledCard, ModelledKv
from rose.simulation.engine_specs import DraftFigures
from slo import StepProfile

UNIT = 16
# 10 ms, and 1 ms for each token.
SLOPE = StepProfile(0.01, 0.001, 0.0, 0.0)


@dataclass(eq=False)
class Owner:
    """Notes when its tokens came."""

    queue: EventQueue
    first_s: float = -1.0
    done_s: float = -1.0
    aborts: list[str] = field(default_factory=list)

    def first_token(self, now_ns: int) -> None:
        self.first_s = now_ns / NS

    def finished(self, now_ns: int) -> None:
        self.done_s = now_ns / NS

    def aborted(self, reason: str) -> None:
        self.aborts.append(reason)


def engine(kv_tokens: int = 1_024, spec: EngineFigures = ENGINE) -> ModelledEngine:
    queue = EventQueue()
    return ModelledEngine("e", spec, queue, ModelledCard(queue), GUEST, UNIT, kv_tokens)


@dataclass(eq=False)
class Plain:
    """A sequence of the engine below."""

    number: int
    prompt: int
    output: int
    made: int = 0
    left: int = 0
    units: int = 0
    first_s: float = -1.0
    done_s: float = -1.0


def _need(tokens: int) -> int:
    return -(-tokens // UNIT)


def plain_history(  # noqa: C901 -- as plain as it can be
    asked: list[tuple[float, int, int]], units: int
) -> list[Plain]:
    """Simulate an engine that keeps lists and checks each sequence in each step."""
    all_ = [Plain(number, prompt, output) for number, (_, prompt, output) in enumerate(asked)]
    arrivals = deque(sorted(range(len(asked)), key=lambda at: (asked[at][0], at)))
    waiting: deque[Plain] = deque()
    prefilling: list[Plain] = []
    decoding: list[Plain] = []
    now_s = 0.0
    free = units
    while arrivals or waiting or prefilling or decoding:
        if not (waiting or prefilling or decoding):
            now_s = max(now_s, asked[arrivals[0]][0])
        while arrivals and asked[arrivals[0]][0] <= now_s + 1e-12:
            waiting.append(all_[arrivals.popleft()])
        batch, left, chunks = list(decoding), ENGINE.max_step_tokens - len(decoding), []
        for each in prefilling:
            chunks.append((each, min(left, each.left)))
            left -= chunks[-1][1]
        while left > 0 and waiting and len(prefilling) + len(decoding) < ENGINE.max_sequences:
            each = waiting[0]
            context = each.prompt + each.made
            if _need(context + 1) > free:
                break
            waiting.popleft()
            each.units, each.left = _need(context + 1), context
            free -= each.units
            prefilling.append(each)
            chunks.append((each, min(left, each.left)))
            left -= chunks[-1][1]
        context = sum(each.prompt + each.made for each in batch)
        context += sum(each.prompt + each.made - each.left for each, _ in chunks)
        work = StepWork(sum(c for _, c in chunks), len(batch), len(chunks), context)
        now_s = round(round(now_s * NS) + round(ENGINE.seconds(work) * NS)) / NS
        for each in batch:
            each.made += 1
        for each in batch:
            if each not in decoding:
                continue
            if each.made >= each.output:
                decoding.remove(each)
                free += each.units
                each.done_s = now_s
            elif each.prompt + each.made >= each.units * UNIT:
                while free < 1:
                    last = (prefilling or decoding)[-1]
                    (prefilling or decoding).remove(last)
                    free += last.units
                    waiting.appendleft(last)
                    if last is each:
                        break
                if each in decoding:
                    each.units += 1
                    free -= 1
        for each, chunk in chunks:
            if each not in prefilling:
                continue
            each.left -= chunk
            if each.left == 0:
                prefilling.remove(each)
                each.first_s = now_s if each.made == 0 else each.first_s
                each.made += 1
                if each.made >= each.output:
                    free += each.units
                    each.done_s = now_s
                else:
                    decoding.append(each)
    return all_


@settings(max_examples=24, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_it_makes_the_history_of_an_engine_that_looks_at_every_sequence(
    seed: int,
    scarce: bool,
) -> None:
    rng = random.Random(seed)
    arrivals = rng.sample(range(2_000), 14)
    asked = [(at_ms / 1e3, rng.randint(1, 400), rng.randint(1, 60)) for at_ms in arrivals]
    units = 100 if scarce else 600
    e = engine(units * UNIT)
    owners = [Owner(e.queue) for _ in asked]
    for at, ((at_s, prompt, output), owner) in enumerate(zip(asked, owners, strict=True)):
        sequence = Sequence(str(at), prompt, output, owner)
        e.queue.at_ns(round(at_s * NS), partial(e.submit, sequence))
    e.queue.run(1_000)
    for owner, plain in zip(owners, plain_history(asked, units), strict=True):
        assert abs(owner.done_s - plain.done_s) < 1e-6
    assert e.idle
    assert e.kv.used == e.decode_context == 0


def test_the_next_turn_of_a_session_computes_only_what_is_new() -> None:
    e = engine()
    e.submit(Sequence("a", 400, 4, Owner(e.queue), session="s"))
    e.queue.run(10)
    before = e.prefilled_tokens
    e.submit(Sequence("b", 420, 4, Owner(e.queue), session="s"))
    e.queue.run(20)
    assert e.prefilled_tokens - before == 420 - 404
    e.recompute()
    e.submit(Sequence("c", 440, 4, Owner(e.queue), session="s"))
    e.queue.run(30)
    assert e.prefilled_tokens - before == 16 + 440


def test_a_prompt_that_a_group_shares_is_held_once() -> None:
    e = engine()
    for name in "ab":
        e.submit(Sequence(name, 350, 30, Owner(e.queue), prefix="p", prefix_tokens=320))
        e.queue.run(e.queue.now_s + 0.2)
    assert e.prefilled_tokens == 350 + 30
    assert e.kv.used < 2 * e.kv.need(350)


def test_an_abort_in_a_step_leaves_nothing_behind() -> None:
    e = engine()
    sequences = [Sequence(str(n), 50, 40, Owner(e.queue)) for n in range(4)]
    for sequence in sequences:
        e.submit(sequence)
    e.queue.run(0.5)
    assert e.in_step
    for sequence in sequences:
        e.abort(sequence)
    e.queue.run(5)
    assert e.idle
    assert e.kv.used == e.decode_context == 0


def test_a_step_with_a_small_budget_leaves_the_last_ones_out() -> None:
    e = engine()
    sequences = [Sequence(str(n), 50, 40, Owner(e.queue)) for n in range(4)]
    for sequence in sequences:
        e.submit(sequence)
    e.queue.run(0.2)
    made = [e.made(each) for each in sequences]
    e.allowed = lambda: (2, 16)  # type: ignore[method-assign]
    e.queue.run(0.6)
    grown = [e.made(each) - before for each, before in zip(sequences, made, strict=True)]
    assert grown[0] == grown[1] > 5
    assert max(grown[2:]) <= 1


def test_two_steps_at_once_share_their_card() -> None:
    queue = EventQueue()
    card = ModelledCard(queue, host_share=0.5)
    ends: dict[str, float] = {}
    card.begin(GUEST, 1.0, lambda: ends.setdefault("guest", queue.now_s))
    queue.at_ns(
        NS // 2, lambda: card.begin(HOST, 0.2, lambda: ends.setdefault("host", queue.now_s))
    )
    queue.run(5)
    # Half a second alone, then 0.4 s in which each is half as fast, then 0.3 s alone.
    assert ends == {"host": 0.9, "guest": 1.2}
    assert card.any_busy_ns() == round(1.2 * NS)


def test_drafts_save_time_where_a_step_has_room_for_them() -> None:
    def takes_s(sequences: int, drafts: DraftFigures | None = None) -> float:
        modelled = engine(spec=replace(ENGINE, profile=SLOPE, drafts=drafts))
        owners = [Owner(modelled.queue) for _ in range(sequences)]
        for number, owner in enumerate(owners):
            modelled.submit(Sequence(str(number), 1, 41, owner))
        modelled.queue.run(60)
        assert modelled.tokens_made == 41 * sequences
        return max(owner.done_s - owner.first_s for owner in owners)

    # A step of one sequence takes 11 ms, of nine tokens 19 ms; of 16 sequences 26 ms and 154 ms.
    assert takes_s(1) == pytest.approx(40 * 0.011)
    assert takes_s(1, DraftFigures(2.5)) == pytest.approx(40 * 0.019 / 2.5)
    assert takes_s(1, DraftFigures(1.5)) == takes_s(1)
    assert takes_s(16) == pytest.approx(40 * 0.026, rel=0.05)
    assert takes_s(16, DraftFigures(2.5)) == pytest.approx(takes_s(16), rel=0.05)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 300)), max_size=40))
def test_kv_memory_is_never_lost_or_made(steps: list[tuple[int, int]]) -> None:
    kv = ModelledKv(50, 16)
    held: list[int] = []
    for kind, size in steps:
        units = kv.need(size)
        if kind <= 1 and kv.allocate(units):
            held.append(units)
        elif kind == 2 and held:
            kv.free(held.pop())
        elif kind == 3 and held:
            kv.keep(f"s{size % 3}", size, held.pop())
        elif kind == 4:
            _, units = kv.resume(f"s{size % 3}")
            if units:
                held.append(units)
        assert kv.used == sum(held)
        assert kv.used + kv.cached + kv.plain == 50
        assert kv.plain >= 0
