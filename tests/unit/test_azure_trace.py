"""A trace with a BOM and blank lines is read; numbers of tokens that cannot be are refused."""

from pathlib import Path

import pytest

from rose.azure_trace import read_trace
from rose.errors import RoseError

ROWS = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03,{},1\n\n2023-11-16 18:17:04,2,3\n\n"
)


def test_a_byte_order_mark_and_blank_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\ufeff" + ROWS.format("007"), encoding="utf-8")
    assert [each.prompt_tokens for each in read_trace(path)] == [7, 2]


@pytest.mark.parametrize("tokens", ["1" + "0" * 23, "1" * 5_000, "100000001"])
def test_more_tokens_than_a_request_can_have_are_refused_by_line(
    tmp_path: Path, tokens: str
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(ROWS.format(tokens))
    with pytest.raises(RoseError, match=r"t.csv:2: ContextTokens is .* at most") as refused:
        read_trace(path)
    assert len(str(refused.value)) < 300
