import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.replica.token_versions import UnknownVersionError, split_spans, version_number


@given(st.lists(st.integers(1, 5), max_size=6), st.integers(0, 20), st.integers(1, 20), st.data())
def test_spans_tile_the_tokens_and_name_each_ones_version(
    gaps: list[int], first: int, count: int, data: st.DataObject
) -> None:
    bounds = [0]
    for gap in gaps:
        bounds.append(bounds[-1] + gap)
    starts = [("default" if i == 0 else str(10 + i), at) for i, at in enumerate(bounds)]
    spans = split_spans(starts, first, count)
    assert [token for _, a, b in spans for token in range(a, b)] == list(range(count))
    assert all(left[0] != right[0] for left, right in itertools.pairwise(spans))
    token = data.draw(st.integers(0, count - 1))
    expected = version_number([name for name, at in starts if at <= first + token][-1])
    assert [version for version, a, b in spans if a <= token < b] == [expected]


@pytest.mark.parametrize("starts", [[], [("3", 5)]])
def test_a_token_without_a_version_is_an_error_never_version_zero(
    starts: list[tuple[str, int]],
) -> None:
    with pytest.raises(UnknownVersionError):
        split_spans(starts, 4, 1)


def test_a_version_that_is_no_integer_is_an_error() -> None:
    assert version_number("default") == 0
    assert version_number("17") == 17
    with pytest.raises(UnknownVersionError, match="main-2"):
        version_number("main-2")
