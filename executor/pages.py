"""What backs KV blocks with physical memory, behind one interface for every kind of memory."""

from collections.abc import Collection
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

    def release(self, granules: Collection[int]) -> None:
        """Give back the pages that lie wholly inside the granules held by now."""
        ...

    def restore(self, granules: Collection[int]) -> None:
        """Have zeroed pages under these granules again, at the latest when they are touched.

        Raises DeviceMemoryShort, and changes nothing then, unless `always_restores`.
        """
        ...


class NoPages:
    """KV memory that this process cannot reach: nothing is returned, and nothing is claimed."""

    always_restores = True

    def __init__(self, bytes_total: int) -> None:
        self.bytes_total = bytes_total
        self.bytes_returned = 0

    def release(self, granules: Collection[int]) -> None:
        """Keep the pages; what is published says so."""

    def restore(self, granules: Collection[int]) -> None:
        """The pages never went away."""
