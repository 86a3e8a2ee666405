"""vLLM 0.25: the bodies of 0.32's tests, run where 0.25 is installed.

Engines on 0.25 are in the files whose fixtures take `VERSIONS`. Here are the tests that need no
engine but vLLM's own scheduler, block pool and allocation, by the other interpreter; and starting.
"""

import os
import re
import subprocess
from pathlib import Path

import aiohttp
import pytest
from tiny_model import save_tiny_model
from vllm_versions import PYTHON_25, needs_25, run_by

from rose.addresses import free_port
from rose.engines import EngineProcess, EngineRole, EngineSpec

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(300), needs_25]

ROOT = Path(__file__).parents[3]
# Tests that run on vLLM: schedulers, block pools, layouts and allocation.
BODIES = {
    "guest/test_guest_balloon.py": 27,
    "gpu/test_cuda_engine.py": 11,
    "kv/test_granule_queue.py": 18,
    "host/test_host_lending.py": 28,
    "gpu/test_gpu_host.py": 28,
    "gpu/test_gpu_host_invariants.py": 4,
    "gpu/test_guest_borrows.py": 10,
}


@pytest.mark.parametrize(("file", "at_least"), BODIES.items())
def test_the_same_bodies_pass_on_the_older_vllm(file: str, at_least: int) -> None:
    run = subprocess.run(
        [PYTHON_25, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/unit/executor/{file}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= at_least, "a skipped test proves nothing"


async def test_a_replica_with_made_up_weights_is_warm_when_it_is_healthy(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", dtype="float32")
    for weights in (tmp_path / "model").glob("*.safetensors"):
        weights.unlink()
    port = free_port()
    spec = EngineSpec(
        name="dedicated-0",
        role=EngineRole.DEDICATED,
        model_dir=tmp_path / "model",
        port=port,
        log=tmp_path / "engine.log",
        max_num_seqs=4,
        max_model_len=128,
        warm_up_s=120.0,
        load_format="dummy",
        extra_args=("--skip-tokenizer-init",),
        **run_by(PYTHON_25, tmp_path),
    )
    engine = await EngineProcess.start(spec)
    try:
        await engine.wait_healthy(200)
        async with aiohttp.ClientSession() as http:
            async with http.get(f"{spec.url}/rose/v1/state") as answer:
                state = await answer.json()
            assert (state["warm"], state["role"], state["policy_version"]) == (True, "dedicated", 0)
            assert state["warm_up"]["said"].startswith("warm after")
            async with http.post(
                f"{spec.url}/rose/v1/admit", json={"epoch": 1}, headers=engine.headers
            ) as answer:
                assert answer.status == 200
            body = {"request_id": "r", "token_ids": [1, 2, 3], "sampling": {"max_tokens": 4}}
            async with http.post(f"{spec.url}/rose/v1/generate", json=body) as answer:
                lines = (await answer.text()).splitlines()
        assert sum(line.count('"version":0') for line in lines) >= 1
        assert lines[-1] == '{"finish_reason":"length"}'
    finally:
        await engine.stop()
