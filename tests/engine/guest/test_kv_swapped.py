"""A real guest in fp32 whose KV cache is pages of a GPU's driver, as a stand-in library has them.

Everything is real but that library and who computes: the engine, its blocks under the CUDA memory
backend, the driver's bindings. A page that went too early, or came back unzeroed, changes tokens.
"""

from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio
from balloon_guest import MIB, Guest, same_tokens_though_disturbed
from engine_specs import SWAPPED
from pool import Started

pytestmark = [
    pytest.mark.engine,
    pytest.mark.engines(SWAPPED),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
]

KV_BYTES = SWAPPED.kv_bytes


@pytest.fixture(scope="module", autouse=True)
def bindings() -> None:
    pytest.importorskip("cuda.bindings.driver", reason="without cuda-bindings")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guest(engines: list[Started]) -> AsyncIterator[Guest]:
    async with aiohttp.ClientSession() as http:
        yield Guest(engines[0], http)


async def test_pages_leave_an_idle_guests_memory_and_come_back(guest: Guest) -> None:
    resident, full = await guest.settled_resident(), guest.state()
    assert full.granules_mapped == full.granules_total > 16
    guest.node.kv_granule_cap = 2
    await guest.until(lambda state: state.granules_mapped == 2)
    await guest.until(lambda state: state.bytes_mapped <= KV_BYTES // 8)
    gone = full.bytes_mapped - guest.state().bytes_mapped
    small = guest.resident()
    assert abs(resident - small - gone) < 4 * MIB, "the kernel has them back"
    guest.node.kv_granule_cap = 0
    assert (await guest.turn([1] * 40, 8))[1] == "length"
    await guest.until(lambda state: state.granules_mapped == full.granules_total)
    assert guest.resident() - small > gone - 4 * MIB, "zeroed, so they are there at once"


async def test_greedy_output_is_that_of_an_undisturbed_guest(guest: Guest) -> None:
    await same_tokens_though_disturbed(guest, seed=0)
