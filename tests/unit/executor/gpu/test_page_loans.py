"""Pages of a GPU in other hands: lent zeroed, revoked, returned, never used by two at once."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.cuda.backing import CudaPages, Reservation, VirtualMapping
from executor.cuda.driver import Handle
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
from executor.cuda.page_pool import PageClient, PagePool, PageSource
from executor.cuda.page_server import MOST_BORROWERS, LoanLedger, PageServer
from executor.errors import DeviceMemoryShort, LoanError
from executor.kv.backing import Extent
from executor.kv.shrink_plan import Granules
from tests.fakes.cuda.driver import PAGE, StandInDevice, StandInDriver, scripted

RESERVE = 2


class LoanRig:
    """A host that lends and a guest that borrows, as two processes on one device."""

    def __init__(self, folder: Path, total: int) -> None:
        self.path = folder / "pages"
        self.device = StandInDevice(total * PAGE)
        self.host = StandInDriver(self.device)
        self.guest = StandInDriver(self.device)
        self.host_pool = PagePool(self.host, PAGE)
        self.lender = PageServer(self.host, PAGE, self.path, self.host_pool, reserve=RESERVE)
        self.guest_pool = PagePool(self.guest, PAGE)

    def borrow(self) -> PageClient:
        return PageClient(self.guest, PAGE, self.path, self.guest_pool)

    def stock(self, pages: int) -> None:
        self.lender.give(self.host_pool.take(pages))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[LoanRig]:
    before = open_descriptors()
    made = LoanRig(tmp_path, total=64)
    yield made
    made.lender.close()
    made.host.die()
    made.guest.die()
    assert made.device.used_bytes == 0
    assert open_descriptors() <= before, "a descriptor of a page stayed open"


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def settle(rig: LoanRig, *borrowers: PageClient) -> None:
    for _ in range(6):
        rig.lender.step()
        for borrower in borrowers:
            borrower.step()


NUMBERS = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=MOST_PAGES, unique=True).map(
    tuple
)


def raw_peer(rig: LoanRig, *, greet: bool = True) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.connect(os.fspath(rig.path))
    if greet:
        send(peer, Hello(rig.host.device, PAGE))
        send(peer, RequestPages(MOST_PAGES))
        rig.lender.step()
    return peer


def test_what_is_lent_is_zeroed_is_the_same_memory_and_leaves_the_reserve(rig: LoanRig) -> None:
    rig.stock(6)
    used = rig.device.used_bytes
    borrower = rig.borrow()
    settle(rig, borrower)
    assert (borrower.borrowed, rig.lender.lent, rig.lender.idle) == (4, 4, RESERVE)
    assert rig.device.used_bytes == used, "a page that is lent is not a second page"
    mapping = VirtualMapping(rig.guest, PAGE, 4)
    mapping.back(range(4), borrower.take(4))
    for page in range(4):
        assert rig.guest.read(mapping.address(page), 16) == bytes(16)
    borrower.close()


def test_a_loan_that_is_revoked_comes_back_page_by_page(rig: LoanRig) -> None:
    rig.stock(10)
    borrower = rig.borrow()
    settle(rig, borrower)
    mapping = VirtualMapping(rig.guest, PAGE, 6)
    mapping.back(range(6), borrower.take(6))
    fill_device(rig)
    with pytest.raises(DeviceMemoryShort):
        rig.lender.take(7)
    settle(rig, borrower)
    assert (rig.lender.idle, borrower.borrowed) == (4, 6), "what nothing is mapped on comes at once"
    assert borrower.wanted == 3
    while borrower.wanted:
        page = borrower.borrowed - 1
        borrower.give(mapping.back([page], [mapping.alias]))
        settle(rig, borrower)
    assert (rig.lender.idle, borrower.borrowed) == (7, 3)
    assert len(rig.lender.take(7)) == 7
    settle(rig, borrower)
    assert borrower.wanted == 0
    borrower.close()


def fill_device(rig: LoanRig) -> None:
    for _ in range((rig.device.total_bytes - rig.device.used_bytes) // PAGE):
        rig.host.create(PAGE)


@pytest.mark.parametrize("seed", range(2))
def test_no_page_is_ever_in_two_hands(rig: LoanRig, seed: int) -> None:
    rng = random.Random(seed)
    rig.stock(20)
    fill_device(rig)
    for handle in list(rig.host.handles)[-12:]:
        rig.host.release(handle)
    borrowers = [rig.borrow(), rig.borrow()]
    held: list[list[Handle]] = [[], [], []]
    most_lent = 0
    takers: list[PageServer | PageClient] = [rig.lender, *borrowers]
    for _ in range(300):
        who = rng.randrange(3)
        taker, mine = takers[who], held[who]
        if rng.random() < 0.5:
            with contextlib.suppress(DeviceMemoryShort):
                mine += taker.take(rng.randint(1, 6))
        elif mine:
            taker.give([mine.pop() for _ in range(rng.randint(1, len(mine)))])
        rng.choice(takers).step()
        most_lent = max(most_lent, rig.lender.lent)
        memory = [rig.host.handles[handle] for handle in held[0]]
        memory += [rig.guest.handles[handle] for handle in (*held[1], *held[2])]
        assert len(set(map(id, memory))) == len(memory)
    assert most_lent > 4
    for borrower, mine in zip(borrowers, held[1:], strict=True):
        borrower.give(mine)
        borrower.close()


def test_a_page_that_is_lent_again_says_nothing_of_its_last_user(rig: LoanRig) -> None:
    rig.stock(3)
    first = rig.borrow()
    settle(rig, first)
    mapping = VirtualMapping(rig.guest, PAGE, 1)
    mapping.back([0], first.take(1))
    rig.guest.write(mapping.address(0), b"secret")
    first.give(mapping.back([0], [mapping.alias]))
    settle(rig, first)
    mapping.back([0], first.take(1))
    assert rig.guest.read(mapping.address(0), 6) == bytes(6)
    first.close()


def test_when_the_peer_hangs_up_its_pages_wait_for_the_end_of_its_process(
    rig: LoanRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.stock(6)
    borrower = rig.borrow()
    settle(rig, borrower)
    borrower.take(3)  # And uses them, whatever becomes of the socket.
    borrower.close()
    settle(rig)
    assert (rig.lender.idle, rig.lender.lent) == (RESERVE, 4)
    rig.guest.die()
    monkeypatch.setattr("executor.cuda.page_server.has_ended", lambda _process: True)
    settle(rig)
    assert (rig.lender.idle, rig.lender.lent) == (6, 0)


def test_what_a_dead_peer_had_is_free_when_the_owner_lets_go_as_the_device_measures(
    rig: LoanRig,
) -> None:
    rig.stock(6)
    borrower = rig.borrow()
    settle(rig, borrower)
    mapping = VirtualMapping(rig.guest, PAGE, 4)
    mapping.back(range(4), borrower.take(4))
    free = rig.host.free_bytes()
    rig.lender.close()
    assert rig.host.free_bytes() - free == (RESERVE + 1) * PAGE, "stock and window; not the lent"
    rig.guest.die()
    assert rig.host.free_bytes() - free == (6 + 2) * PAGE, "and the guest's alias page"


BORROWER = """
import socket, sys
from executor.cuda.page_messages import receive, send
from executor.cuda.page_messages import RequestPages, Hello

