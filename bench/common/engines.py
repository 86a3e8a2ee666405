"""Engines of a benchmark: host, ROSE guest and stock guest, started, placed, checked, stopped.

Placement says where and how the kernel runs an engine that runs already: a bench moves it between
arms.
"""

import asyncio
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from rose.engines import EngineProcess, EngineSpec
from rose.errors import ConfigError, EngineStartError

_ROUNDS = 5
_PRIORITY = os.sched_param(0)
# Made by `make install-sglang`.
SGLANG_PYTHON: Final = Path(".venv-sglang/bin/python")


def pin(pid: int, cores: Collection[int]) -> None:
    """Bind all threads of a process to these cores."""
    _for_threads(pid, lambda thread: os.sched_setaffinity(thread, cores))


def make_background(pid: int) -> None:
    """Put all threads of a process behind everybody else's."""
    _for_threads(pid, lambda thread: os.sched_setscheduler(thread, os.SCHED_IDLE, _PRIORITY))


def make_foreground(pid: int) -> None:
    """Put all threads of a process back among everybody else's; it takes the right to do so."""

    def level(thread: int) -> None:
        os.sched_setscheduler(thread, os.SCHED_OTHER, _PRIORITY)
        os.setpriority(os.PRIO_PROCESS, thread, 0)

    _for_threads(pid, level)


def make_nicer(pid: int, nice: int) -> None:
    """Let all threads of a process yield to others by so much."""
    _for_threads(pid, lambda thread: os.setpriority(os.PRIO_PROCESS, thread, nice))


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    process = psutil.Process(pid)
    return [pid, *(child.pid for child in process.children(recursive=True))]


def _for_threads(pid: int, apply: Callable[[int], None]) -> None:
    # A thread may start others meanwhile: go round until a look finds no new one.
    done: set[int] = set()
    for _ in range(_ROUNDS):
        try:
            fresh = {int(name) for name in os.listdir(Path("/proc", str(pid), "task"))} - done
        except FileNotFoundError:
            return  # it has ended
        for thread in fresh:
            try:
                apply(thread)
            except ProcessLookupError:
                continue
        if not fresh:
            return
        done |= fresh


@dataclass(slots=True, kw_only=True)
class EngineSet:
    """Engines by name; a started one is in `running`."""

    ports: Mapping[str, int]
    running: dict[str, EngineProcess] = field(default_factory=dict)

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def headers(self, name: str) -> dict[str, str]:
        """Return the headers that its controller has to send."""
        return self.running[name].headers

    def pid(self, name: str) -> int | None:
        engine = self.running.get(name)
        return engine.process.pid if engine and engine.process.returncode is None else None

    async def start_together(
        self, specs: Iterable[EngineSpec], timeout_s: float, logs: Path
    ) -> None:
        """Start all at once. Raises EngineStartError for the first that does not come up."""
        for spec in specs:
            self.running[spec.name] = await EngineProcess.start(spec)
        await await_all(self.running, timeout_s, logs)

    def check(self) -> None:
        """Raise when an engine ended by itself."""
        for name, engine in self.running.items():
            if engine.process.returncode is not None:
                raise EngineStartError(
                    f"engine {name} ended: {engine.last_words()}; see {engine.spec.log}"
                )

    async def stop(self) -> None:
        await asyncio.gather(*(engine.stop() for engine in self.running.values()))
        self.running.clear()


async def await_all(engines: Mapping[str, EngineProcess], timeout_s: float, logs: Path) -> None:
    """Return once all serve. Raises EngineStartError as soon as one cannot, or when time is up."""
    waiting = {
        asyncio.create_task(engine.wait_healthy(timeout_s), name=name)
        for name, engine in engines.items()
    }
    done, late = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
    for task in late:
        task.cancel()
    for task in done:
        task.result()
    if late:
        names = ", ".join(sorted(task.get_name() for task in late))
        raise EngineStartError(
            f"not ready after {timeout_s:.0f} s: {names}; see {logs}/engine-*.log"
        )


def check_sglang_python(python: Path) -> None:
    """Raise ConfigError where there is no such interpreter."""
    if not python.is_file():
        raise ConfigError(
            f"there is no {python}, an interpreter that has SGLang; run `make install-sglang`"
        )
