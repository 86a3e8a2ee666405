"""Pages of a GPU in other hands: lent zeroed, revoked, returned, and never used by two at once."""

import contextlib
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
from loan_cases import RESERVE, Rig, rig, settle

from executor.cuda.backing import VirtualMapping
from executor.cuda.driver import Handle
from executor.cuda.page_pool import PageClient
from executor.cuda.page_server import PageServer
from executor.errors import DeviceMemoryShort
from tests.fakes.driver import PAGE, scripted

__all__ = ["rig"]


def test_what_is_lent_is_zeroed_is_the_same_memory_and_leaves_the_reserve(rig: Rig) -> None:
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


def test_a_loan_that_is_revoked_comes_back_page_by_page(rig: Rig) -> None:
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


def fill_device(rig: Rig) -> None:
    for _ in range((rig.device.total_bytes - rig.device.used_bytes) // PAGE):
        rig.host.create(PAGE)


@pytest.mark.parametrize("seed", range(5))
def test_no_page_is_ever_in_two_hands(rig: Rig, seed: int) -> None:
    rng = random.Random(seed)
    rig.stock(20)
    fill_device_but(rig, 12)
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
            given = [mine.pop() for _ in range(rng.randint(1, len(mine)))]
            taker.give(given)
        rng.choice([rig.lender.step, *(borrower.step for borrower in borrowers)])()
        most_lent = max(most_lent, rig.lender.lent)
        memory = [rig.host.handles[handle] for handle in held[0]]
        memory += [rig.guest.handles[handle] for handle in (*held[1], *held[2])]
        assert len(set(map(id, memory))) == len(memory)
    assert most_lent > 4
    for borrower, mine in zip(borrowers, held[1:], strict=True):
        borrower.give(mine)
        borrower.close()


def fill_device_but(rig: Rig, pages: int) -> None:
    fill_device(rig)
    for handle in list(rig.host.handles)[-pages:]:
        rig.host.release(handle)


def test_a_page_that_is_lent_again_says_nothing_of_its_last_user(rig: Rig) -> None:
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
    rig: Rig, monkeypatch: pytest.MonkeyPatch
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
    rig: Rig,
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


def test_pages_of_a_killed_process_are_back_when_it_is_gone_and_not_before(rig: Rig) -> None:
    rig.stock(6)
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(BORROWER),
        str(rig.path),
        rig.host.device.hex(),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        wait_for(rig, lambda: rig.lender.lent == 4)
        assert child.stdout is not None
        assert child.stdout.readline() == b"4\n", "the descriptors arrived with the message"
        settle(rig)
        assert rig.lender.idle == RESERVE, "it hung up and lives: it may still write to its pages"
        child.send_signal(signal.SIGKILL)
        wait_for(rig, lambda: rig.lender.idle == 6)
        assert rig.lender.lent == 0


def wait_for(rig: Rig, done: Callable[[], bool], turns: int = 2_000_000) -> None:
    for _ in range(turns):
        rig.lender.step()
        if done():
            return
    raise AssertionError("it did not happen")


def test_a_page_that_cannot_be_imported_is_returned_at_once(rig: Rig) -> None:
    rig.stock(6)
    borrower = rig.borrow()
    rig.lender.step()
    rig.guest.fails = scripted("import_handle", 2)
    with pytest.raises(DeviceMemoryShort):
        borrower.step()
    rig.lender.recall(1)
    settle(rig, borrower)
    assert (borrower.borrowed, rig.lender.idle) == (2, 4)
    borrower.close()


def test_a_lender_that_cannot_export_keeps_its_pages(rig: Rig) -> None:
    rig.stock(6)
    borrower = rig.borrow()
    rig.host.fails = scripted("export_handle", 3)
    with pytest.raises(DeviceMemoryShort):
        rig.lender.step()
    assert (rig.lender.idle, rig.lender.lent) == (6, 0)
    borrower.close()
