"""A real SGLang guest in fp32 whose KV buffers are pages of a GPU's driver, as a stand-in has them.

Everything is real but that library and who computes: the engine, its pool under the CUDA memory
backend, the driver's bindings. A page that went too early, or came back unzeroed, changes tokens.
"""

import asyncio
import importlib.util
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from live_replica import PROMPT, Replica, tokens_of
from sglang_python import MISSING, PYTHON

from executor import GrantMode
from rose.engines import module_path
from tests.fakes.cuda.standin_library import build

HERE = Path(__file__).parents[1]
sys.path.append(str(HERE / "contract"))
from contract_engines import SGLANG  # noqa: E402 -- the contract's, which is no package
from guest_rig import KV_BYTES, Rig, client_of, gathered, started  # noqa: E402

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not PYTHON, reason=MISSING),
]

TURN = 96
STANDIN_PAGE = 128 << 10
"""Bytes; 256 tokens of this model's keys in one layer."""


def environment(folder: Path) -> dict[str, str]:
    """Return that of an SGLang which finds the stand-in, the bindings and the test's plugin."""
    found = importlib.util.find_spec("cuda")
    if found is None or not found.submodule_search_locations:
        pytest.skip("without cuda-bindings")
    bindings = folder / "bindings"
    bindings.mkdir()
    (bindings / "cuda").symlink_to(next(iter(found.submodule_search_locations)))
    path = module_path(folder / "standin")
    (points,) = (folder / "standin").glob("*/entry_points.txt")
    text = points.read_text().replace("executor.sglang.guest.plugin:", "standin_sglang:")
    points.write_text(text)
    return {
        "PYTHONPATH": f"{HERE}:{path}:{bindings}",
        "LD_LIBRARY_PATH": build(folder)["LD_LIBRARY_PATH"],
        "STANDIN_CUDA_PAGE": str(STANDIN_PAGE),
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("swapped")
    environ = environment(folder)
    async with started(SGLANG, folder, kv_backend="cuda", extra_env=environ) as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="module")
async def replica(rig: Rig) -> AsyncIterator[Replica]:
    async with client_of(rig) as replica:
        yield replica


async def test_pages_leave_the_guest_and_come_back(rig: Rig, replica: Replica) -> None:
    expected = tokens_of(await replica.lines(PROMPT, TURN))
    whole = rig.state
    assert whole.granules_total > 64, "granules of a page in each part"
    assert whole.bytes_mapped > 0.95 * KV_BYTES
    rig.node.kv_granule_cap = 2
    await rig.said(lambda state: state.granules_mapped == 2, "the rest went back")
    assert rig.state.bytes_mapped < KV_BYTES // 8
    assert tokens_of(await replica.lines(PROMPT, TURN, salt="small")) == expected
    rig.node.kv_granule_cap = 0
    await replica.lines(PROMPT, 4)
    await rig.said(lambda state: state.granules_mapped == whole.granules_mapped, "it has them all")


async def test_greedy_output_is_that_of_an_undisturbed_guest(rig: Rig, replica: Replica) -> None:
    expected = await gathered(replica, 6, TURN)
    rng, seen = random.Random(3), set()
    for again in range(4):
        turns = asyncio.create_task(gathered(replica, 6, TURN, salt=f"again {again}"))
        while not turns.done():
            rig.node.mode = rng.choice([GrantMode.RUN, GrantMode.RUN, GrantMode.FREEZE])
            rig.node.kv_granule_cap = rng.choice([0, 4, 8, 16])
            await asyncio.sleep(rng.uniform(0.02, 0.2))
            seen.add(rig.state.granules_mapped)
        rig.node.mode, rig.node.kv_granule_cap = GrantMode.RUN, 0
        assert await turns == expected
    assert len(seen) > 3
