"""A real guest computes nothing of its start beside a busy host, and starts when it is idle."""

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest
from tiny_model import save_tiny_model

from executor import ControlPage, Grant, GrantMode, HostState
from executor.vllm.gated_start import GATED_START
from rose.engines import EngineProcess, EngineRole, EngineSpec, module_path
from rose.ports import free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

HELD_S = 10.0
LOADED = "Loading weights took"


class StandInBusyHost(threading.Thread):
    """A host that is busy until it is told otherwise, and a node that grants warm-up."""

    def __init__(self, page: ControlPage) -> None:
        super().__init__(daemon=True)
        self._page = page
        self._ended = threading.Event()
        self.running = 2

    def run(self) -> None:
        while not self._ended.wait(0.02):
            now_ns = time.monotonic_ns()
            self._page.host.write(HostState(running=self.running, heartbeat_ns=now_ns))
            self._page.grant.write(
                Grant(
                    GrantMode.RUN,
                    token_budget=2048,
                    max_sequences=32,
                    epoch=1,
                    reason="warm_up",
                    heartbeat_ns=now_ns,
                    expiry_ns=now_ns + 500_000_000,
                )
            )

    def stop(self) -> None:
        self._ended.set()
        self.join()


async def said(engine: EngineProcess, words: str, patience_s: float = 120.0) -> None:
    async with asyncio.timeout(patience_s):
        while words not in engine.spec.log.read_text(errors="replace"):
            assert engine.process.returncode is None, engine.last_words()
            await asyncio.sleep(0.2)


def spec_of(root: Path, page: ControlPage, python: Path | None) -> EngineSpec:
    here = str(Path(__file__).parent)
    paths = [here, module_path(root / "metadata")] if python else [here]
    paths.append(os.environ.get("PYTHONPATH", ""))
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
        python=python,
        extra_args=("--skip-tokenizer-init", "--worker-cls=gated_cpu_worker.GatedCpuWorker"),
        extra_env={"PYTHONPATH": os.pathsep.join(filter(None, paths)), GATED_START: "1"},
    )


def pythons() -> list[object]:
    other = os.environ.get("ROSE_VLLM25_PYTHON")
    skip = pytest.mark.skipif(not other, reason="ROSE_VLLM25_PYTHON names no interpreter")
    return [
        pytest.param(None, id="the vLLM here"),
        pytest.param(Path(other or "absent"), id="vLLM 0.25", marks=skip),
    ]


@pytest.mark.parametrize("python", pythons())
async def test_a_start_waits_for_its_host_and_then_is_done(
    tmp_path: Path, python: Path | None
) -> None:
    save_tiny_model(tmp_path / "model", dtype="float32")
    page = ControlPage.create(tmp_path / "page")
    host = StandInBusyHost(page)
    host.start()
    engine = await EngineProcess.start(spec_of(tmp_path, page, python))
    try:
        await said(engine, LOADED)
        await asyncio.sleep(HELD_S)
        assert "passes of the start" not in engine.spec.log.read_text(errors="replace")
        host.running = 0
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
        host.stop()
        page.close()
