"""Whatever is wrong with bytes from outside, their reader says so by the error it documents."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rose.client.errors import AnswerBroken
from rose.client.wire import decode_event, decode_turn, message
from rose.errors import RoseError, decoded
from rose.logs.eventlog import read_lines

DEEP = b"[" * 30_000 + b"]" * 30_000
WRONG = {
    "no JSON": b"{",
    "no UTF-8": b'{"name":"\xff"}',
    "nested too deep": b'{"name":' + DEEP + b"}",
    "nested too deep in a field that nobody reads": b'{"other":' + DEEP + b"}",
    "another type": b'{"name":1}',
}
wrong = pytest.mark.parametrize("data", WRONG.values(), ids=WRONG.keys())


class Named(msgspec.Struct):
    name: str = ""


@wrong
def test_a_decoder_has_one_error(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decoded(msgspec.json.Decoder(Named), data)


@wrong
def test_a_log_line_is_named_by_file_and_number(data: bytes, tmp_path: Path) -> None:
    log = tmp_path / "x.jsonl"
    log.write_bytes(b'{"name":"a"}\n' + data + b"\n")
    with pytest.raises(RoseError, match=r"x\.jsonl:2"):
        read_lines(log, Named)


@wrong
def test_a_mark_of_dropped_records_is_one_line(data: bytes, tmp_path: Path) -> None:
    log = tmp_path / "x.jsonl"
    log.write_bytes(b'{"records_dropped":' + data + b"\n")
    with pytest.raises(RoseError, match="records are missing"):
        read_lines(log, Named)


@pytest.mark.parametrize("read", [decode_turn, decode_event])
@pytest.mark.parametrize("data", [b"{", b'{"error":{"message":"\xff"}}', b'{"x":' + DEEP + b"}"])
def test_a_gateways_answer_is_a_turn_or_broken(
    read: Callable[[bytes], object], data: bytes
) -> None:
    with pytest.raises(AnswerBroken):
        read(data)


@pytest.mark.parametrize("data", [b"{", b'{"error":"\xff"}', b'{"error":' + DEEP + b"}"])
def test_a_refusal_that_cannot_be_read_is_told_by_its_status(data: bytes) -> None:
    assert message(502, data) == "HTTP 502"
