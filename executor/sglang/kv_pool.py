"""SGLang's KV allocator with granules of blocks that can leave it and come back.

The allocator knows only its free blocks: two tensors of numbers, of which it hands out the first. A
block that is not free is in the prefix cache, where requests may hold it, or belongs to a request.
So

    used      blocks of running requests, the prefixes that they share included
    cached    all others that are not free: the prefix cache drops them on request

The free list is kept sorted while granules are away: low blocks are handed out first and the high
granules empty by themselves. A held granule's blocks are in no list; code that counts the whole
pool gets the number of missing blocks.

A block here is what SGLang's allocator calls a page: tokens that are allocated together, one by
default. Block 0 takes the writes of padding and is never allocated: its granule stays. Each layer
has its keys and its values in a tensor of their own, [slots, heads, head size], slot after slot. On
host memory `HostPages` gives whole pages back; on a GPU memory that ROSE reserved
(`reserved_pool.py`) does.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from executor.cuda.backing import Reservation, reservation_at
from executor.cuda.kv_memory import device_granule_blocks
from executor.engine_settings import AUTO, CUDA, MADVISE
from executor.errors import ExecutorError
from executor.kv.backing import (
    Extent,
    HeldGranules,
    HostPages,
    NoPages,
    PageBackend,
    Range,
    granule_blocks,
    use_huge_pages,
)
from executor.kv.shrink_plan import Granules, GranuleUse

logger = logging.getLogger("rose.kv")

FALLBACK_GRANULE_TOKENS = 256
Forget = Callable[[int], int]
"""Function that has the prefix cache drop about this many unused tokens.

