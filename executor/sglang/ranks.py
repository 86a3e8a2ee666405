"""Ranks of an SGLang engine: each schedules in a process of its own, and all must decide alike.

Only the first rank has a control page, a gate or a lender. It decides as an engine of one rank
does, and notes each change of its pool and queue. The other ranks make the same changes, between
the same two steps:

    first rank   decides and changes ── RankMessage ──> every rank   its pages; others: the changes
    every rank   its report of its pages ──> first rank   the worst of all (executor.kv.rank_pages)

A guest's message is a broadcast before each step. A host's travels with the requests of a turn,
which SGLang's first rank broadcasts anyway.
"""

import os
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from executor.engine_settings import AUTO
from executor.errors import ExecutorError, RankError
from executor.kv.backing import NoPages, PageBackend
from executor.kv.rank_pages import CommonGranule, Operation, RankPager, RankPages
from executor.kv.shrink_plan import Granules
from executor.rank_group import RankGroup
from executor.sglang.kv_pool import PoolChange, kv_pages
from executor.sglang.probes import check_addresses, check_allocator

Check = Callable[[PageBackend, Granules], None]
"""Function that raises ExecutorError for pages that cannot be used."""


class RankMessage(NamedTuple):
    """Decision of the first rank: changes of the pool, and what each rank does to its pages.

    `tokens`, `sequences`: most of a guest's next step, 0 for no step.
    """

    changes: tuple[PoolChange, ...] = ()
    operations: tuple[Operation, ...] = ()
    tokens: int = 0
    sequences: int = 0


class FollowedPages(NoPages):
    """Backend of a rank that follows: its pager moves its pages, as the first rank decides."""

    def __init__(self, own: PageBackend, released: Collection[int], first_pid: int) -> None:
        """Begin with these granules released.

        own: this rank's pages. first_pid: process of the first rank.
        """
        super().__init__(own.bytes_total)
        self.always_restores = own.always_restores
        self.released = released
        self._first_pid = first_pid

    @property
    def processes(self) -> Collection[int]:
        return (self._first_pid,)


class RankMemory(NamedTuple):
    """KV pages of an engine, and this rank's pager, which an engine of one rank does without.

    The pages are those of all ranks on the first one, and of none on a rank that follows.
    """

    pages: PageBackend
    granules: Granules
    pager: RankPager | None = None


def rank_memory(
    ranks: RankGroup,
    allocator: Any,  # noqa: ANN401 -- SGLang's
    backend: str = AUTO,
    check: Check = lambda _pages, _granules: None,
) -> RankMemory:
    """Return the pages under the KV caches of all ranks. Raises ExecutorError, on all of them."""
    if ranks.size == 1:
        return RankMemory(*_pages(allocator, backend, check))
    common, failed = CommonGranule(ranks.gather), ""
    pager: RankPager | None = None
    try:
        pages, granules = _pages(allocator, backend, check, common)
        pager = RankPager(pages, granules, ranks.rank, ranks.size)
    except Exception as error:  # noqa: BLE001 -- the other ranks wait for this one
        failed = str(error) or type(error).__name__
    common.close()
    every = ranks.gather((os.getpid(), failed))
    wrong = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(every) if why]
    if wrong or pager is None:
        raise RankError(wrong[0])
    shared: RankPages | None = None
    if not ranks.rank:
        try:
            shared = RankPages.of_processes([pid for pid, _ in every], ranks.size, granules.blocks)
        except ExecutorError as error:
            failed = str(error)
    failed, released = ranks.agree((failed, sorted(shared.released) if shared else []))
    if failed:
        raise RankError(failed)
    if shared is not None:
        return RankMemory(shared, granules, pager)
    return RankMemory(FollowedPages(pages, released, every[0][0]), granules, pager)


def _pages(
    allocator: Any,  # noqa: ANN401 -- SGLang's
    backend: str,
    check: Check,
    common: Callable[[int], int] = int,
) -> tuple[PageBackend, Granules]:
    check_allocator(allocator)
    pages, granules = kv_pages(allocator, backend, common)
    check_addresses(allocator, pages)
    check(pages, granules)
    return pages, granules
