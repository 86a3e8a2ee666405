"""Records survive their binary form."""

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor import Grant, GrantMode, GuestState, HostState, LatencyRecord, SeatState
from executor.control_page.records import MOST_INT

number = st.integers(0, MOST_INT - 1)
word = st.text("abcdefghijklmnopqrstuvwxyz_", max_size=32)
RECORDS = st.one_of(
    st.builds(HostState, *[number, st.booleans(), *[number] * 10]),
    st.builds(
        Grant, st.sampled_from(GrantMode), number, number, number, st.floats(0, 1), number, number,
        number, word,
    ),
    st.builds(GuestState, number, st.booleans(), *[number] * 8, word, number),
    st.builds(SeatState, *[number] * 5),
    st.builds(LatencyRecord, st.text("abc-0123", max_size=80), *[number] * 6),
)  # fmt: skip


@given(RECORDS)
def test_every_record_comes_back_as_it_was(record: Any) -> None:
    raw = record.pack()
    assert len(raw) == record.LAYOUT.size
    assert type(record).unpack(raw) == record


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
        LatencyRecord("", 7, 0, 0, 0, 0, 0),
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
