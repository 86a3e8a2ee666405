"""Backing of KV memory by GPU pages: a virtual-memory mapping whose every address is readable.

One physical page, the alias page, backs all addresses that have no page of their own. A kernel that
reads one of them by mistake gets the alias page's content instead of a fault, which would end every
process of an MPS server. Only between `unmap` and `map` of one page nothing is mapped there, so no
step that could touch it may be in flight.

`CudaPages` is the page backend over such a mapping. `PageRefcounts` maps the granules of a KV cache
to the pages they lie on, and knows which pages no mapped granule needs. Released pages go back to
their source, and pages that return are zeroed first.

A `Reservation` is an engine's whole KV cache: its allocator makes one, and the KV balloon finds it
by the tensor's address. Both are in one process: pages are mapped in no other one. The memory
becomes a torch tensor without a copy, through `__cuda_array_interface__`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from executor.cuda.driver import Driver, Handle
from executor.cuda.page_pool import PagePool, PageSource
from executor.errors import DeviceError, DeviceMemoryShort, MappingLost
from executor.kv.backing import Extent, PageBackend, coalesce, runs
from executor.kv.shrink_plan import Granules

if TYPE_CHECKING:
    import torch

# Granules that an initially empty cache maps in one piece.
AT_ONCE: Final = 256
Numbers = npt.NDArray[np.int64]
_NOTHING: Final = Handle(-1)
_reservations: Final[dict[int, Reservation]] = {}


class VirtualMapping:
    """Range of GPU addresses: `pages` pages of `page_bytes` from `base` on, each backed by a
    handle.
    """

    def __init__(
        self, driver: Driver, page_bytes: int, pages: int, own: Sequence[Handle] = ()
    ) -> None:
        """Reserve the range, map and zero it.

        own: handles behind the first pages; the alias page is behind the others. Raises
        DeviceError, and leaves nothing behind then unless it is MappingLost.
        """
        if page_bytes <= 0 or page_bytes % driver.granularity:
            raise DeviceError(
                f"pages of {page_bytes} bytes do not fit this GPU: give a multiple of"
                f" {driver.granularity}"
            )
        self._driver = driver
        self.page_bytes = page_bytes
        self.pages = pages
        self.alias = driver.create(page_bytes)
        self._backing = [_NOTHING] * pages
        try:
            self.base = driver.reserve(pages * page_bytes)
        except DeviceError:
            driver.release(self.alias)
            raise
        try:
            self.back(range(pages), [*own, *[self.alias] * (pages - len(own))])
            self.zero(range(pages))
        except MappingLost:
            raise
        except DeviceError:
            self.close()
            raise

    def back(self, pages: Sequence[int], handles: Sequence[Handle]) -> list[Handle]:
        """Map these handles at these pages; return the handles that were there before.

        All or nothing: on DeviceError everything is mapped as before, with its content; only
        MappingLost says that this failed, too.
        """
        before = [self._backing[page] for page in pages]
        begun: list[int] = []
        try:
            for page, handle in zip(pages, handles, strict=True):
                begun.append(page)
                self._replace(page, handle)
            self._allow(pages)
        except DeviceError as error:
            self._undo(begun, before, error)
            raise
        return before

    def back_zeroed(self, pages: Sequence[int], handles: Sequence[Handle]) -> list[Handle]:
        """Map these handles at these pages as `back` does, zero them; return the earlier ones."""
        before = self.back(pages, handles)
        try:
            self.zero(pages)
        except MappingLost:
            raise
        except DeviceError:
            self.back(pages, before)
            raise
        return before

    def zero(self, pages: Sequence[int]) -> None:
        """Write zeros over these pages, and wait until that is done.

        Raises DeviceError; MappingLost if the writes may not have ended, for then no page may be
        unmapped any more.
        """
        try:
            for run in runs(pages):
                self._driver.fill(self.address(run.start), 0, len(run) * self.page_bytes)
        finally:
            self._settle()

    def behind(self, page: int) -> Handle:
        """Return the handle that is mapped at a page now."""
        return self._backing[page]

    def address(self, page: int) -> int:
        """Return the first address of a page."""
        return self.base + page * self.page_bytes

    def close(self) -> list[Handle]:
        """Unmap all pages and free the addresses; return all handles but the alias page's."""
        own = [handle for handle in self._backing if handle not in (self.alias, _NOTHING)]
        for page in range(self.pages):
            self._unmap(page)
        self._driver.unreserve(self.base, self.pages * self.page_bytes)
        self._driver.release(self.alias)
        return own

    def _settle(self) -> None:
        try:
            self._driver.synchronize()
        except DeviceError as error:
            raise MappingLost(
                f"{error}; KV pages may still be written to: start the engine anew"
            ) from error

    def _replace(self, page: int, handle: Handle) -> None:
        self._unmap(page)
        if handle != _NOTHING:
            self._driver.map(self.address(page), self.page_bytes, handle)
            self._backing[page] = handle

    def _unmap(self, page: int) -> None:
        # One mapping a call: the driver promises no more.
        if self._backing[page] != _NOTHING:
            self._driver.unmap(self.address(page), self.page_bytes)
            self._backing[page] = _NOTHING

    def _allow(self, pages: Iterable[int]) -> None:
        for run in runs(pages):
            self._driver.set_access(self.address(run.start), len(run) * self.page_bytes)

    def _undo(self, pages: Sequence[int], before: Sequence[Handle], error: DeviceError) -> None:
        try:
            for page, handle in zip(pages, before, strict=False):
                if self._backing[page] != handle:
                    self._replace(page, handle)
            self._allow(page for page in pages if self._backing[page] != _NOTHING)
        except DeviceError as second:
            raise MappingLost(
                f"{error}; putting the KV cache back failed as well ({second}): start the engine"
                " anew"
            ) from error


