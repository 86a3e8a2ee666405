"""A real guest computes nothing of its start beside a busy host, and starts when it is idle."""

import asyncio
import os
from pathlib import Path

import pytest
from standin_node import StandInNode
from tiny_model import save_tiny_model
from vllm_versions import VERSIONS, run_by

from executor import ControlPage
from executor.vllm.gated_start import GATED_START
from rose.engines import EngineProcess, EngineRole, EngineSpec
from rose.ports import free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

HELD_S = 10.0
LOADED = "Loading weights took"


async def said(engine: EngineProcess, words: str, patience_s: float = 120.0) -> None:
    async with asyncio.timeout(patience_s):
        while words not in engine.spec.log.read_text(errors="replace"):
            assert engine.process.returncode is None, engine.last_words()
            await asyncio.sleep(0.2)


def spec_of(root: Path, page: ControlPage, python: str | None) -> EngineSpec:
    how = run_by(python, root)
    theirs = how.get("extra_env", {}).get("PYTHONPATH", "")
    paths = [str(Path(__file__).parent), theirs, os.environ.get("PYTHONPATH", "")]
    return EngineSpec(
        name="guest-0",
        role=EngineRole.GUEST,
        model_dir=root / "model",
        port=free_port(),
        log=root / "guest.log",
        dtype="float32",
        kv_bytes=64 << 20,
        control_page=page.path,
        orphan_s=60.0,
        python=how.get("python"),
        extra_args=("--skip-tokenizer-init", "--worker-cls=gated_cpu_worker.GatedCpuWorker"),
        extra_env={"PYTHONPATH": os.pathsep.join(filter(None, paths)), GATED_START: "1"},
    )


@pytest.mark.parametrize("python", VERSIONS)
async def test_a_start_waits_for_its_host_and_then_is_done(
    tmp_path: Path, python: str | None
) -> None:
    save_tiny_model(tmp_path / "model", dtype="float32")
    page = ControlPage.create(tmp_path / "page")
    node = StandInNode(page)
    node.host_running = 2
    node.start()
    engine = await EngineProcess.start(spec_of(tmp_path, page, python))
    try:
        await said(engine, LOADED)
        await asyncio.sleep(HELD_S)
        assert "passes of the start" not in engine.spec.log.read_text(errors="replace")
        node.host_running = 0
        await said(engine, "passes of the start waited")
        await engine.wait_healthy(120)
        held = next(
            line
            for line in engine.spec.log.read_text(errors="replace").splitlines()
            if "passes of the start waited" in line
        )
        assert float(held.split(" waited ")[1].split()[0]) > HELD_S / 2
    finally:
        await engine.stop()
        node.stop()
        page.close()
