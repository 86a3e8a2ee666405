"""Fixtures of a node's tests: a bench for daemons, stand-ins for engines, a group of processes."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from node_bench import NodeBench, stand_in

from rose.node import daemon


@pytest.fixture
async def bench(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[NodeBench]:
    """A bench for a guest, or as the test's parameter or BENCH of its module says.

    bench: its class. kind: of the replica. files: made beside the journal, for the stand-in.
    runs: a node of it runs in this process. The rest is the replica's.
    """
    settings = dict(getattr(request, "param", getattr(request.module, "BENCH", {})))
    runs = settings.pop("runs", False)
    if runs:
        request.getfixturevalue("standins")
    for name in settings.pop("files", ()):
        (tmp_path / name).touch()
    kind = settings.pop("kind", "guest")
    bench: NodeBench = settings.pop("bench", NodeBench)(tmp_path, kind, **settings)
    await bench.start()
    async with bench.running() if runs else nullcontext():
        yield bench
    await bench.close()


@pytest.fixture
def standins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that this process starts are stand-ins, and it looks at everything often."""
    stand_in(tmp_path / "journal", monkeypatch.setattr)
    monkeypatch.setattr("rose.node.metrics.INTERVAL_S", 0.02)
    monkeypatch.setattr(daemon, "LOOK_S", 0.02)
    monkeypatch.setattr(daemon, "LOOK_EVERY_S", 0.02)


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that leads a group of its own and waits."""
    program = [sys.executable, "-S", "-c", "print(flush=True); input()"]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
    ) as process:
        assert process.stdout
        process.stdout.readline()
        yield process
        process.kill()
