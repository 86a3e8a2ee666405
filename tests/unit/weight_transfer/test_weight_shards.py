"""All ranks' pieces cover every checkpoint tensor once, and say where its weights lie."""

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shard_cases import Shape, cut, dense, pieces, rows_only, weights
from weight_cases import tensor

from weight_transfer.errors import ShardError
from weight_transfer.format.digest import tiling_fault
from weight_transfer.publish.sharding import (
    Heads,
    LocalBits,
    Piece,
    column_shard,
    first_holders,
    gate_up,
    grouped_qkv,
    piece,
    row_shard,
    share,
    whole,
)
from weight_transfer.publish.shards import check_fit, hold


def faults(shapes: dict[str, tuple[int, ...]], found: Iterable[Piece]) -> dict[str, str]:
    blocks: dict[str, list] = {name: [] for name in shapes}
    for one in found:
        blocks[one.tensor].append((one.block.rows, one.block.columns))
    return {
        name: tiling_fault(
            shape[0],
            int(np.prod(shape[1:])),
            sorted(blocks[name], key=lambda b: (b[0][0], b[1][0])),
        )
        for name, shape in shapes.items()
    }


@st.composite
def shapes_and_ranks(draw: st.DrawFn) -> tuple[Shape, int]:
    ranks = draw(st.sampled_from([1, 2, 4, 8]))
    kv = draw(st.sampled_from([1, 2, 4, 8, 16]))
    vocabulary = draw(st.integers(1, 40))
    padded = -(-vocabulary // ranks) * ranks + ranks * draw(st.integers(0, 2))
    shape = Shape(
        hidden=draw(st.integers(1, 7)),
        heads=kv * ranks * draw(st.integers(1, 2)),
        kv=kv,
        dim=draw(st.integers(1, 3)),
        ffn=ranks * draw(st.integers(1, 3)),
        vocabulary=vocabulary,
        padded=padded,
        experts=ranks * draw(st.integers(1, 2)),
    )
    return shape, ranks


@given(shapes_and_ranks())
def test_pieces_of_all_ranks_tile_the_checkpoint_and_find_its_weights(
    case: tuple[Shape, int],
) -> None:
    shape, ranks = case
    model = dense(shape, 1)
    found = [pieces(shape, rank, ranks) for rank in range(ranks)]
    every = faults(shape.shapes, (one for some in found for one in some))
    assert every == dict.fromkeys(shape.shapes, "")
    for rank, some in enumerate(found):
        for part in hold(some, weights(cut(shape, model, rank, ranks)), 16):
            np.testing.assert_array_equal(part.bits, part.block.cut(model[part.tensor].bits))


@given(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=0, max_size=3))
def test_uneven_rows_tile_too(ranks: int, dims: list[int]) -> None:
    model = {"t": tensor("t", tuple(dims), 1)}
    found = [one for rank in range(ranks) for one in rows_only(model, rank, ranks)]
    rows, inner = (dims or [1])[0], int(np.prod(dims[1:]))
    tiles = [(one.block.rows, one.block.columns) for one in found]
    assert tiling_fault(rows, inner, tiles) == ""


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_columns_are_of_the_second_dimension(ranks: int) -> None:
    shape = (4, 5, 3)
    found = [one for rank in range(ranks) for one in column_shard("t", shape, "p", rank, ranks)]
    assert faults({"t": shape}, found) == {"t": ""}
    full = np.arange(60).reshape(shape)
    for rank in range(ranks):
        for one in column_shard("t", shape, "p", rank, ranks):
            first, end = share(5, rank, ranks)
            local = np.ascontiguousarray(full[:, first:end]).ravel()
            assert one.end == local.size
            block = full.reshape(4, 15)[:, slice(*one.block.columns)]
            np.testing.assert_array_equal(local, block.ravel())


def test_of_replicas_one_publishes() -> None:
    assert len(whole("t", (3,), "p", replica=0)) == 1
    assert whole("t", (3,), "p", replica=1) == ()
    heads = Heads(query=8, key_value=2, head_dim=1)
    for rank in range(8):
        found = grouped_qkv(("q", "k", "v"), heads, (5,), "p", rank, 8)
        assert [one.tensor for one in found] == (["q", "k", "v"] if rank % 4 == 0 else ["q"])


def test_of_equal_pieces_the_first_rank_has_one() -> None:
    held = [["a", "b"], ["b", "c"], [], ["a", "d", "c"]]
    assert first_holders(held) == [[0, 1], [1], [], [1]]


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ShardError, match="do not share"):
        Heads(query=6, key_value=4, head_dim=1)
    with pytest.raises(ShardError, match="cannot be divided among 3"):
        gate_up("gate", "up", (8, 2), "p", 0, 3)
    with pytest.raises(ShardError, match="cannot be divided among 2"):
        grouped_qkv(("q", "k", "v"), Heads(3, 3, 1), (4,), "p", 0, 2)
    with pytest.raises(ShardError, match="no second dimension"):
        column_shard("t", (8,), "p", 0, 2)
    with pytest.raises(ShardError, match="are not in it"):
        piece("t", (8,), "p", (0, 9))
    with pytest.raises(ShardError, match="no weights"):
        row_shard("t", (0, 4), "p", 0, 1)


def test_a_parameter_of_another_size_or_name_is_refused() -> None:
    found = row_shard("t", (8, 4), "p", 0, 2)
    check_fit(found, {"p": LocalBits("bfloat16", np.zeros(16, "<u2"))})
    with pytest.raises(ShardError, match=r"has 15 weights here, its piece takes 0\.\.16"):
        check_fit(found, {"p": LocalBits("bfloat16", np.zeros(15, "<u2"))})
    with pytest.raises(ShardError, match="no parameter p"):
        check_fit(found, {})
    with pytest.raises(ShardError, match="not carried"):
        check_fit(found, {"p": LocalBits("complex128", np.zeros(16, "<u2"))})
