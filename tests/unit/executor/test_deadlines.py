"""Incremental deadlines equal those worked out from scratch."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from executor.deadlines import DeadlineBook

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
        st.tuples(st.just("step"), st.sets(st.integers(0, 12))),
        st.tuples(st.just("end"), st.integers(0, 12)),
    ),
    max_size=60,
)


@given(events)
def test_the_earliest_deadlines_are_exact(script: list[tuple[str, object]]) -> None:
    book, slow, now_ns, names = DeadlineBook(TTFT, TPOT), SlowBook(), 1_000, 0
    for what, detail in script:
        now_ns += 10
        if what == "add":
            assert isinstance(detail, int)
            name, names = f"r{names}", names + 1
            book.arrived(name, now_ns - detail, 8)
            slow.arrivals[name], slow.left[name] = now_ns - detail, 8
        elif what == "step":
            assert isinstance(detail, set)
            chosen = {f"r{n}": 4 for n in detail if f"r{n}" in slow.arrivals}
            for name in chosen:
                slow.left[name] = max(0, slow.left[name] - 4)
                if slow.left[name] == 0:
                    slow.last_token[name] = now_ns
            if chosen:
                book.stepped(now_ns, chosen, lambda name: slow.left[name] == 0)
        else:
            name = f"r{detail}"
            book.finished([name])
            for table in (slow.arrivals, slow.left, slow.last_token):
                table.pop(name, None)
        assert book.earliest_prefill_ns == slow.prefill_ns()
        assert book.earliest_decode_ns == slow.decode_ns()
        assert book.queued_prefill_tokens == sum(
            left for name, left in slow.left.items() if name not in slow.last_token
        )
        assert len(book) == len(slow.arrivals)


def test_unknown_targets_give_no_deadline() -> None:
    book = DeadlineBook(0, 0)
    book.arrived("a", 5, 3)
    assert book.earliest_prefill_ns == 0
    book.stepped(10, {"a": 3}, lambda _: True)
    assert book.earliest_decode_ns == 0


def test_finished_requests_leave_nothing_behind() -> None:
    book = DeadlineBook(TTFT, TPOT)
    for n in range(1000):
        book.arrived(f"r{n}", n, 1)
        book.stepped(n, {f"r{n}": 1}, lambda _: True)
        book.finished([f"r{n}"])
    assert book.earliest_prefill_ns == 0
    assert (len(book), len(book._arrivals), len(book._left_out)) == (0, 0, 0)