It returns the number of blocks that became free.
"""


class ChangeKind(IntEnum):
    """Kind of a change: prefixes dropped, granules taken out or put in, all of them put in for
    good, and running or waiting requests that a guest sends away.
    """

    FORGET = 0
    TAKE = 1
    GIVE_BACK = 2
    DISSOLVE = 3
    PREEMPT = 4
    HAND_BACK = 5


class PoolChange(NamedTuple):
    """Change of one rank's pool or queue that the others make after it.

    tokens: to drop of prefixes, of a FORGET. ids: requests of a PREEMPT or HAND_BACK.
    """

    kind: ChangeKind
    granules: tuple[int, ...] = ()
    tokens: int = 0
    ids: tuple[str, ...] = ()


class BalloonedAllocator(HeldGranules):
    """Balloon over an SGLang KV allocator: takes granules (runs of blocks) out, and back in.

    `changes`: if it is a list, each change is noted there.
    """

    changes: list[PoolChange] | None = None

    def __init__(
        self,
        allocator: Any,  # noqa: ANN401 -- SGLang's
        granules: Granules,
        pages: PageBackend,
        owned: Callable[[], torch.Tensor],
        forget: Forget,
    ) -> None:
        """Take over the allocator.

        owned: returns the blocks of running requests, each once. forget: drops unused prefixes.
        """
        self._allocator = allocator
        self._owned = owned
        self._forget = forget
        # Freed blocks wait for the next sort, and come back in order.
        allocator.need_sort = True
        super().__init__(granules, pages)

    @property
    def capacity_blocks(self) -> int:
        """Most blocks that requests can have now, all together."""
        return self.granules.blocks - 1 - self.held_blocks

    @property
    def held_blocks(self) -> int:
        """Number of blocks in held granules, which the pool has less than at its start."""
        return sum(len(self.granules.blocks_of(granule)) for granule in self.held)

    def uses(self) -> Iterator[GranuleUse]:
        """Yield the number of used and cached blocks of each mapped granule."""
        free, owned = self._per_granule(self._free()), self._per_granule(self._owned())
        for granule in range(self.granules.count):
            if granule not in self.held:
                used, rest = owned[granule], self._blocks_in(granule) - free[granule]
                yield GranuleUse(granule, used, max(0, rest - used), self.pages.borrowed(granule))

    def take(self, granules: Collection[int], fence: int) -> int:
        """Take granules that can be emptied without preempting out of the pool; return their
        number.

        Prefixes are dropped for them, by the prefix cache's own order, as long as that helps.
        """
        wanted = [granule for granule in granules if granule not in self.held]
        while missing := self._missing(wanted):
            if self._drop(missing * int(self._allocator.page_size)) <= 0:
                break
        return self._take(wanted, fence)

    def give_back(self, granules: Collection[int]) -> None:
        """Map held granules again: restore their pages, then put their blocks into the pool."""
        super().give_back(granules)
        if granules:
            self.note(PoolChange(ChangeKind.GIVE_BACK, tuple(granules)))

    def note(self, change: PoolChange) -> None:
        """Note a change if changes are noted."""
        if self.changes is not None:
            self.changes.append(change)

    def follow(self, change: PoolChange) -> None:
        """Make a change of the pool that another rank made."""
        match change.kind:
            case ChangeKind.FORGET:
                self._forget(change.tokens)
            case ChangeKind.TAKE:
                self._take_out(change.granules)
                self.held.update(change.granules)
            case ChangeKind.GIVE_BACK:
                self._put_in(change.granules)
                self.held.difference_update(change.granules)

    def _take(self, granules: Collection[int], fence: int) -> int:
        before = set(self.held)
        taken = super().take(granules, fence)
        if taken:
            self.note(PoolChange(ChangeKind.TAKE, tuple(sorted(self.held - before))))
        return taken

    def _drop(self, tokens: int) -> int:
        self.note(PoolChange(ChangeKind.FORGET, tokens=tokens))
        return self._forget(tokens)

    def cleared(self) -> None:
        """Take held blocks out of an allocator that was cleared and has all blocks again."""
        self._take_out(self.held)

    def _missing(self, granules: Collection[int]) -> int:
        """Return the number of cached blocks in those of the granules that no request uses."""
        free, owned = self._per_granule(self._free()), self._per_granule(self._owned())
        return sum(
            self._blocks_in(granule) - free[granule] for granule in granules if not owned[granule]
        )

    def _wholly_free(self, granules: Collection[int]) -> list[int]:
        free, never = self._per_granule(self._free()), {*self.held, self.granules.of(0)}
        return [
            granule
            for granule in granules
            if granule not in never and free[granule] == self._blocks_in(granule)
        ]

    def _take_out(self, granules: Collection[int]) -> None:
        if granules:
            free = self._free()
            gone = torch.zeros(self.granules.count, dtype=torch.bool)
            gone[list(granules)] = True
            self._set_free(free[~gone.to(free.device)[free // self.granules.granule_blocks]])

    def _put_in(self, granules: Collection[int]) -> None:
        free = self._free()
        blocks = [number for granule in granules for number in self.granules.blocks_of(granule)]
        added = torch.tensor(blocks, dtype=free.dtype, device=free.device)
        self._set_free(torch.cat((free, added)))

    def _free(self) -> torch.Tensor:
        return free_blocks(self._allocator)

    def _set_free(self, blocks: torch.Tensor) -> None:
        set_free_blocks(self._allocator, blocks)

    def _per_granule(self, blocks: torch.Tensor) -> list[int]:
        count = self.granules.count
        numbers = blocks.to(dtype=torch.int64, device="cpu") // self.granules.granule_blocks
        found: list[int] = torch.bincount(numbers, minlength=count).tolist()
        return found

    def _blocks_in(self, granule: int) -> int:
        return len(self.granules.blocks_of(granule)) - (granule == self.granules.of(0))


def blocks_of(allocator: Any) -> int:  # noqa: ANN401 -- SGLang's
    """Return the number of an allocator's blocks, block 0 included."""
    return int(allocator.size) // int(allocator.page_size) + 1


def free_blocks(allocator: Any) -> torch.Tensor:  # noqa: ANN401 -- SGLang's
    """Return the numbers of an allocator's free blocks."""
    found: torch.Tensor = allocator.get_all_free_pages()
    return found


def set_free_blocks(allocator: Any, blocks: torch.Tensor) -> None:  # noqa: ANN401 -- SGLang's
    """Let an allocator have these free blocks and no others; it hands out the lowest first."""
    allocator.free_pages = torch.sort(blocks).values
    if hasattr(allocator, "staged_pages"):  # One that allocates several tokens together.
        allocator.staged_pages, allocator.num_staged_pages = [], 0
    else:
        allocator.release_pages = blocks.new_empty((0,))


