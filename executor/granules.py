"""Granules: the runs of KV blocks that are taken from a guest, and given back to it, as a whole."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Granules:
    """How `blocks` KV blocks fall into granules of `granule_blocks`; the last may be shorter."""

    blocks: int
    granule_blocks: int

    def __post_init__(self) -> None:
        if self.blocks <= 0 or self.granule_blocks <= 0:
            raise ValueError("blocks and granule_blocks must be positive")

    @property
    def count(self) -> int:
        """Granules in all."""
        return -(-self.blocks // self.granule_blocks)

    def of(self, block: int) -> int:
        """The granule a block lies in."""
        return block // self.granule_blocks

    def blocks_of(self, granule: int) -> range:
        """The blocks of a granule."""
        first = granule * self.granule_blocks
        return range(first, min(first + self.granule_blocks, self.blocks))
