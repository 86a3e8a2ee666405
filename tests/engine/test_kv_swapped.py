"""A real guest in fp32 whose KV cache is pages of a GPU's driver, as a stand-in library has them.

Everything is real but that library and who computes: the engine, its blocks under the CUDA memory
backend, the driver's bindings. A page that went too early, or came back unzeroed, changes tokens.
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from balloon_guest import MIB, Guest, same_tokens_though_disturbed, started
from standin_library import build

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
]

HERE = Path(__file__).parent
PAGE = 2 * MIB
KV_BYTES = 256 * MIB


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guest(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guest]:
    pytest.importorskip("cuda.bindings.driver", reason="without cuda-bindings")
    root = tmp_path_factory.mktemp("swapped")
    library = build(root)
    path = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    worker = "--worker-cls=standin_gpu_worker.StandInGpuWorker"
    fields = {
        "kv_bytes": KV_BYTES,
        "kv_backend": "cuda",
        "extra_args": ("--skip-tokenizer-init", worker),
        "extra_env": {"LD_LIBRARY_PATH": library["LD_LIBRARY_PATH"], "PYTHONPATH": path},
    }
    async with started(root, **fields) as guest:
        yield guest


async def test_pages_leave_an_idle_guests_memory_and_come_back(guest: Guest) -> None:
    resident, full = await guest.settled_resident(), guest.state()
    assert full.granules_mapped == full.granules_total > 4
    guest.node.kv_granule_cap = 2
    await guest.until(lambda state: state.granules_mapped == 2)
    await guest.until(lambda state: state.bytes_mapped <= KV_BYTES // 2)
    gone = full.bytes_mapped - guest.state().bytes_mapped
    assert abs(resident - guest.resident() - gone) < 4 * PAGE, "the kernel has them back"
    guest.node.kv_granule_cap = 0
    await guest.until(lambda state: state.granules_mapped == full.granules_total)
    assert abs(guest.resident() - resident) < 4 * PAGE


async def test_greedy_output_is_that_of_an_undisturbed_guest(guest: Guest) -> None:
    turns, moves = await same_tokens_though_disturbed(guest, seed=0)
    assert turns > moves > 0
