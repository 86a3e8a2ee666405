"""A host's block pool over memory of a GPU, of which free granules are lent.

A lent block is no free one: its pages may be in other hands when it is needed, so it is not in the
queue, and vLLM counts it neither as free nor as used. What is free has its pages.
"""

from typing import Final

from executor.balloon import plan_growth
from executor.lending import KvFree
from executor.vllm.host_pool import HostPool

# Bounds what one step waits for the driver.
MOST_BYTES_A_CALL: Final = 32 << 20


class PagedPool(HostPool):
    """A pool that shrinks by what is lent."""

    @property
    def free(self) -> KvFree:
        """What no request uses."""
        plain = self._queue.num_plain_blocks
        return KvFree(plain, self._queue.num_free_blocks - plain, len(self.held))

    @property
    def blocks_away(self) -> int:
        """Blocks of lent granules."""
        return len(self._pool.blocks) - self._pool.num_gpu_blocks

    def take_back(self, count: int) -> int:
        """Have up to `count` granules again, as far as there are pages for them now.

        First those whose pages never went; of the others no more than MOST_BYTES_A_CALL. Raises
        DeviceError, and changed nothing then beyond the first kind.
        """
        here = plan_growth(count, self._touchable)
        self.give_back(here)
        most = max(1, MOST_BYTES_A_CALL // max(1, self.granule_bytes))
        away = plan_growth(min(count - len(here), most), self.held)
        away = away[: self.pages.ready(away)] if away else away
        self.give_back(away)
        return len(here) + len(away)
