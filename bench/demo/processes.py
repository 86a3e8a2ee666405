"""Processes of a run: CPU time, memory and priority, by the names that a person knows.

Trainer, gateway and the dedicated engine share one core here, where each would have its own. An
engine that steps as often as it can makes small, wasteful batches and keeps the trainer from
publishing, so it yields to both: it loses no work, it makes larger batches.
"""

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from bench.common.engines import make_foreground, make_nicer
from bench.demo.report.records import RunLayout
from bench.demo.stack import Stack
from bench.demo.view import Board
from rose.errors import RoseError
from rose.logs.eventlog import KEEP_ALL, JsonlLog

_NAME_FLAG = "--served-model-name="


def trees(roots: Mapping[str, int]) -> Iterator[tuple[str, psutil.Process]]:
    """Every process of the run with the name it counts under.

    roots: pids of the processes that the demo started. An engine that a node daemon runs counts
    under its own name, what else a process starts counts under its parent's.
    """
    for name, pid in roots.items():
        try:
            root = psutil.Process(pid)
            yield name, root
            for child in root.children():
                label = engine_name(child) or name
                yield label, child
                for descendant in child.children(recursive=True):
                    yield label, descendant
        except psutil.NoSuchProcess:
            continue


def engine_name(process: psutil.Process) -> str | None:
    """The served name of an engine's API process, None for any other process."""
    try:
        arguments = process.cmdline()
    except psutil.Error:
        return None
    names = [a.removeprefix(_NAME_FLAG) for a in arguments if a.startswith(_NAME_FLAG)]
    return names[0] if names else None


def cpu_seconds(roots: Mapping[str, int]) -> dict[str, float]:
    """User and system time of each name since its processes started."""
    total: dict[str, float] = {}
    for name, process in trees(roots):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total[name] = total.get(name, 0.0) + times.user + times.system
    return total


def memory_bytes(roots: Mapping[str, int]) -> dict[str, int]:
    """Proportional set size of each name: shared pages count once over the whole run."""
    total: dict[str, int] = {}
    for name, process in (*trees(roots), ("demo", psutil.Process(os.getpid()))):
        try:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except OSError:
            continue
        kilobytes = next(
            (int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")), 0
        )
        total[name] = total.get(name, 0) + kilobytes * 1024
    return total


def engine_pid(roots: Mapping[str, int], name: str) -> int | None:
    """Pid of the API process of the engine that serves under `name`."""
    for label, process in trees(roots):
        if label == name and engine_name(process) == name:
            return process.pid
    return None


# Reading the map of a process with torch in it takes milliseconds: seldom enough not to matter.
SAMPLE_INTERVAL_S = 5.0


async def sample_memory(stack: Stack, layout: RunLayout, board: Board) -> None:
    """Write `memory.jsonl` until cancelled."""
    with JsonlLog(layout.out / "memory.jsonl", KEEP_ALL) as log:
        while True:
            sizes = await asyncio.to_thread(memory_bytes, stack.roots)
            board.memory_bytes = sum(sizes.values())
            log.write({"t_s": time.monotonic(), "bytes": sizes})
            await asyncio.sleep(SAMPLE_INTERVAL_S)


DEDICATED_NICE = 10


def yield_to_trainer(roots: Mapping[str, int], engine: str) -> None:
    """Lower the priority of every thread of `engine`."""
    for pid in _processes_of(roots, engine):
        make_nicer(pid, DEDICATED_NICE)


def level_with_host(roots: Mapping[str, int], engine: str) -> None:
    """Give every thread of `engine` the priority that the host has: naive co-location.

    Raises RoseError when the machine does not allow it.
    """
    try:
        for pid in _processes_of(roots, engine):
            make_foreground(pid)
    except PermissionError as error:
        raise RoseError(
            "--control naive raises the guest's priority to the host's, which needs root"
        ) from error


def _processes_of(roots: Mapping[str, int], engine: str) -> list[int]:
    return [process.pid for name, process in trees(roots) if name == engine]
