"""Processes of the benchmark: engine, generator and routers, each placed and each counted."""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from rose.contract.gateway import GatewayHealthReport
from rose.errors import EngineStartError

POLL_S = 0.1
ANSWER_S = 120.0


def cores() -> dict[str, list[int]]:
    """Who runs where: routers have a core of their own; where there are two, the rest shares one.

    Generator and engine need a fifth of a core each at 2,000 streams.
    """
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        return {"generator": usable, "engine": usable, "router": usable}
    engine = usable[2] if len(usable) > 2 else usable[0]
    return {"generator": [usable[0]], "engine": [engine], "router": [usable[1]]}


@dataclass(frozen=True, slots=True)
class Used:
    """Seconds on a processor, and seconds ready to run while others had it."""

    ran_s: float
    waited_s: float


def used(pid: int) -> Used:
    """What a process and its children used of the processor so far."""
    ran = waited = 0
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            for thread in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
                with suppress(OSError):
                    ran_ns, waited_ns, _ = map(int, thread.read_text().split())
                    ran, waited = ran + ran_ns, waited + waited_ns
    return Used(ran / 1e9, waited / 1e9)


class MeasuredProcess:
    """A process and its children: pinned at start, its processor time on demand."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        cores: Sequence[int],
        env: Mapping[str, str] | None = None,
        piped: bool = False,
    ) -> None:
        self.name = name
        self._log = log
        pipe = subprocess.PIPE if piped else None
        with log.open("ab") as errors:
            self._process = subprocess.Popen(  # noqa: S603 - named by the operator
                argv,
                stdin=pipe,
                stdout=pipe or errors,
                stderr=errors,
                env={**os.environ, **(env or {})},
                process_group=0,
            )
        with suppress(OSError):
            os.sched_setaffinity(self._process.pid, cores)

    def say(self, line: bytes) -> bytes:
        """Write a line, read a line. Raises EngineStartError when the process ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise EngineStartError(f"{self.name} has ended; see {self._log}") from error
        return self.read()

    def read(self) -> bytes:
        """The next line of its output."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineStartError(f"{self.name} has ended; see {self._log}")
        return bytes(line)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def used(self) -> Used:
        """What it and its children used of the processor so far."""
        return used(self._process.pid)

    def wait_answers(self, url: str, replicas: int = 0, within_s: float = ANSWER_S) -> None:
        """Return once `url` answers 200. Raises EngineStartError.

        `replicas`: for a gateway of ROSE, which answers before it has asked its replicas what they
        are; it has to know so many.
        """
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s:
            if self._process.poll() is not None:
                raise EngineStartError(f"{self.name} ended at its start; see {self._log}")
            if answers(url, replicas):
                return
            time.sleep(POLL_S)
        raise EngineStartError(f"{url} of {self.name} does not answer; see {self._log}")

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, 15)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, 9)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def answers(url: str, replicas: int = 0) -> bool:
    """Whether a GET is answered with 200; if `replicas` are asked, by a gateway that knows them."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 - our own address
            if answer.status != 200 or not replicas:
                return bool(answer.status == 200)
            health = msgspec.json.decode(answer.read(), type=GatewayHealthReport)
            return health.replicas == replicas
    except (OSError, urllib.error.URLError, msgspec.MsgspecError):
        return False


class Generator(MeasuredProcess):
    """The load generator."""

    def __init__(self, log: Path, cores: Sequence[int]) -> None:
        argv = [sys.executable, "-m", "bench.gateway.generator"]
        super().__init__("generator", argv, log, cores, piped=True)

    def cell(
        self, urls: Sequence[str], wire: str, load: Mapping[str, object], seed: int
    ) -> dict[str, Any]:
        """Run one cell."""
        cell = {"urls": urls, "wire": wire, "load": load, "seed": seed}
        result: dict[str, Any] = msgspec.json.decode(self.say(msgspec.json.encode(cell)))
        return result


class StandInEngine(MeasuredProcess):
    """The stand-in for engines: half of the ports are ROSE replicas, half are stock engines."""

    def __init__(self, ports: Sequence[int], log: Path, cores: Sequence[int]) -> None:
        half = len(ports) // 2
        replicas, stock = ports[:half], ports[half:]
        names = [*map(str, replicas), *(f"s{port}" for port in stock)]
        argv = [sys.executable, "-m", "bench.gateway.standin_engine", *names]
        super().__init__("stand-in engine", argv, log, cores, piped=True)
        self.urls = [f"http://127.0.0.1:{port}" for port in replicas]
        self.stock_urls = [f"http://127.0.0.1:{port}" for port in stock]
        self.read()

    def pace(self, first_s: float, gap_s: float, chunk_tokens: int) -> None:
        """Set how turns go from now on."""
        url = f"{self.urls[0]}/standin/pace/{first_s}/{gap_s}/{chunk_tokens}"
        if not answers(url):
            raise EngineStartError("the stand-in engine does not take its pace")
