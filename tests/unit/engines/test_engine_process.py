"""Processes end whole, and an engine that dies at start says why."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rose.addresses import free_port
from rose.engines import EngineProcess, EngineRole, EngineSpec, launch, process_spec
from rose.engines.launch import check_model, check_port, check_spec
from rose.errors import ConfigError, EngineStartError
from rose.process.child import ManagedProcess, ProcessSpec, group_alive
from tests.harness.waiting import PATIENCE_S, until_async

PARENT = """
import subprocess, time
subprocess.Popen(["sleep", "60"])
print("has a child", flush=True)
time.sleep(60)
"""
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(60)
"""
PRIORITY = """
import os
print(os.sched_getscheduler(0), open('/proc/self/oom_score_adj').read())
"""


async def started(script: str, **spec: Any) -> ManagedProcess:
    argv = (sys.executable, "-c", script)
    return await ManagedProcess.start(ProcessSpec("p", argv, piped=True, **spec))


async def until_gone(group: int) -> None:
    await until_async(lambda: not group_alive(group), PATIENCE_S, "the group is gone")


def _spec(tmp_path: Path, port: int = 0) -> EngineSpec:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    log = tmp_path / "engine.log"
    return EngineSpec("guest", EngineRole.GUEST, tmp_path, port, log, control_page=tmp_path / "p")


async def test_stopping_a_process_ends_its_children_too() -> None:
    process = await started(PARENT)
    await process.stdout.readline()
    await process.stop(grace_s=2.0)
    assert not group_alive(process.pid)


async def test_a_process_that_ignores_term_is_killed() -> None:
    process = await started(DEAF)
    await process.stdout.readline()
    await process.stop(grace_s=0.1)
    assert process.returncode == -9


async def test_the_children_of_a_killed_process_end_with_it() -> None:
    process = await started(PARENT, family=True)
    await process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL
    await until_gone(process.pid)


async def test_a_process_dies_with_the_one_that_started_it(tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
from pathlib import Path
from rose.process.child import ManagedProcess, ProcessSpec
async def main():
    argv = (sys.executable, "-c", "import time; time.sleep(60)")
    spec = ProcessSpec("child", argv, log=Path({str(tmp_path / "log")!r}), family=True)
    print((await ManagedProcess.start(spec)).pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = await started(script)
    child = int(await parent.stdout.readline())
    await asyncio.sleep(0.1)
    os.kill(parent.pid, signal.SIGKILL)
    await parent.wait()
    await until_gone(child)


async def test_a_background_process_runs_below_all_others() -> None:
    process = await started(PRIORITY, share="background")
    printed = (await process.stdout.read()).split()
    await process.wait()
    assert [int(value) for value in printed] == [os.SCHED_IDLE, 1000]


@pytest.fixture
def run_as_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Start a script where an engine would be started."""
    monkeypatch.setattr(launch, "POLL_INTERVAL_S", 0.02)

    def run(script: str) -> None:
        argv = (sys.executable, "-c", script)
        monkeypatch.setattr(
            launch, "process_spec", lambda spec: ProcessSpec(spec.name, argv, log=spec.log)
        )

    return run


async def test_an_engine_that_dies_at_start_says_its_last_error(
    tmp_path: Path, run_as_engine: Callable[[str], None]
) -> None:
    run_as_engine("raise ValueError('no such layer')")
    engine = await EngineProcess.start(_spec(tmp_path))
    with pytest.raises(EngineStartError, match="ValueError: no such layer"):
        await engine.wait_healthy(5.0)


async def test_a_replica_without_its_endpoint_is_not_healthy(
    tmp_path: Path, run_as_engine: Callable[[str], None]
) -> None:
    port = free_port()
    run_as_engine(f"""
import http.server as h, sys
print("(APIServer pid=7) ERROR 11-21 06:24:58 [x.py:72] ImportError: no such name", flush=True)
class NoEndpoint(h.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
h.HTTPServer(("127.0.0.1", {port}), NoEndpoint).serve_forever()
""")
    engine = await EngineProcess.start(_spec(tmp_path, port))
    try:
        with pytest.raises(EngineStartError, match="without ROSE's endpoint: ImportError: no such"):
            await engine.wait_healthy(5.0)
    finally:
        await engine.stop()


def test_a_busy_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} .*gateway"):
            check_port(port, "gateway")


def test_a_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        check_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"kv_bytes": 1 << 50}, r"engine guest: .* GiB of free memory"),
        ({"headroom_bytes": 1 << 50}, r"guest: .* beyond the headroom of 1048576\.0; stop"),
    ],
)
def test_an_engine_that_does_not_fit_beside_its_host_is_not_started(
    tmp_path: Path, changes: dict[str, int], line: str
) -> None:
    spec = _spec(tmp_path)
    check_spec(spec)
    with pytest.raises(EngineStartError, match=line):
        check_spec(replace(spec, **changes))  # type: ignore[arg-type]


def test_only_the_guest_gets_gate_and_page_and_yields_its_core(tmp_path: Path) -> None:
    guest = process_spec(_spec(tmp_path))
    assert guest.share == "background"
    assert guest.env["ROSE_CONTROL_PAGE"]
    assert any("GatedScheduler" in argument for argument in guest.argv)
    dedicated = process_spec(EngineSpec("d", EngineRole.DEDICATED, tmp_path, 1, tmp_path / "l"))
    assert dedicated.share is None
    assert "ROSE_CONTROL_PAGE" not in dedicated.env
    assert not any("scheduler-cls" in argument for argument in dedicated.argv)


@pytest.mark.parametrize(
    "cause",
    ["ValueError: no such model", "executor.errors.ExecutorError: profile.json: not a profile"],
)
async def test_the_first_error_of_the_log_is_what_an_engine_ended_of(
    tmp_path: Path, cause: str
) -> None:
    spec = _spec(tmp_path)
    spec.log.write_text(
        "(EngineCore pid=7) ERROR 11-21 13:05:56 [core.py:1510] Traceback (most recent call last)\n"
        f"(EngineCore pid=7) ERROR 11-21 13:05:56 [core.py:1510] {cause}\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    engine = EngineProcess(spec, await started(""))
    await engine.process.wait()
    assert engine.last_words() == cause


def test_shared_memory_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch.check_memory("engine g0", 0)
    monkeypatch.setattr(launch, "SHARED_MEMORY", str(tmp_path / "none"))
    with pytest.raises(EngineStartError, match=r"g0 need .*/none, which cannot be written .*tmpfs"):
        launch.check_memory("engine g0", 0)
