"""What backs KV blocks with physical memory, behind one interface for every kind of memory."""

from collections.abc import Collection, Sequence
from typing import Protocol


class PageBackend(Protocol):
    """Physical pages under the KV blocks of one engine.

    Callers serialise: no step that could touch a granule is in flight while it is released.
    """

    @property
    def always_restores(self) -> bool:
        """Whether `restore` cannot fail for want of memory."""
        ...

    @property
    def bytes_total(self) -> int:
        """Size of the KV memory."""
        ...

    @property
    def bytes_returned(self) -> int:
        """Bytes that were measured to be without pages when they were last released."""
        ...

    @property
    def released(self) -> Collection[int]:
        """Granules without pages; some are from the start where memory was short."""
        ...

    @property
    def kept(self) -> int:
        """Granules' worth of pages that this process has and nothing is mapped on."""
        ...

    @property
    def owed(self) -> int:
        """Granules to release, of those on pages of others, because these want them back."""
        ...

    def borrowed(self, granule: int) -> bool:
        """Whether a granule lies on pages of others."""
        ...

    def release(self, granules: Collection[int]) -> None:
        """Give back the pages that lie wholly inside the granules held by now."""
        ...

    def restore(self, granules: Collection[int]) -> None:
        """Have zeroed pages under these granules again, at the latest when they are touched.

        Raises DeviceMemoryShort, and changes nothing then, unless `always_restores`.
        """
        ...

    def ready(self, granules: Sequence[int]) -> int:
        """How many of these released granules, from the first on, could be restored now without
        waiting for anybody."""
        ...

    def recall(self, granules: int) -> None:
        """Ask whoever has pages of this process for so many granules; 0 ends that."""
        ...

    def poll(self) -> bool:
        """Hear those with whom pages are shared, and lend them some; never waits.

        Returns whether there is more to lend to somebody who is there. Raises LoanError or
        DeviceError.
        """
        ...


class OwnPages:
    """The part of a PageBackend that has to do with others, for memory that has nobody in it."""

    always_restores = True
    kept = 0
    owed = 0

    def borrowed(self, granule: int) -> bool:
        """All pages are this process's own."""
        return False

    def ready(self, granules: Sequence[int]) -> int:
        """Whatever is asked for."""
        return len(granules)

    def recall(self, granules: int) -> None:
        """There is nobody to ask."""

    def poll(self) -> bool:
        """There is nobody to hear."""
        return False


class NoPages(OwnPages):
    """KV memory that this process cannot reach: nothing is returned, and nothing is claimed."""

    def __init__(self, bytes_total: int) -> None:
        self.bytes_total = bytes_total
        self.bytes_returned = 0
        self.released: Collection[int] = ()

    def release(self, granules: Collection[int]) -> None:
        """Keep the pages; what is published says so."""

    def restore(self, granules: Collection[int]) -> None:
        """The pages never went away."""
