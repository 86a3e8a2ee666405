"""Child processes: a group each, which ends with its parent or is kept for the next one to adopt.

A group and not a session: Linux schedules sessions against each other as equals (autogroups), and
inside its own session a guest's SCHED_IDLE would mean nothing to the host.
"""

import asyncio
import logging
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rose import placement
from rose.placement import Share
from rose.process_group import ProcessGroup, group_alive

__all__ = ["Keep", "ManagedProcess", "ProcessSpec", "group_alive"]

STREAM_LIMIT_BYTES = 4 << 20

_logger = logging.getLogger("rose.process")


@dataclass(frozen=True, slots=True)
class Keep:
    """What lets a child outlive its parent: for `orphan_s` after nobody locks `claim` any more.

    claim: descriptor of an open file, which this process has locked. kill_file: while it exists
    the child ends, whoever lives.
    """

    claim: int
    kill_file: Path
    orphan_s: float


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How a child is started.

    core: the CPU it and its children are pinned to, None for any.
    share: "background" is below every normal process (SCHED_IDLE), "aside" a normal one of a tenth
    of the weight; both are first to go when memory runs out. None leaves it as its parent is.
    cgroup: folder of the cgroup it is moved to.
    family: it starts children of its own, which end with it however it ends.
    keep: None ends it with its parent.
    log: file that takes stdout and stderr; with `piped` only stderr.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None
    core: int | None = None
    share: Share | None = None
    cgroup: Path | None = None
    family: bool = False
    keep: Keep | None = None
    piped: bool = False


class ManagedProcess(ProcessGroup):
    """A running child and its process group."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process) -> None:
        super().__init__(process.pid)
        self.spec = spec
        self._process = process

    @classmethod
    async def start(cls, spec: ProcessSpec) -> "ManagedProcess":
        """Start the child. Raises FileNotFoundError when there is no such program."""
        if shutil.which(spec.argv[0]) is None:
            raise FileNotFoundError(f"{spec.argv[0]} is no program that can be run")
        log = _opened(spec.log)
        try:
            process = await asyncio.create_subprocess_exec(
                *_placed(spec),
                env={**os.environ, **spec.env},
                stdin=asyncio.subprocess.PIPE if spec.piped else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if spec.piped else log,
                stderr=log,
                process_group=0,
                pass_fds=(spec.keep.claim,) if spec.keep else (),
                limit=STREAM_LIMIT_BYTES,
            )
        finally:
            if log is not None and log >= 0:
                os.close(log)
        return cls(spec, process)

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


def _opened(log: Path | None) -> int | None:
    """Where the child writes. No disk that is full keeps it from being started."""
    if log is None:
        return None
    try:
        return os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        _logger.warning("%s cannot be written (%s): what it says is lost", log, error.strerror)
        return asyncio.subprocess.DEVNULL


def _placed(spec: ProcessSpec) -> list[str]:
    """The child's command line: placement first, which then becomes the program itself."""
    options: dict[str, object] = {}
    if spec.keep:
        options |= {"claim": spec.keep.claim, "orphan_s": spec.keep.orphan_s}
        options["kill_file"] = spec.keep.kill_file.absolute()
    else:
        options["parent"] = os.getpid()
    if spec.core is not None:
        options["core"] = spec.core
    if spec.share:
        options["share"] = spec.share
    if spec.cgroup:
        options["cgroup"] = spec.cgroup
    if spec.family:
        options["family"] = "yes"
    placer = (sys.executable, "-I", "-S", str(placement.__file__))
    return [*placer, *(f"{name}={value}" for name, value in options.items()), "--", *spec.argv]
