"""Advice in figures: what a node would lend, now and summed up."""

import pytest

from elastic_scheduler import HarvestMode
from elastic_scheduler.capacity import AdviceBook, EffectivePolicy, Lendable
from elastic_scheduler.capacity.advice import MOST_STEP_S, lendable

GIB = 1 << 30
ACTIVE = HarvestMode.ACTIVE


@pytest.mark.parametrize(
    ("policy", "guest_bytes", "busy", "found"),
    [
        (EffectivePolicy(), 4 * GIB, 0.25, Lendable(4 * GIB, 0.75)),
        (EffectivePolicy(memory_bytes=GIB, compute=0.5), 4 * GIB, 0.25, Lendable(GIB, 0.5)),
        (EffectivePolicy(memory_bytes=GIB, compute=0.5), GIB // 2, 0.75, Lendable(GIB // 2, 0.25)),
        (EffectivePolicy(), None, None, Lendable(None, None)),
    ],
    ids=["uncapped", "capped", "below its caps", "nobody says"],
)
def test_a_node_would_lend_what_it_has_within_its_caps(
    policy: EffectivePolicy, guest_bytes: int | None, busy: float | None, found: Lendable
) -> None:
    assert lendable(ACTIVE, policy, guest_bytes, busy) == found


@pytest.mark.parametrize("would", [mode for mode in HarvestMode if mode is not ACTIVE])
def test_a_node_that_would_be_held_back_would_lend_nothing(would: HarvestMode) -> None:
    assert lendable(would, EffectivePolicy(), GIB, 0.0) == Lendable(0, 0.0)


def test_what_held_between_judgements_is_summed_up() -> None:
    book = AdviceBook()
    book.heard("n", GIB)

    def judge(would: HarvestMode, busy: float, now_s: float) -> None:
        book.judged([("n", would, EffectivePolicy())], lambda node: busy, now_s)

    judge(ACTIVE, 0.5, 10.0)
    judge(HarvestMode.HOLD_AND_DRAIN, 0.9, 14.0)
    judge(ACTIVE, 0.0, 15.0)
    advice = book.of("n")
    assert (advice.over_s, advice.byte_s, advice.compute_s) == (5.0, 4.0 * GIB, 2.0)
    assert advice.now == Lendable(GIB, 1.0)
    judge(ACTIVE, 0.0, 1_000.0)
    assert book.of("n").over_s == 5.0 + MOST_STEP_S, "while nobody judged nobody knows"


def test_a_node_that_is_lost_begins_anew() -> None:
    book = AdviceBook()
    book.heard("n", GIB)
    book.judged([("n", ACTIVE, EffectivePolicy())], lambda node: 0.5, 0.0)
    book.forget("n")
    assert book.of("n").now == Lendable(None, None)
