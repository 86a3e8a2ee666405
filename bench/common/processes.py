"""Processes of a benchmark: started, placed on a core, counted by the kernel, and ended.

Each starts through `rose.process.launcher`, so it ends with the benchmark, however that one ends.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
import psutil

from rose.contract.gateway import GatewayHealthReport
from rose.errors import EngineStartError
from rose.process import launcher

ROOT = Path(__file__).parents[2]
POLL_S, EXIT_POLL_S = 0.1, 0.01
ANSWER_S = 120.0
STOP_S = 60.0
LAST_LINES = 8


def cores() -> dict[str, list[int]]:
    """Return the core of each role: the router has one alone, engine and generator may share one.

    Generator and engine need a fifth of a core each at 2,000 streams.
    """
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        return {"generator": usable, "engine": usable, "router": usable}
    engine = usable[2] if len(usable) > 2 else usable[0]
    return {"generator": [usable[0]], "engine": [engine], "router": [usable[1]]}


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Seconds on a processor, and seconds ready to run while other threads had it."""

    ran_s: float
    waited_s: float

    def share_since(self, before: "CpuUse", seconds: float) -> tuple[float, float]:
        """Return (share of the time on a processor, share ready to run), since `before`."""
        return (self.ran_s - before.ran_s) / seconds, (self.waited_s - before.waited_s) / seconds


def cpu_use(pid: int) -> CpuUse:
    """Return the processor time of a process and its children so far."""
    ran = waited = 0
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            for thread in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
                with suppress(OSError):
                    ran_ns, waited_ns, _ = map(int, thread.read_text().split())
                    ran, waited = ran + ran_ns, waited + waited_ns
    return CpuUse(ran / 1e9, waited / 1e9)


def python(module: str, *options: object) -> tuple[str, ...]:
    """Return the command line that runs a module by this interpreter."""
    return (sys.executable, "-m", module, *map(str, options))


def gateway_command(
    port: int, urls: Mapping[str, str], max_sequences: int, *options: str
) -> tuple[str, ...]:
    """Return the command line of a gateway over dedicated replicas, given by name and address."""
    return python(
        "rose.main.gateway",
        f"--port={port}",
        *(f"--replica={name}=dedicated={url}" for name, url in urls.items()),
        f"--replica-max-sequences={max_sequences}",
        *options,
    )


def scheduler_command(port: int, folder: Path, *options: str) -> tuple[str, ...]:
    """Return the command line of a scheduler whose store and logs are in a folder."""
    return python(
        "rose.main.scheduler",
        f"--port={port}",
        f"--store={folder / 'store.sqlite'}",
        f"--log-dir={folder / 'logs'}",
        *options,
    )