path, device = sys.argv[1], bytes.fromhex(sys.argv[2])
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(path)
send(connection, Hello(device, 2 << 20))
send(connection, RequestPages(64))
while (heard := receive(connection)) is None:
    pass
print(len(heard[1]), flush=True)
connection.close()
sys.stdin.read()
"""


def test_pages_of_a_killed_process_are_back_when_it_is_gone_and_not_before(rig: LoanRig) -> None:
    rig.stock(6)
    command = [sys.executable, "-c", BORROWER, str(rig.path), rig.host.device.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        wait_for(rig, lambda: rig.lender.lent == 4)
        assert child.stdout is not None
        assert child.stdout.readline() == b"4\n", "the descriptors arrived with the message"
        settle(rig)
        assert rig.lender.idle == RESERVE, "it hung up and lives: it may still write to its pages"
        child.send_signal(signal.SIGKILL)
        wait_for(rig, lambda: rig.lender.idle == 6)
        assert rig.lender.lent == 0


def wait_for(rig: LoanRig, done: Callable[[], bool], turns: int = 2_000_000) -> None:
    for _ in range(turns):
        rig.lender.step()
        if done():
            return
    raise AssertionError("it did not happen")


@pytest.mark.parametrize(
    ("side", "call", "number", "lent", "stock"),
    [("guest", "import_handle", 2, 2, 4), ("host", "export_handle", 3, 0, 6)],
)
def test_pages_that_cannot_be_passed_on_are_in_stock_again(
    rig: LoanRig, side: str, call: str, number: int, lent: int, stock: int
) -> None:
    rig.stock(6)
    borrower = rig.borrow()
    getattr(rig, side).fails = scripted(call, number)

    def pass_on() -> None:
        rig.lender.step()
        borrower.step()

    with pytest.raises(DeviceMemoryShort):
        pass_on()
    rig.lender.recall(1)
    settle(rig, borrower)
    assert (borrower.borrowed, rig.lender.lent, rig.lender.idle) == (lent, lent, stock)
    borrower.close()


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
def test_who_breaks_the_rules_gets_nothing_more_and_harms_nobody(rig: LoanRig, said: bytes) -> None:
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


def test_a_peer_that_speaks_of_another_gpu_and_one_too_many_get_nothing(rig: LoanRig) -> None:
    rig.stock(6)
    for wrong in (Hello(bytes(16), PAGE), Hello(rig.host.device, 2 * PAGE), Return((1,))):
        with raw_peer(rig, greet=False) as peer:
            send(peer, wrong)
            settle(rig)
            with pytest.raises(HungUp):
                receive(peer)
    assert rig.lender.lent == 0
    with contextlib.ExitStack() as peers:
        for _ in range(MOST_BORROWERS):
            peers.enter_context(raw_peer(rig, greet=False))
            rig.lender.step()
        refused = peers.enter_context(raw_peer(rig, greet=False))
        rig.lender.step()
        with pytest.raises(HungUp):
            receive(refused)


def test_descriptors_that_nobody_asked_for_are_closed(rig: LoanRig) -> None:
    peer = raw_peer(rig)
    before = open_descriptors()
    reading, writing = os.pipe()
    send(peer, Return((1,)), [reading] * 8)
    os.close(reading)
    os.close(writing)
    settle(rig)
    assert open_descriptors() < before, "the peer was hung up on, and nothing of it is left open"
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


PAGES = (1 << 30) // PAGE


def test_a_gibibyte_costs_these_calls_to_the_driver(tmp_path: Path) -> None:
    """A granule of an 8B model, 16 tokens in all layers, is a page. By handle, and without."""
    device = StandInDevice((PAGES + 64) * PAGE)
    host, guest = StandInDriver(device), StandInDriver(device)
    moved, every = {"unmap": PAGES, "map": PAGES, "set_access": 1}, range(PAGES)
    zeroed = {"fill": 1, "synchronize": 1}

    def cache(driver: StandInDriver, source: PageSource) -> CudaPages:
        reservation = Reservation(driver, PAGES * PAGE, source=source)
        extent = Extent(reservation.address, PAGE, PAGE)
        return reservation.backend([extent], Granules(PAGES, 1))

    def calls(driver: StandInDriver) -> Counter[str]:
        found = +driver.calls
        driver.calls.clear()
        return found

    lender = PageServer(host, PAGE, tmp_path / "pages", PagePool(host, PAGE))
    ours = cache(host, lender)
    borrower = PageClient(guest, PAGE, tmp_path / "pages", PagePool(guest, PAGE))
    calls(host)
    ours.release(every)
    assert calls(host) == moved
    while borrower.borrowed < PAGES:
        lender.step()
        borrower.step()
    # Sixteen pages a message: each is mapped to be zeroed, and the alias page put back.
    messages = PAGES // 16
    assert calls(host) == {
        "unmap": 2 * PAGES,
        "map": 2 * PAGES,
        "set_access": 2 * messages,
        "fill": messages,
        "synchronize": messages,
        "export_handle": PAGES,
    }
    theirs = cache(guest, borrower)
    calls(guest)
    lender.recall(PAGES)
    lender.step()
    borrower.step()
    theirs.release(every)
    assert calls(guest) == moved | {"release": PAGES}
    while lender.available < PAGES:
        borrower.step()
        lender.step()
    calls(host)
    ours.restore(every)
    assert calls(host) == moved | zeroed
    borrower.close()
    lender.close()

    alone = StandInDriver(StandInDevice((PAGES + 64) * PAGE))
    pages = cache(alone, PagePool(alone, PAGE))
    calls(alone)
    pages.release(every)
    assert calls(alone) == moved | {"release": PAGES}
    pages.restore(every)
    assert calls(alone) == moved | zeroed | {"free_bytes": 1, "create": PAGES}
