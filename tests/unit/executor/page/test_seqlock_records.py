"""Records survive their binary form."""

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor import Grant, GrantMode, GuestState, HostState, LatencyRecord, SeatState
from executor.control_page.page import LAYOUT_VERSION
from executor.control_page.seqlock_records import MOST_INT, PageRecord, record

number = st.integers(0, MOST_INT - 1)
word = st.text("abcdefghijklmnopqrstuvwxyz_", max_size=32)
RECORDS = st.one_of(
    st.builds(HostState, *[number, st.booleans(), *[number] * 14]),
    st.builds(
        Grant, st.sampled_from(GrantMode), number, number, number, st.floats(0, 1), number, number,
        number, word,
    ),
    st.builds(GuestState, number, st.booleans(), *[number] * 12, word),
    st.builds(SeatState, *[number] * 6),
    st.builds(LatencyRecord, *[number] * 6, st.text("abc-0123", max_size=80)),
)  # fmt: skip


@given(RECORDS)
def test_every_record_comes_back_as_it_was(record: Any) -> None:
    raw = record.pack()
    assert len(raw) == record.LAYOUT.size
    assert type(record).unpack(raw) == record


GOLDEN: dict[PageRecord, str] = {
    HostState(1, True, *range(3, 17)): (
        "0100000000000000 0103000000000000 0004000000000000 0005000000000000 "
        "0006000000000000 0007000000000000 0008000000000000 0009000000000000 "
        "000a000000000000 000b000000000000 000c000000000000 000d000000000000 "
        "000e000000000000 000f000000000000 0010000000000000 00 "
    ),
    SeatState(1, 2, 3, 4, 5, 6): (
        "0100000000000000 0200000000000000 0300000000000000 0400000000000000 0500000000000000 "
        "0600000000000000 "
    ),
    Grant(GrantMode.THROTTLE, 2, 3, 4, 0.5, 6, 7, 8, "kv_pressure"): (
        "0200000000000000 0200000000000000 0300000000000000 0400000000000000 "
        "000000000000e03f 0600000000000000 0700000000000000 0800000000000000 "
        "6b765f7072657373 7572650000000000 0000000000000000 0000000000000000 "
    ),
    GuestState(1, True, *range(3, 15), "no_slack"): (
        "0100000000000000 0103000000000000 0004000000000000 0005000000000000 "
        "0006000000000000 0007000000000000 0008000000000000 0009000000000000 "
        "000a000000000000 000b000000000000 000c000000000000 000d000000000000 "
        "000e000000000000 006e6f5f736c6163 6b00000000000000 0000000000000000 "
        "0000000000000000 00 "
    ),
    LatencyRecord(1, 2, 3, 4, 5, 6, "chatcmpl-7"): (
        "0100000000000000 0200000000000000 0300000000000000 0400000000000000 "
        "0500000000000000 0600000000000000 63686174636d706c 2d37000000000000 "
        "0000000000000000 0000000000000000 0000000000000000 0000000000000000 "
        "0000000000000000 0000000000000000 0000000000000000 0000000000000000 "
    ),
}


@pytest.mark.parametrize(("written", "golden"), GOLDEN.items(), ids=lambda x: type(x).__name__)
def test_the_bytes_on_the_page_change_only_with_its_version(
    written: PageRecord, golden: str
) -> None:
    assert LAYOUT_VERSION == 6
    assert written.pack() == bytes.fromhex(golden)


def test_bare_values_are_packed_in_the_records_own_order() -> None:
    names = ("pid", "started", "pid_namespace", "taken_ns", "beat_ns", "cores")
    assert SeatState.packer(*names)(1, 2, 3, 4, 5, 6) == SeatState(1, 2, 3, 4, 5, 6).pack()
    for wrong in (names[::-1], names[:4], ("pid", *names[:4])):
        with pytest.raises(TypeError, match="SeatState has the fields pid, started"):
            SeatState.packer(*wrong)


def test_a_field_without_a_binary_form_is_refused_where_the_record_is_made() -> None:
    with pytest.raises(TypeError, match=r"TextFirst\.name has no binary form; text stands last"):

        @record(text_bytes=4)
        class TextFirst(PageRecord):
            name: str
            reason: str

    with pytest.raises(TypeError, match=r"NoText\.pid is no text; text stands last"):

        @record(text_bytes=4)
        class NoText(PageRecord):
            pid: int

    with pytest.raises(TypeError, match=r"Fraction\.share has no binary form"):

        @record()
        class Fraction(PageRecord):
            share: complex


def test_empty_memory_decodes_to_a_frozen_and_expired_grant() -> None:
    grant = Grant.unpack(bytes(Grant.LAYOUT.size))
    assert (grant.mode, grant.expiry_ns, grant.token_budget) == (GrantMode.FREEZE, 0, 0)


@pytest.mark.parametrize("value", [-1, MOST_INT, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize(
    "record",
    [
        HostState(step_seq=7),
        Grant(token_budget=7),
        GuestState(step_seq=7),
        SeatState(pid=7),
        LatencyRecord(7, 0, 0, 0, 0, 0, ""),
    ],
    ids=lambda record: type(record).__name__,
)
def test_a_number_that_no_writer_means_is_an_error(record: Any, value: int) -> None:
    raw = record.pack().replace(struct.pack("=q", 7), struct.pack("=q", value), 1)
    with pytest.raises(ValueError, match="out of range"):
        type(record).unpack(raw)


@pytest.mark.parametrize("share", [float("nan"), float("inf")])
def test_a_share_that_is_no_number_is_an_error(share: float) -> None:
    with pytest.raises(ValueError, match="no number"):
        Grant.unpack(Grant(slack_share=share).pack())


def test_text_is_cut_at_its_field_without_breaking_a_character() -> None:
    grant = Grant(reason="é" * 40)
    assert Grant.unpack(grant.pack()).reason == "é" * 16
    assert Grant.unpack(Grant(reason="x" + "é" * 40).pack()).reason == "x" + "é" * 15


def test_an_unknown_mode_is_an_error() -> None:
    raw = bytearray(Grant().pack())
    raw[0] = 99
    with pytest.raises(ValueError, match="99"):
        Grant.unpack(bytes(raw))


def test_the_host_is_idle_only_without_requests_and_step() -> None:
    assert HostState().idle
    assert not HostState(in_step=True).idle
    assert not HostState(running=1).idle
    assert not HostState(waiting=1).idle
