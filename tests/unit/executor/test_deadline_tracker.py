"""Incremental deadlines equal those worked out from scratch."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from executor.host.state_publisher import DeadlineTracker

TTFT, TPOT = 1_000, 100


@dataclass
class SlowBook:
    """The same figures from every request's own history."""

    arrivals: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    last_token: dict[str, int] = field(default_factory=dict)

    def prefill_ns(self) -> int:
        waiting = [at for id_, at in self.arrivals.items() if id_ not in self.last_token]
        return min(waiting) + TTFT if waiting else 0

    def decode_ns(self) -> int:
        return min(self.last_token.values()) + TPOT if self.last_token else 0


events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 50)),
        st.tuples(st.just("begin"), st.sets(st.integers(0, 12))),
        st.tuples(st.just("end_step"), st.just(0)),
        st.tuples(st.just("finish"), st.integers(0, 12)),
    ),
    max_size=80,
)


class Script:
    """Plays one engine to both books; with asynchronous scheduling two steps are in flight."""

    def __init__(self, in_flight: int) -> None:
        self.book, self.slow = DeadlineTracker(TTFT, TPOT), SlowBook()
        self.now_ns = 1_000
        self._in_flight = in_flight
        self._flight: list[dict[str, int]] = []
        self._names = 0
        self._begun: set[str] = set()

    def add(self, age_ns: int) -> None:
        name, self._names = f"r{self._names}", self._names + 1
        self.book.arrived(name, self.now_ns - age_ns, 8)
        self.slow.arrivals[name], self.slow.left[name] = self.now_ns - age_ns, 8

    def begin(self, numbers: set[int]) -> None:
        step = {f"r{n}": 4 for n in sorted(numbers) if f"r{n}" in self.slow.arrivals}
        if step and len(self._flight) < self._in_flight:
            self.book.begun(step.keys() - self._begun)
            self._begun |= step.keys()
            self._flight.append(step)

    def end_step(self) -> None:
        if not self._flight:
            return
        step, left = self._flight.pop(0), self.slow.left
        for name in step.keys() & left.keys():
            left[name] = max(0, left[name] - 4)
            if left[name] == 0:
                self.slow.last_token[name] = self.now_ns
        self.book.stepped(self.now_ns, step, lambda name: left.get(name, 0) == 0)

    def finish(self, number: int) -> None:
        self.book.finished([f"r{number}"])
        for table in (self.slow.arrivals, self.slow.left, self.slow.last_token):
            table.pop(f"r{number}", None)


@given(events, st.sampled_from([1, 2, 3]))
def test_the_earliest_deadlines_are_exact(script: list[tuple[str, Any]], in_flight: int) -> None:
    play = Script(in_flight)
    for what, detail in script:
        play.now_ns += 10
        if what == "end_step":
            play.end_step()
        else:
            getattr(play, what)(detail)
        book, slow = play.book, play.slow
        assert book.earliest_prefill_ns == slow.prefill_ns()
        assert book.earliest_decode_ns == slow.decode_ns()
        assert book.queued_prefill_tokens == sum(
            left for name, left in slow.left.items() if name not in slow.last_token
        )
        assert len(book) == len(slow.arrivals)


def test_unknown_targets_give_no_deadline() -> None:
    book = DeadlineTracker(0, 0)
    book.arrived("a", 5, 3)
    assert book.earliest_prefill_ns == 0
    book.begun(["a"])
    book.stepped(10, {"a": 3}, lambda _: True)
    assert book.earliest_decode_ns == 0


def test_finished_requests_leave_nothing_behind() -> None:
    book = DeadlineTracker(TTFT, TPOT)
    for n in range(1000):
        book.arrived(f"r{n}", n, 1)
        book.begun([f"r{n}"])
        book.stepped(n, {f"r{n}": 1}, lambda _: True)
        book.finished([f"r{n}"])
    assert book.earliest_prefill_ns == 0
    kept = (book._arrivals, book._overtaken, book._left_out, book._gone)
    assert [len(book), *map(len, kept)] == [0, 0, 0, 0, 0]


def test_a_request_that_ended_in_its_step_does_not_stand_in_for_one_left_out() -> None:
    book = DeadlineTracker(TTFT, TPOT)
    for name in ("a", "b"):
        book.arrived(name, 0, 1)
    book.begun(["a", "b"])
    book.stepped(10, {"a": 1, "b": 1}, lambda _: True)
    book.begun([])
    book.finished(["a"])
    book.stepped(20, {"a": 1}, lambda _: True)
    assert book.earliest_decode_ns == 10 + TPOT, "b waits since its token at 10"
