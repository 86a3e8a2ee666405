"""Messages about lent pages: their form, and the treatment of senders of invalid ones."""

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loan_cases import RESERVE, Rig, open_descriptors, rig, settle

from executor.cuda.page_messages import (
    MOST_PAGES,
    Frame,
    Hello,
    HungUp,
    Lend,
    RequestPages,
    Return,
    Revoke,
    decode,
    encode,
    receive,
    send,
)
from executor.cuda.page_pool import PageClient, PagePool
from executor.cuda.page_server import MOST_BORROWERS, LoanLedger
from executor.errors import LoanError
from tests.fakes.driver import PAGE, StandInDevice, StandInDriver

__all__ = ["rig"]
NUMBERS = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=MOST_PAGES, unique=True).map(
    tuple
)


def raw_peer(rig: Rig, *, greet: bool = True) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.connect(os.fspath(rig.path))
    if greet:
        send(peer, Hello(rig.host.device, PAGE))
        send(peer, RequestPages(MOST_PAGES))
        rig.lender.step()
    return peer


@pytest.mark.parametrize(
    "said",
    [
        encode(Return((99,))),
        encode(Lend((1,))),
        encode(Revoke(1)),
        encode(Hello(bytes(16), PAGE)),
        b"RKV1",
        b"GET / HTTP/1.1\r\n\r\n",
        encode(Return(tuple(range(1, MOST_PAGES + 1)))) + b"more",
        os.urandom(4000),
    ],
)
def test_who_breaks_the_rules_gets_nothing_more_and_harms_nobody(rig: Rig, said: bytes) -> None:
    rig.stock(6)
    peer = raw_peer(rig)
    assert rig.lender.lent == 4
    peer.send(said)
    settle(rig)
    assert (rig.lender.idle, rig.lender.lent) == (RESERVE, 4), "what it has it may still use"
    heard = receive(peer)
    assert heard is not None
    for descriptor in heard[1]:
        os.close(descriptor)
    with pytest.raises(HungUp):
        receive(peer)
    peer.close()
    rig.stock(1)
    honest = rig.borrow()
    settle(rig, honest)
    assert honest.borrowed == 1
    honest.close()


def test_a_peer_that_speaks_of_another_gpu_gets_nothing(rig: Rig) -> None:
    rig.stock(6)
    for wrong in (Hello(bytes(16), PAGE), Hello(rig.host.device, 2 * PAGE), Return((1,))):
        peer = raw_peer(rig, greet=False)
        send(peer, wrong)
        settle(rig)
        with pytest.raises(HungUp):
            receive(peer)
        peer.close()
    assert rig.lender.lent == 0


def test_descriptors_that_nobody_asked_for_are_closed(rig: Rig) -> None:
    peer = raw_peer(rig)
    before = open_descriptors()
    reading, writing = os.pipe()
    send(peer, Return((1,)), [reading] * 8)
    os.close(reading)
    os.close(writing)
    settle(rig)
    assert open_descriptors() < before, "the peer was hung up on, and nothing of it is left open"
    peer.close()


def test_no_more_peers_than_can_be_served_at_once(rig: Rig) -> None:
    peers = [raw_peer(rig, greet=False) for _ in range(MOST_BORROWERS)]
    for _ in peers:
        rig.lender.step()
    refused = raw_peer(rig, greet=False)
    rig.lender.step()
    with pytest.raises(HungUp):
        receive(refused)
    for peer in (*peers, refused):
        peer.close()


def test_where_nobody_lends_a_borrower_says_so(tmp_path: Path) -> None:
    driver = StandInDriver(StandInDevice(PAGE))
    with pytest.raises(LoanError, match="start the host first"):
        PageClient(driver, PAGE, tmp_path / "none", PagePool(driver, PAGE))


@given(
    st.one_of(
        NUMBERS.map(Lend),
        NUMBERS.map(Return),
        st.integers(0, 2**64 - 1).map(Revoke),
        st.integers(0, 2**64 - 1).map(RequestPages),
        st.builds(Hello, st.binary(min_size=16, max_size=16), st.integers(0, 2**64 - 1)),
    )
)
def test_a_frame_survives_the_wire(frame: Frame) -> None:
    assert decode(encode(frame)) == frame


@given(st.binary(max_size=600))
def test_garbage_is_no_frame(data: bytes) -> None:
    with pytest.raises(LoanError):
        decode(data)


def test_a_message_has_an_end() -> None:
    most = encode(Return(tuple(range(MOST_PAGES))))
    longer = most[:6] + (MOST_PAGES + 1).to_bytes(2, "little") + most[8:] + bytes(range(8))
    with pytest.raises(LoanError, match="no word about pages"):
        decode(longer)
    with pytest.raises(LoanError, match="give at most 64"):
        encode(Return(tuple(range(MOST_PAGES + 1))))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(most + b"and more")
        with pytest.raises(LoanError, match="is longer than"):
            receive(ours)
        assert receive(ours) is None


def test_frames_have_a_fixed_form() -> None:
    assert (
        encode(Return((1, 258))).hex()
        == "524b563104000200" + "0100000000000000" + "0201" + "00" * 6
    )
    assert encode(Revoke(3)).hex() == "524b563103000100" + "0300000000000000"


def test_the_reserve_is_the_owners_alone() -> None:
    book = LoanLedger(reserve=3)
    book.put(range(5))
    assert len(book.lend(1, 10)) == 2
    assert book.lend(2, 10) == ()
    assert len(book.take(9)) == 3
    with pytest.raises(LoanError, match="was not lent to it"):
        book.returned(2, [4])
    assert (book.out(1), book.in_stock) == (2, 0)
