"""Child processes that never outlive their parent: a process group each, ended as a whole.

A group and not a session: Linux schedules sessions against each other as equals (autogroups), and
inside its own session a guest's SCHED_IDLE would mean nothing to the host.
"""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rose import placement

STOP_GRACE_S = 8.0
KILL_GRACE_S = 5.0
STREAM_LIMIT_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How a child is started.

    core: the CPU it and its children are pinned to, None for any.
    background: below every normal process (SCHED_IDLE) and first to go when memory runs out.
    family: it starts children of its own, which end with it however it ends.
    log: file that takes stdout and stderr; with `piped` only stderr.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None
    core: int | None = None
    background: bool = False
    family: bool = False
    piped: bool = False


class ManagedProcess:
    """A running child and its process group."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process) -> None:
        self.spec = spec
        self._process = process
        self._group = process.pid  # the child leads its group

    @classmethod
    async def start(cls, spec: ProcessSpec) -> "ManagedProcess":
        """Start the child. Raises FileNotFoundError when there is no such program."""
        if shutil.which(spec.argv[0]) is None:
            raise FileNotFoundError(f"{spec.argv[0]} is no program that can be run")
        log = spec.log.open("ab") if spec.log else None
        try:
            process = await asyncio.create_subprocess_exec(
                *_placed(spec),
                env={**os.environ, **spec.env},
                stdin=asyncio.subprocess.PIPE if spec.piped else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if spec.piped else log,
                stderr=log,
                process_group=0,
                limit=STREAM_LIMIT_BYTES,
            )
        finally:
            if log:
                log.close()
        return cls(spec, process)

    @property
    def pid(self) -> int:
        """Process id of the child itself."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, None while it runs."""
        return self._process.returncode

    @property
    def stdin(self) -> asyncio.StreamWriter:
        """The child's standard input (piped children only)."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> asyncio.StreamReader:
        """The child's standard output (piped children only)."""
        assert self._process.stdout is not None
        return self._process.stdout

    async def wait(self) -> int:
        """Exit status, once it has ended."""
        return await self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the child alone."""
        if self.returncode is None:
            self._process.send_signal(number)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End the whole group: TERM, a grace period, KILL. Returns when nothing of it is left."""
        self._signal_group(signal.SIGTERM)
        if not await self._gone(grace_s):
            self._signal_group(signal.SIGKILL)
            await self._gone(KILL_GRACE_S)

    async def kill(self) -> None:
        """End the whole group at once."""
        await self.stop(grace_s=0.0)

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._group, number)
        except ProcessLookupError:
            return

    async def _gone(self, patience_s: float) -> bool:
        deadline = asyncio.get_running_loop().time() + patience_s
        while group_alive(self._group):
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(0.02)
        await self._process.wait()
        return True


def group_alive(group: int) -> bool:
    """True while the group holds a process that is no zombie."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, pgrp = fields[0], int(fields[2])
        if pgrp == group and state != "Z":
            return True
    return False


def _placed(spec: ProcessSpec) -> list[str]:
    """The child's command line: placement first, which then becomes the program itself."""
    core = "-" if spec.core is None else str(spec.core)
    share = "background" if spec.background else "normal"
    kind = "family" if spec.family else "alone"
    placer = (sys.executable, "-I", "-S", str(placement.__file__))
    return [*placer, str(os.getpid()), core, share, kind, *spec.argv]