class PageRefcounts:
    """Counters, one for each GPU page, of the mapped granules of KV blocks with a byte on it.

    All granules are mapped at first. A page without a byte of any block counts as needed.
    """

    def __init__(
        self,
        extents: Sequence[Extent],
        granules: Granules,
        base: int,
        page_bytes: int,
        pages: int,
    ) -> None:
        self._extents = extents
        self._granules = granules
        self._base = base
        self._page_bytes = page_bytes
        self._needed: Numbers = np.zeros(pages, np.int64)
        self._pages = [self._find_pages(granule) for granule in range(granules.count)]
        for found in self._pages:
            self._needed[found] += 1
        self._needed[self._needed == 0] = 1

    def take(self, granules: Collection[int]) -> list[int]:
        """Count these granules out; return the pages that no mapped granule needs, ascending."""
        touched = self._add(granules, -1)
        freed: list[int] = touched[self._needed[touched] == 0].tolist()
        return freed

    def give(self, granules: Collection[int]) -> list[int]:
        """Count these granules in; return the pages that no granule needed before, ascending."""
        touched = self._touched(granules)
        lacking = touched[self._needed[touched] == 0]
        self._add(granules, 1)
        found: list[int] = lacking.tolist()
        return found

    def pages_of(self, granule: int) -> list[int]:
        """Return the pages on which a granule has a byte, ascending."""
        found: list[int] = self._pages[granule].tolist()
        return found

    def lacking(self, granule: int) -> int:
        """Return the number of pages that mapping this granule would take from the source.

        They are its pages that no mapped granule needs.
        """
        return int((self._needed[self._pages[granule]] == 0).sum())

    @property
    def granules(self) -> int:
        """Number of granules of the KV cache, mapped or not."""
        return len(self._pages)

    @property
    def most_pages(self) -> int:
        """Number of pages of the granule that has the most."""
        return max(len(found) for found in self._pages)

    def _add(self, granules: Collection[int], change: int) -> Numbers:
        for granule in granules:
            self._needed[self._pages[granule]] += change
        return self._touched(granules)

    def _touched(self, granules: Collection[int]) -> Numbers:
        parts = [self._pages[granule] for granule in granules]
        return np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)

    def _find_pages(self, granule: int) -> Numbers:
        blocks = self._granules.blocks_of(granule)
        pieces = coalesce(piece for extent in self._extents for piece in extent.ranges(blocks))
        size = self._page_bytes
        return np.unique(
            np.concatenate(
                [
                    np.arange((p.start - self._base) // size, -((self._base - p.end) // size))
                    for p in pieces
                ]
            )
        )


class CudaPages(PageBackend):
    """PageBackend over a VirtualMapping; each call does all that it is asked for, or nothing.

    A page goes when no mapped granule has a byte on it. Bytes count as returned when their page was
    given away; pages that the source keeps do not, nor do borrowed ones without a mapping.
    """

    always_restores = False

    def __init__(
        self,
        mapping: VirtualMapping,
        source: PageSource,
        use: PageRefcounts,
        bytes_total: int,
        *,
        empty: bool = False,
    ) -> None:
        """Take over the mapping and the source.

        empty: no page is mapped yet; as many granules as the source has pages for are mapped now.
        Raises DeviceMemoryShort if not even one is.
        """
        self._mapping = mapping
        self._source = source
        self._use = use
        self._held: set[int] = set()
        self._away = 0
        self.bytes_total = bytes_total
        if empty:
            self._begin_empty()

    @property
    def released(self) -> Collection[int]:
        return self._held

    @property
    def kept(self) -> int:
        return -(-self._source.idle // self._use.most_pages)

    @property
    def owed(self) -> int:
        return -(-self._source.wanted // self._use.most_pages)

    def borrowed(self, granule: int) -> bool:
        foreign = self._source.foreign
        if not foreign:
            return False
        return any(self._mapping.behind(page) in foreign for page in self._use.pages_of(granule))

    def ready(self, granules: Sequence[int]) -> int:
        left = self._source.available
        for count, granule in enumerate(granules):
            left -= self._use.lacking(granule)
            if left < 0:
                return count
        return len(granules)

    def recall(self, granules: int) -> None:
        self._source.recall(granules * self._use.most_pages)

    def poll(self) -> bool:
        return self._source.step()

    @property
    def bytes_returned(self) -> int:
        away = max(0, self._away - self._source.idle)
        return min(self.bytes_total, away * self._mapping.page_bytes)

    def release(self, granules: Collection[int]) -> None:
        """Map the alias page under these granules, and give their own pages to the source.

        On DeviceError nothing changed.
        """
        due = [granule for granule in granules if granule not in self._held]
        pages = self._use.take(due)
        try:
            gone = self._mapping.back(pages, [self._mapping.alias] * len(pages))
        except DeviceError:
            self._use.give(due)
            raise
        self._held.update(due)
        self._away += len(pages)
        self._source.give(gone)

    def restore(self, granules: Collection[int]) -> None:
        """Map zeroed pages of the source under these granules.

        Raises DeviceMemoryShort while there are too few, or DeviceError; nothing changed then.
        """
        due = [granule for granule in granules if granule in self._held]
        pages = self._use.give(due)
        try:
            self._fetch(pages)
        except DeviceError:
            self._use.take(due)
            raise
        self._held.difference_update(due)
        self._away -= len(pages)

    def _begin_empty(self) -> None:
        every = range(self._use.granules)
        self._away += len(self._use.take(every))
        self._held.update(every)
        # Granule 0 has vLLM's null block, which an engine needs.
        self.restore([0])
        with suppress(DeviceMemoryShort):
            for first in range(1, len(every), AT_ONCE):
                some = every[first : first + AT_ONCE]
                ready = self.ready(some)
                self.restore(some[:ready])
                if ready < len(some):
                    return

    def _fetch(self, pages: list[int]) -> None:
        handles = self._source.take(len(pages))
        try:
            self._mapping.back_zeroed(pages, handles)
        except MappingLost:
            raise  # Somebody may still write to these pages: nobody else is to have them.
        except DeviceError:
            self._source.give(handles)
            raise


class Reservation:
    """KV memory of an engine on a GPU: `size` bytes from `address` on, readable at any time.

    mapping: from these addresses to pages. source: supplier of the pages. All is zeroed at first.
    """

    def __init__(
        self,
        driver: Driver,
        size: int,
        *,
        source: PageSource | None = None,
        partly: bool = False,
        headroom_bytes: int = 0,
        most_spare: int = 0,
    ) -> None:
        """Reserve the memory, with pages under all of it, and register it for `reservation_at`.

        source: supplier of pages, closed with this; by default a PagePool of `most_spare` and
        `headroom_bytes`. partly: if memory is short, begin without any page; `backend` maps the
        available ones, and only an engine that balloons the memory may use it then. Raises
        DeviceError.
        """
        if size <= 0:
            raise DeviceError(f"a KV cache of {size} bytes; give the engine more GPU memory")
        self.size = size
        self.page_bytes = driver.granularity
        pages = -(-size // self.page_bytes)
        self.source = source or PagePool(
            driver, self.page_bytes, most_spare=most_spare, headroom_bytes=headroom_bytes
        )
        self._empty = partly and self.source.available < pages
        own = [] if self._empty else self.source.take(pages)
        try:
            self.mapping = VirtualMapping(driver, self.page_bytes, pages, own)
        except MappingLost:
            raise
        except DeviceError:
            self.source.give(own)
            self.source.close()
            raise
        self.address = self.mapping.base
        _reservations[self.address] = self

    def backend(self, extents: Sequence[Extent], granules: Granules) -> CudaPages:
        """Return the page backend of KV blocks that lie at `extents` in this memory; call it once.

        Raises DeviceMemoryShort if a reservation that began empty gets no granule.
        """
        mapping = self.mapping
        use = PageRefcounts(extents, granules, mapping.base, mapping.page_bytes, mapping.pages)
        return CudaPages(mapping, self.source, use, self.size, empty=self._empty)

    def close(self) -> None:
        """Free the addresses and pages; no tensor over the memory may be used any more."""
        del _reservations[self.address]
        self.source.give(self.mapping.close())
        self.source.close()


def reservation_at(address: int) -> Reservation | None:
    """Return this process's reservation that begins at `address`, None if there is none."""
    return _reservations.get(address)


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Signed bytes at a device address, for torch; `owner` lives as long as a tensor over them."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    owner: Reservation

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """Description of the bytes for torch (version 3): writable, no stream has work pending."""
        return {
            "shape": self.shape,
            "strides": self.strides,
            "typestr": "|i1",
            "data": (self.address, False),
            "stream": None,
            "version": 3,
        }


def whole(reservation: Reservation) -> DeviceBytes:
    """Return all bytes of the reservation, of shape `[size]`: an engine's view of its KV cache."""
    return DeviceBytes(reservation.address, (reservation.size,), None, reservation)


def layer(reservation: Reservation, extent: Extent, blocks: int) -> DeviceBytes:
    """Return one layer's bytes of the first blocks, of shape `[blocks, block_bytes]`.

    Raises ValueError for blocks that lie outside of the reservation.
    """
    end = extent.base + (blocks - 1) * extent.stride + extent.block_bytes
    if extent.base < reservation.address or end > reservation.address + reservation.size:
        raise ValueError(f"{blocks} blocks from {extent.base:#x} to {end:#x} are not KV memory")
    shape = (blocks, extent.block_bytes)
    return DeviceBytes(extent.base, shape, (extent.stride, 1), reservation)


def as_tensor(memory: DeviceBytes, device: torch.device) -> torch.Tensor:
    """Return an int8 tensor over the bytes, on their device, without a copy."""
    import torch

    return torch.as_tensor(memory, device=device)