@dataclass
class BenchProcess:
    """A process of a benchmark, in all its lives. Context manager.

    log: file for stderr, and for stdout unless `piped`; None inherits both. core: CPU that it is
    pinned to. env: variables besides this process's. piped: lines go to its stdin and come from its
    stdout.
    """

    name: str
    argv: Sequence[str]
    log: Path | None = None
    core: Sequence[int] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    piped: bool = False
    _process: "subprocess.Popen[bytes] | None" = field(default=None, init=False, repr=False)

    def start(self) -> Self:
        """Start it; a second start is a new life of a process that has ended."""
        options = [f"parent={os.getpid()}", *(f"cores={core}" for core in self.core[:1])]
        placer = (sys.executable, "-I", "-S", launcher.__file__, *options, "--")
        log = self.log.open("ab") if self.log else None
        try:
            self._process = subprocess.Popen(  # noqa: S603 - commands of our own, or the operator's
                [*placer, *self.argv],
                stdin=subprocess.PIPE if self.piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if self.piped else log,
                stderr=log,
                env={**os.environ, **self.env},
                cwd=self.cwd,
                process_group=0,
            )
        finally:
            if log is not None:
                log.close()
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def popen(self) -> "subprocess.Popen[bytes]":
        """Newest life of the process."""
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def running(self) -> bool:
        """True from its start to its end."""
        return self._process is not None and self._process.poll() is None

    def write(self, line: bytes | str) -> None:
        """Write a line to its standard input. Raises EngineStartError when it has ended."""
        stdin = self.popen.stdin
        assert stdin is not None
        try:
            stdin.write((line.encode() if isinstance(line, str) else line) + b"\n")
            stdin.flush()
        except OSError as error:
            raise self._ended() from error

    def read(self) -> bytes:
        """Return the next line of its output. Raises EngineStartError when it has ended."""
        stdout = self.popen.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise self._ended()
        return bytes(line)

    def ask(self, line: bytes | str) -> bytes:
        """Write a line and return the next one of its output. Raises EngineStartError."""
        self.write(line)
        return self.read()

    def event(self, name: str) -> dict[str, Any]:
        """Return its next event. Raises EngineStartError for one of another name."""
        event: dict[str, Any] = json.loads(self.read())
        if event["event"] != name:
            raise EngineStartError(f"{self.name}: {event.get('message', event)}")
        return event

    def cpu_use(self) -> CpuUse:
        """Return the processor time of it and its children so far."""
        return cpu_use(self.pid)

    def wait_answers(self, url: str, replicas: int = 0, within_s: float = ANSWER_S) -> None:
        """Return once `url` answers 200. Raises EngineStartError.

        replicas: a gateway answers before it has asked its replicas for their state; wait until it
        knows this many.
        """
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s:
            if not self.running:
                raise EngineStartError(f"{self.name} ended at its start{self._see}")
            if answers(url, replicas):
                return
            time.sleep(POLL_S)
        raise EngineStartError(f"{url} of {self.name} does not answer{self._see}")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process alone, if it runs."""
        if self.running:
            self.popen.send_signal(number)

    def kill(self) -> None:
        """Kill it and its process group, and wait until it is gone."""
        # The id of a process that was waited for may be another one's by now.
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def end(self, grace_s: float = STOP_S) -> None:
        """Terminate it, kill its group once it has ended or after `grace_s`, and wait for it."""
        if self._process is None:
            return
        self.send(signal.SIGTERM)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        until_s = time.monotonic() + grace_s
        while not self._exited and time.monotonic() < until_s:
            time.sleep(EXIT_POLL_S)
        self.kill()

    @property
    def _exited(self) -> bool:
        """True once it has ended; it is not waited for, so that its group keeps its id."""
        if self.popen.returncode is not None:
            return True
        looking = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, looking) is not None

    def _ended(self) -> EngineStartError:
        return EngineStartError(f"{self.name} has ended{self._see}")

    @property
    def _see(self) -> str:
        return f"; see {self.log}" if self.log else ""


class ProcessFleet:
    """Processes of a benchmark by name, ended in reverse order. Context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.members: dict[str, BenchProcess] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, process: BenchProcess) -> BenchProcess:
        """Keep a process, started or not, under its name."""
        self.members[process.name] = process
        return process

    def launch(
        self, name: str, module: str, *options: object, core: Sequence[int] = ()
    ) -> BenchProcess:
        """Start a module by this interpreter, with its log in the folder, and keep it."""
        log = self.folder / f"{name}.log"
        return self.add(BenchProcess(name, python(module, *options), log, core).start())

    def until(
        self, holds: Callable[[], object], timeout_s: float, what: str, poll_s: float = POLL_S
    ) -> None:
        """Return once it holds. EngineStartError when a member ends, or after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            dead = [each.name for each in self.members.values() if not each.running]
            if dead or time.monotonic() > deadline_s:
                why = f"{dead[0]} ended" if dead else f"not within {timeout_s:g} s"
                raise EngineStartError(f"no {what}: {why}\n{self.last_words()}")
            time.sleep(poll_s)

    def last_words(self) -> str:
        """Return the last lines of each log in the folder."""
        words = []
        for log in sorted(self.folder.rglob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
            words += [f"-- {log.relative_to(self.folder)}", *lines]
        return "\n".join(words)

    def close(self) -> None:
        for member in reversed(self.members.values()):
            member.end()


def answers(url: str, replicas: int = 0) -> bool:
    """Return True if a GET is answered with 200, and by a gateway that knows `replicas`."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 - our own address
            if answer.status != 200 or not replicas:
                return bool(answer.status == 200)
            health = msgspec.json.decode(answer.read(), type=GatewayHealthReport)
            return health.replicas >= replicas
    except (OSError, urllib.error.URLError, msgspec.MsgspecError):
        return False
