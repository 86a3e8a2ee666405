"""Shared by unit tests: a kernel is compiled by one process, and nobody waits for a disk."""

import fcntl
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_compiled_once() -> Iterator[None]:
    """All processes of tests need the same kernels at once: in a fresh clone each compiled them.

    One compiles and keeps the kernel on disk, where the others, which waited, find it.
    """
    compile_alone, depth = Dispatcher.compile, [0]
    path = Path(tempfile.gettempdir(), f"rose-kernels-{os.getuid()}.lock")

    @functools.wraps(compile_alone)
    def compile_once(self: Any, sig: Any) -> Callable[..., Any]:
        with global_compiler_lock:
            # A kernel's compilation compiles those that it calls.
            if not depth[0]:
                fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
            depth[0] += 1
            try:
                return compile_alone(self, sig)
            finally:
                depth[0] -= 1
                if not depth[0]:
                    fcntl.flock(lock.fileno(), fcntl.LOCK_UN)

    with pytest.MonkeyPatch.context() as patch, path.open("a") as lock:
        patch.setattr(Dispatcher, "compile", compile_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_disk_is_waited_for() -> Iterator[None]:
    """No test cuts the power. Those of disks that fail replace these functions themselves.

    Those of durability take `synced`, which records the calls.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            # A descriptor that is none is one here too.
            patch.setattr(os, name, lambda file: os.fstat(file) and None)
        yield


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Record what is synced, in order: inode, and path at that moment."""
    calls: list[tuple[int, str]] = []

    def record(file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        calls.append((os.fstat(descriptor).st_ino, os.readlink(f"/proc/self/fd/{descriptor}")))

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, record)
    return calls
