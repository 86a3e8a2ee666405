"""`rose demo`: start everything, play the plan, end everything, report."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.demo.cli import DemoSettings
from bench.demo.conductor import Conductor, Drills
from bench.demo.frozen_lake.models import Models
from bench.demo.plan import Plan, plan_of
from bench.demo.report.claims import exit_code
from bench.demo.report.records import RunLayout
from bench.demo.report.report import print_report, write_report
from bench.demo.stack import (
    DEDICATED,
    GUEST,
    START_TIMEOUT_S,
    Ports,
    Stack,
    Watcher,
    level_with_host,
    memory_bytes,
    yield_to_trainer,
)
from bench.demo.view import Board, JobProgress, draw
from rose.azure_trace import read_trace
from rose.engines import check_host
from rose.engines.launch import check_model
from rose.errors import EngineStartError, RoseError, UnavailableError
from rose.logs.eventlog import KEEP_ALL, EventLog, JsonlLog
from rose.process.child import ManagedProcess, ProcessSpec
from rose.rpc import rose_pb2

ENGINES = 3
MODEL_CACHE = Path("out/models")
CHILD_TIMEOUT_S = 240.0
EVALUATION_TIMEOUT_S = 120.0
PACE_TIMEOUT_S = 60.0
FINISH_TIMEOUT_S = 180.0
POLL_S = 0.25
# Reading the map of a process with torch in it takes milliseconds: seldom enough not to matter.
SAMPLE_INTERVAL_S = 5.0
# Only the bars use it before an engine answers; nothing waits for it.
USUAL_START_S = 60.0
# The fraction of the time in which the host would be busy if it served one request at a time.
HOST_BUSY = 0.5


def run_demo(settings: DemoSettings) -> int:
    """Run the demo; return 0 when no claim fails (with a control: when its claim does).

    Raises RoseError for bad input and for a process that could not be started. Every process that
    was started is ended, whichever way the run ends.
    """
    plan = plan_of(settings)
    ports = Ports.from_base(settings.port_base)
    # Several jobs share the guest, and have no dedicated engine.
    check_host(ENGINES if settings.jobs == 1 else ENGINES - 1)
    ports.check()
    if settings.trace:
        read_trace(settings.trace)
    if settings.host_model:
        check_model(settings.host_model)
    layout = RunLayout(settings.out)
    layout.prepare()
    return asyncio.run(_interruptible(_DemoRun(settings, layout, ports, plan).play()))


async def _interruptible(coroutine: Coroutine[None, None, int]) -> int:
    """Turn SIGINT and SIGTERM into a cancellation, so that every `finally` runs."""
    task = asyncio.create_task(coroutine)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def prepare_models(settings: DemoSettings, board: Board) -> Models:
    """Return the cached models, made first where they are missing (about a minute)."""
    arguments = ["--cache", str(MODEL_CACHE), *(["--long-turns"] if settings.long_turns else [])]
    process = await ManagedProcess.start(
        ProcessSpec(
            name="models",
            argv=(sys.executable, "-m", "bench.demo.frozen_lake.models", *arguments),
            log=settings.out / "logs" / "models.log",
            piped=True,
        )
    )
    try:
        while line := await process.stdout.readline():
            event = json.loads(line)
            if event["event"] == "models":
                return Models(Path(event["policy_dir"]), Path(event["host_dir"]))
            board.progress = {event["label"]: event["share"]}
    finally:
        board.progress = {}
        await process.stop()
    raise RoseError(f"the demo's models could not be made; see {process.spec.log}")


async def wait_ready(stack: Stack, watcher: Watcher, board: Board) -> None:
    """Return once host, replicas, trainers and load generator are ready.

    Raises EngineStartError when one of them dies or takes too long.
    """
    started_s = time.monotonic()
    waits: dict[str, Coroutine[Any, Any, Any]] = {"host": stack.wait_host(START_TIMEOUT_S)}
    waits |= {name: _wait_replica(stack, watcher, name) for name in stack.replicas}
    waits |= {name: c.expect("ready", CHILD_TIMEOUT_S) for name, c in stack.trainers.items()}
    if stack.load:
        waits["load"] = stack.load.expect("ready", CHILD_TIMEOUT_S)
    parts = {name: asyncio.create_task(wait) for name, wait in waits.items()}
    try:
        pending = set(parts.values())
        while pending:
            stack.check()
            done, pending = await asyncio.wait(
                pending, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
            )
            for part in done:
                part.result()
            so_far = min(0.95, (time.monotonic() - started_s) / USUAL_START_S)
            board.progress = {n: 1.0 if part.done() else so_far for n, part in parts.items()}
    finally:
        board.progress = {}
        await _cancelled(parts.values())


async def _wait_replica(stack: Stack, watcher: Watcher, name: str) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(UnavailableError):
            snapshot = await watcher.snapshot()
            if any(replica.id == name and replica.healthy for replica in snapshot.replicas):
                return
            guests = [guest for guest in snapshot.guests if guest.replica == name]
            if any(guest.restarts or guest.state == "failed" for guest in guests):
                raise EngineStartError(
                    f"engine {name} died at start; see engine-{name}.log below {stack.layout.logs}"
                )
        await asyncio.sleep(POLL_S)
    busy = os.getloadavg()[0]
    raise EngineStartError(
        f"engine {name} was not ready within {START_TIMEOUT_S:.0f} s (load average {busy:.1f}"
        f" on {os.cpu_count()} cores: end other work if there is any);"
        f" see engine-{name}.log below {stack.layout.logs}"
    )


async def sample_memory(stack: Stack, layout: RunLayout, board: Board) -> None:
    """Write `memory.jsonl` until cancelled."""
    with JsonlLog(layout.out / "memory.jsonl", KEEP_ALL) as log:
        while True:
            sizes = await asyncio.to_thread(memory_bytes, stack.roots)
            board.memory_bytes = sum(sizes.values())
            log.write({"t_s": time.monotonic(), "bytes": sizes})
            await asyncio.sleep(SAMPLE_INTERVAL_S)


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> list[BaseException]:
    """Cancel tasks, wait for them, and return the errors other than their cancellation."""
    tasks = tuple(tasks)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    return [result for result in results if isinstance(result, Exception)]


@contextlib.asynccontextmanager
async def _beside(*coroutines: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run endless coroutines beside the block; raise the error of one that ended by itself."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield
    finally:
        errors = await _cancelled(tasks)
    for error in errors:
        raise error


class _DemoRun:
    """One run from the first process to the report."""

    def __init__(self, settings: DemoSettings, layout: RunLayout, ports: Ports, plan: Plan) -> None:
        self._settings = settings
        self._layout = layout
        self._ports = ports
        self._plan = plan
        self._t0_s = time.monotonic()
        self._board = Board(self._t0_s, {job: JobProgress() for job in settings.job_names})
        self._events = EventLog(layout.logs, "demo", KEEP_ALL)

    async def play(self) -> int:
        self._write_run_info(None)
        async with _beside(draw(self._board, Console())):
            await self._play()
        report = write_report(self._layout.out)
        print_report(report, self._layout.out)
        return exit_code(report["verdicts"], self._settings.control)

    async def _play(self) -> None:
        self._board.stage = "preparing models"
        models = await prepare_models(self._settings, self._board)
        stack = Stack(self._settings, self._layout, self._ports, models.policy_dir, models.host_dir)
        try:
            self._board.stage = "starting engines"
            await stack.start()
            async with (
                contextlib.aclosing(Watcher(stack.scheduler, stack.gateway_url)) as watcher,
                _beside(
                    self._board.follow(watcher), sample_memory(stack, self._layout, self._board)
                ),
            ):
                await self._train(stack, watcher)
        finally:
            self._board.stage = "stopping"
            await stack.stop()
            self._events.close()
            self._layout.gather()
            self._write_run_info(time.monotonic())

    async def _train(self, stack: Stack, watcher: Watcher) -> None:
        assert stack.load is not None
        await wait_ready(stack, watcher, self._board)
        self._events.write("ready", after_s=time.monotonic() - self._t0_s)
        if DEDICATED in stack.replicas:
            yield_to_trainer(stack.roots, DEDICATED)
        if self._settings.control == "naive":
            level_with_host(stack.roots, GUEST)
        conductor = Conductor(self._plan, stack, watcher, Drills(stack, watcher, self._events))
        self._board.conductor = conductor
        self._board.stage = "measuring the host alone"
        await stack.load.say(cmd="pace", busy=HOST_BUSY)
        self._record(await stack.load.expect("paced", PACE_TIMEOUT_S))
        # The host has no load yet: both replicas play, and both are warm when blocks begin.
        await watcher.harvest(rose_pb2.HARVEST_MODE_ACTIVE)
        for trainer in stack.trainers.values():
            await trainer.say(cmd="start")
        if self._settings.held_out_maps:
            self._board.stage = "held-out maps before training"
            for job, trainer in stack.trainers.items():
                self._record(await trainer.expect("eval", EVALUATION_TIMEOUT_S), job=job)
        self._board.stage = "training"
        blocks = asyncio.create_task(conductor.run())
        following = [
            asyncio.create_task(self._follow_trainer(job, stack, conductor, blocks))
            for job in stack.trainers
        ]
        try:
            await asyncio.gather(*following)
            await blocks
        finally:
            for task in (blocks, *following):
                task.cancel()

    async def _follow_trainer(
        self, job: str, stack: Stack, conductor: Conductor, blocks: "asyncio.Task[None]"
    ) -> None:
        while True:
            event = await self._next_event(job, stack, blocks)
            match event["event"]:
                case "step":
                    self._board.stepped(job, event)
                    await conductor.step_done(job)
                case "eval":
                    self._record(event, job=job)
                    self._board.stage = "finishing"
                case "done":
                    self._record(event, job=job)
                    return

    async def _next_event(
        self, job: str, stack: Stack, blocks: "asyncio.Task[None]"
    ) -> dict[str, object]:
        """Return the trainer's next event, unless the experiment around it breaks first."""
        waiting = asyncio.create_task(stack.trainers[job].next())
        watched: set[asyncio.Task[Any]] = {waiting}
        if not blocks.done():
            watched.add(blocks)
        try:
            done, _ = await asyncio.wait(
                watched, timeout=FINISH_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
            stack.check()
            if blocks in done:
                blocks.result()
            if not done:
                raise RoseError(
                    f"the trainer of {job} was silent for {FINISH_TIMEOUT_S:.0f} s; see its log"
                )
            return await waiting
        finally:
            waiting.cancel()

    def _record(self, event: Mapping[str, object], **labels: str) -> None:
        """Keep an event of a child process among the raw records."""
        fields = {name: value for name, value in event.items() if name != "event"}
        self._events.write(str(event["event"]), **fields, **labels)

    def _write_run_info(self, end_s: float | None) -> None:
        info = {"t0_s": self._t0_s, "settings": self._settings.as_record(), "end_s": end_s}
        Path(self._layout.out / "run.json").write_text(json.dumps(info, indent=1) + "\n")
