"""Child processes: each leads a group, which ends as a whole or is kept for a next parent.

A group and not a session: Linux schedules sessions against each other as equals (autogroups), and
inside its own session a guest's SCHED_IDLE would mean nothing to the host.
"""

import asyncio
import logging
import os
import shutil
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rose.process import launcher
from rose.process.launcher import Share, kill_group
from rose.process.procfs import ProcessIdentity, group_states

__all__ = ["Keep", "ManagedProcess", "ProcessSpec", "group_alive"]


STOP_GRACE_S = 8.0
KILL_GRACE_S = 5.0
POLL_S = 0.02
UNKNOWN_EXIT = -1


class ProcessGroup(ABC):
    """Base of a running process that leads a process group of its own."""

    def __init__(self, leader: int) -> None:
        self._group = leader

    @property
    def pid(self) -> int:
        """Process id of the leader."""
        return self._group

    @property
    @abstractmethod
    def returncode(self) -> int | None:
        """Exit status of the leader, None while it runs."""

    @abstractmethod
    async def wait(self) -> int:
        """Wait until the leader ends; return its exit status."""

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End the whole group: TERM, then KILL after `grace_s`; return when it is gone.

        It waits KILL_GRACE_S at most after KILL.
        """
        self._signal_group(signal.SIGTERM)
        if not await self._gone(grace_s):
            await self.kill()

    async def kill(self) -> None:
        """Kill the whole group, and wait until it is gone, KILL_GRACE_S at most."""
        try:
            kill_group(self._group)
        except OSError as error:  # without descriptors: then at the kernel's pace
            _logger.warning("the group of %d cannot be listed: %s", self._group, error)
        self._signal_group(signal.SIGKILL)  # whatever was started meanwhile
        await self._gone(KILL_GRACE_S)

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
            await asyncio.sleep(POLL_S)
        await self.wait()
        return True


class AdoptedProcess(ProcessGroup):
    """Process group that an earlier parent started; its exit status cannot be known."""

    def __init__(self, identity: ProcessIdentity) -> None:
        super().__init__(identity.pid)
        self._identity = identity

    @property
    def returncode(self) -> int | None:
        """None while the process runs, UNKNOWN_EXIT afterwards."""
        return None if self._identity.running else UNKNOWN_EXIT

    async def wait(self) -> int:
        """Wait until the process ends; return UNKNOWN_EXIT."""
        while self._identity.running:  # noqa: ASYNC110 - another process is waited for
            await asyncio.sleep(POLL_S)
        return UNKNOWN_EXIT


def group_alive(group: int) -> bool:
    """Return True while the group holds a process that is not a zombie, or cannot be read."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    try:
        return bool(group_states(group))
    except OSError:
        # Without descriptors /proc cannot be read; an unseen group counts as alive.
        return True


STREAM_LIMIT_BYTES = 4 << 20

_logger = logging.getLogger("rose.process.child")


@dataclass(frozen=True, slots=True)
class Keep:
    """Conditions under which a child outlives its parent.

    claim: descriptor of an open file, which this process has locked; the child ends once no process
    has locked it for `orphan_s`. kill_file: the child ends while this file exists, whichever
    process lives.
    """

    claim: int
    kill_file: Path
    orphan_s: float


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Command line, placement and lifetime of a child process.

    cores: CPUs that it and its children are pinned to, () for any. share: "background" runs
    below every normal process (SCHED_IDLE), "aside" is a normal process of a tenth of the weight;
    both are killed first when memory runs out. None: the parent's share. cgroup: folder of the
    cgroup that it is moved to. family: it starts children of its own, which end with it however it
    ends. keep: None ends it with its parent. log: file that takes stdout and stderr; with `piped`
    only stderr.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None
    cores: Sequence[int] = ()
    share: Share | None = None
    cgroup: Path | None = None
    family: bool = False
    keep: Keep | None = None
    piped: bool = False


class ManagedProcess(ProcessGroup):
    """Child process that this process started, and the process group that it leads."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process) -> None:
        super().__init__(process.pid)
        self.spec = spec
        self._process = process

    @classmethod
    async def start(cls, spec: ProcessSpec) -> "ManagedProcess":
        """Start a child in a group of its own and return it.

        Raises FileNotFoundError if there is no such program.
        """
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
        """Exit status of the child, None while it runs."""
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
        """Wait until the child ends; return its exit status."""
        return await self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the child alone, if it still runs."""
        if self.returncode is None:
            self._process.send_signal(number)


def _opened(log: Path | None) -> int | None:
    """Return a descriptor for the child's output, None without a log.

    A file that cannot be opened, as on a full disk, gives DEVNULL and a warning: the child starts.
    """
    if log is None:
        return None
    try:
        return os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        _logger.warning("%s cannot be written (%s): what it says is lost", log, error.strerror)
        return asyncio.subprocess.DEVNULL


def _placed(spec: ProcessSpec) -> list[str]:
    """Return the child's command line: the launcher, which becomes the program itself."""
    options: dict[str, object] = {}
    if spec.keep:
        options |= {"claim": spec.keep.claim, "orphan_s": spec.keep.orphan_s}
        options["kill_file"] = spec.keep.kill_file.absolute()
    else:
        options["parent"] = os.getpid()
    if spec.cores:
        options["cores"] = ",".join(map(str, spec.cores))
    if spec.share:
        options["share"] = spec.share
    if spec.cgroup:
        options["cgroup"] = spec.cgroup
    if spec.family:
        options["family"] = "yes"
    placer = (sys.executable, "-I", "-S", str(launcher.__file__))
    return [*placer, *(f"{name}={value}" for name, value in options.items()), "--", *spec.argv]
