"""Fixtures of a node's tests: a bench for daemons, stand-ins for engines, a group of processes."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from node_bench import Bench, standin_spec

from rose.engines import launch
from rose.node import daemon
from rose.node.guest import supervisor


@pytest.fixture
async def bench(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    """A bench for a guest, or as the test's parameter or BENCH of its module says.

    kind: of the replica. files: made beside the journal, for the stand-in. The rest is the
    replica's.
    """
    said = dict(getattr(request, "param", getattr(request.module, "BENCH", {})))
    for name in said.pop("files", ()):
        (tmp_path / name).touch()
    bench = Bench(tmp_path, said.pop("kind", "guest"), **said)
    await bench.start()
    yield bench
    await bench.close()


@pytest.fixture
def standins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that this process starts are stand-ins, and it looks at everything often."""
    monkeypatch.setattr(launch, "process_spec", standin_spec(tmp_path / "journal"))
    monkeypatch.setattr(launch, "POLL_INTERVAL_S", 0.02)
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.02)
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
