from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from weight_cases import steps

from weight_transfer.format.digest import digest_of, updated
from weight_transfer.format.tensors import TensorBits


@given(steps())
def test_updating_equals_recomputing(step: tuple[TensorBits, TensorBits]) -> None:
    old, new = step
    indices = np.flatnonzero(old.bits != new.bits)
    after = updated(digest_of(old.bits), indices, old.bits[indices], new.bits[indices])
    assert after == digest_of(new.bits)


@given(st.lists(st.integers(0, 0xFFFF), min_size=2, max_size=50, unique=True), st.randoms())
def test_a_permutation_has_another_digest(values: list[int], random: Random) -> None:
    shuffled = values.copy()
    random.shuffle(shuffled)
    same = digest_of(np.array(values, "<u2")) == digest_of(np.array(shuffled, "<u2"))
    assert same == (values == shuffled)


def test_blocks_do_not_show() -> None:
    bits = np.arange(600_000, dtype="<u4")
    indices = np.arange(bits.size)
    assert digest_of(bits) == updated(digest_of(np.zeros_like(bits)), indices, bits * 0, bits)


def test_the_digest_is_pinned() -> None:
    assert digest_of(np.array([1, 2, 3, 0x8000], dtype="<u2")) == PINNED
    assert digest_of(np.zeros(0, dtype="<u2")) == 0


PINNED = 0x459FACAAB954CBB2