def kv_pages(
    allocator: Any,  # noqa: ANN401 -- SGLang's
    backend: str = AUTO,
    common: Callable[[int], int] = int,
) -> tuple[PageBackend, Granules]:
    """Return the page backend under the blocks of an allocator's KV cache, and its granules.

    common: called with this rank's blocks of a granule, 0 if its pages cannot be given back;
    returns those of all ranks. Raises ExecutorError if `backend` cannot be used; with AUTO the
    result is a NoPages then.
    """
    page_tokens = int(allocator.page_size)
    blocks = blocks_of(allocator)
    tensors = kv_tensors(allocator.get_kvcache())
    reservation = _reservation(tensors)
    wrong = _lacking(tensors, reservation, backend, blocks * page_tokens)
    extents = [] if wrong is not None else [extent_of(tensor, page_tokens) for tensor in tensors]
    of_granule = common(_granule_blocks(extents, reservation) if extents else 0)
    if wrong is None and not of_granule:
        wrong = "another rank's KV pages cannot be given back"
    if wrong is not None:
        if backend != AUTO:
            raise ExecutorError(f"ROSE_KV_BACKEND is {backend}, but {wrong}")
        logger.warning("%s: no KV pages will be given back", wrong)
        granules = Granules(blocks, max(1, FALLBACK_GRANULE_TOKENS // page_tokens))
        return NoPages(sum(map(_bytes, tensors))), granules
    granules = Granules(blocks, of_granule)
    if reservation is not None:
        return reservation.backend(extents, granules), granules
    # The event loop has not begun: the memory has no content yet.
    for extent in extents:
        end = extent.base + blocks * extent.stride
        use_huge_pages(Range(extent.base, end).whole_pages())
    return HostPages(extents, granules, sum(map(_bytes, tensors))), granules


def _granule_blocks(extents: Sequence[Extent], reservation: Reservation | None) -> int:
    if reservation is None:
        return granule_blocks(extents)
    return device_granule_blocks(extents, reservation.page_bytes)


def _reservation(tensors: Sequence[Any]) -> Reservation | None:
    """Return the Reservation that has all of these tensors; None if there is none."""
    reservation = reservation_at(tensors[0].data_ptr()) if tensors else None
    if reservation is None:
        return None
    ends = reservation.address, reservation.address + reservation.size
    whole = all(ends[0] <= tensor.data_ptr() < ends[1] for tensor in tensors)
    return reservation if whole else None


def kv_tensors(pool: Any) -> list[Any]:  # noqa: ANN401 -- SGLang's pool, torch's tensors
    """Return the key and value tensors of all layers; [] for a pool of another kind."""
    keys, values = getattr(pool, "k_buffer", None), getattr(pool, "v_buffer", None)
    if not isinstance(keys, list) or not isinstance(values, list):
        latent = getattr(pool, "kv_buffer", None)
        return list(latent) if isinstance(latent, list) else []
    return [*keys, *values]


def _lacking(
    tensors: Sequence[Any],
    reservation: Reservation | None,
    backend: str,
    slots: int,
) -> str | None:
    """Return the reason why the pages cannot be given back, None if they can."""
    if not tensors:
        return "this model's KV cache is of a kind whose layout ROSE does not know"
    # Memory that ROSE reserved comes from a GPU's driver, whatever the engine computes on.
    device = tensors[0].device.type if reservation is None else CUDA
    on_host = device == "cpu"
    if backend not in (AUTO, MADVISE if on_host else CUDA):
        return f"the KV cache is on {device}; set ROSE_KV_BACKEND=auto"
    if not on_host and reservation is None:
        return (
            f"the KV cache on {device} is in memory that ROSE did not reserve; set"
            " ROSE_KV_BACKEND=cuda"
        )
    # A row of fewer is a block: heads lie before its tokens.
    if not all(t.is_contiguous() and t.numel() >= slots * t.stride(0) for t in tensors):
        return "the KV cache does not lie slot after slot"
    return None


def extent_of(tensor: Any, page_tokens: int) -> Extent:  # noqa: ANN401 -- torch's tensor
    """Return the addresses of a tensor's blocks, which lie one after the other."""
    size = tensor.stride(0) * tensor.element_size() * page_tokens
    return Extent(tensor.data_ptr(), size, size)


def _bytes(tensor: Any) -> int:  # noqa: ANN401 -- torch's tensor
    return int(tensor.numel() * tensor.element_size())
