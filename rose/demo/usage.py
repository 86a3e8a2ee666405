"""CPU and memory of every process of the run, by the name a person knows it by."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

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
