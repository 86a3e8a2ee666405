"""Processes of tests: forked ones, those that a run left behind, and free consecutive ports."""

import asyncio
import contextlib
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Self

import psutil

from tests.harness.waiting import PATIENCE_S

# No module that is run as a program itself: it would be there twice.
PRELOADED = [
    "rose.main.node",
    "rose.gateway.app",
    "rose.weight_distribution",
    "tests.harness.seated_host",
]
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(PRELOADED)


class Forked:
    """A Python program with the methods of `subprocess.Popen`; `argv` as Python's, without it."""

    def __init__(
        self, *argv: str, stdout: bool = False, stderr: Path | None = None, **environ: str
    ) -> None:
        reader, writer = _server.Pipe(duplex=False)
        self._process = _server.Process(
            target=_run,
            args=(argv, os.environ | environ, writer if stdout else None, stderr),
            daemon=True,
        )
        self._process.start()
        writer.close()
        self.stdout: IO[str] | None = os.fdopen(os.dup(reader.fileno())) if stdout else None
        reader.close()
        assert self._process.pid
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Result of the last `poll`."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0.0)
        return self._process.exitcode

    async def line(self) -> str:
        """Return its next line on standard output."""
        assert self.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            return (await asyncio.to_thread(self.stdout.readline)).strip()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # The fork server may have seen its end just now, and has not told yet.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill it, and leave nothing of it."""
        self.kill()
        self.wait()
        if self.stdout is not None:
            self.stdout.close()


def _run(
    argv: tuple[str, ...],
    environ: Mapping[str, str],
    stdout: Connection | None,
    stderr: Path | None,
) -> None:
    if stdout is not None:
        os.dup2(stdout.fileno(), 1)
        stdout.close()
    if stderr is not None:
        with stderr.open("ab") as file:
            os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environ)
    if argv[0] == "-m":
        sys.argv[:] = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = argv
        sys.path.insert(0, str(Path(argv[0]).parent))
        runpy.run_path(argv[0], run_name="__main__")


def left_behind(name: str, value: str) -> list[str]:
    """Their command lines."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


BASES = range(18_500, 30_000, 100)


def first_of(count: int) -> int:
    """The first of so many consecutive ports that nobody listens on."""
    for base in BASES:
        sockets = [socket.socket() for _ in range(count)]
        try:
            for number, probe in enumerate(sockets):
                probe.bind(("127.0.0.1", base + number))
        except OSError:
            continue
        finally:
            for probe in sockets:
                probe.close()
        return base
    raise AssertionError("no free ports")
