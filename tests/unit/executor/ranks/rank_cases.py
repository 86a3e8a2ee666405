"""Ranks of an engine as plain processes: each has the memory under its part of every KV block."""

import ctypes
import mmap
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from executor.errors import RankError
from executor.kv.backing import Extent, HostPages, Range, resident_bytes
from executor.kv.rank_pages import Operation, RankPager, RankPages
from executor.kv.shrink_plan import Granules

PAGE = mmap.PAGESIZE
BLOCK_BYTES, BLOCKS, GRANULE_BLOCKS = 4 * PAGE, 64, 4
GRANULE_BYTES = BLOCK_BYTES * GRANULE_BLOCKS
GRANULES = Granules(BLOCKS, GRANULE_BLOCKS)
FORK = multiprocessing.get_context("fork")


class RankMemory:
    """KV memory of one rank, all of it written to."""

    def __init__(self) -> None:
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.view = mmap.mmap(-1, BLOCKS * BLOCK_BYTES, flags=private)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))
        self.pages = HostPages(
            [Extent(self.address, BLOCK_BYTES, BLOCK_BYTES)], GRANULES, BLOCKS * BLOCK_BYTES
        )
        for block in range(BLOCKS):
            self.write(block)

    def write(self, block: int) -> None:
        self.view[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = b"\1" * BLOCK_BYTES

    def zeroed(self, block: int) -> bool:
        return not any(self.view[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])

    @property
    def resident(self) -> int:
        return resident_bytes(Range(self.address, self.address + BLOCKS * BLOCK_BYTES))


class BrokenPages(HostPages):
    """Pages of which the kernel gives none back."""

    def release(self, granules: Any) -> None:
        raise OSError("the kernel keeps them")


def serve(rank: int, ranks: int, requests: Connection, broken: bool) -> None:
    """Run a rank's steps until its engine hangs up."""
    memory = RankMemory()
    if broken:
        memory.pages.__class__ = BrokenPages
    pager = RankPager(memory.pages, GRANULES, rank, ranks)
    requests.send("ready")
    with suppress(EOFError):
        while True:
            operations, writes = requests.recv()
            pager.carry_out(operations)
            zeroed = [memory.zeroed(block) for block in writes]
            for block in writes:
                memory.write(block)
            requests.send((zeroed, memory.resident))


@dataclass
class Rank:
    process: BaseProcess
    requests: Connection

    def begin(self, operations: Sequence[Operation], writes: Sequence[int] = ()) -> None:
        self.requests.send((operations, writes))

    def end(self, within_s: float = 10.0) -> tuple[list[bool], int]:
        """Return whether each written block was zeroed before, and the resident bytes."""
        assert self.requests.poll(within_s), "the rank does not answer"
        answer: tuple[list[bool], int] = self.requests.recv()
        return answer

    def stop(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class Engine:
    """Ranks in processes of their own, and the scheduler's side of their pages."""

    def __init__(self, ranks: int, broken: int = -1) -> None:
        self.ranks: list[Rank] = []
        for rank in range(ranks):
            ours, theirs = FORK.Pipe()
            process = FORK.Process(
                target=serve, args=(rank, ranks, theirs, rank == broken), daemon=True
            )
            process.start()
            theirs.close()
            self.ranks.append(Rank(process, ours))
        for each in self.ranks:
            assert each.requests.recv() == "ready"
        self.pages = RankPages.of_processes(self.pids, ranks, BLOCKS)

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid or 0 for rank in self.ranks]

    def step(self, writes: Sequence[int] = ()) -> list[tuple[list[bool], int]]:
        """One step on all ranks, which writes to these blocks."""
        operations = self.pages.drain()
        for rank in self.ranks:
            rank.begin(operations, writes)
        ended = [rank.end() for rank in self.ranks]
        with suppress(RankError):
            self.pages.poll()
        return ended


@contextmanager
def engine(ranks: int = 2, broken: int = -1) -> Iterator[Engine]:
    made = Engine(ranks, broken)
    try:
        yield made
    finally:
        for rank in made.ranks:
            rank.kill()
            rank.requests.close()
