"""`rose demo`: start everything, play the plan, end everything, report."""

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any

from bench.demo.cli import DemoSettings
from bench.demo.experiment.conductor import Conductor, Drills
from bench.demo.experiment.plan import ExperimentPlan, plan_of
from bench.demo.experiment.processes import level_with_host, sample_memory, yield_to_trainer
from bench.demo.experiment.watcher import Watcher
from bench.demo.frozen_lake.model_cache import prepare_models
from bench.demo.readiness import wait_ready
from bench.demo.report.claims import exit_code
from bench.demo.report.records import RunLayout
from bench.demo.report.report import print_quickstart, print_summary, write_report
from bench.demo.stack import DEDICATED, GUEST, Ports, Stack
from bench.demo.view import Board, open_view
from rose.azure_trace import read_trace
from rose.engines import check_host
from rose.engines.launch import check_model
from rose.errors import RoseError
from rose.logs.eventlog import KEEP_ALL, EventLog
from rose.rpc import rose_pb2

ENGINES = 3
EVALUATION_TIMEOUT_S = 120.0
PACE_TIMEOUT_S = 60.0
# The fraction of the time in which the host would be busy if it served one request at a time.
HOST_BUSY = 0.5
FINISH_TIMEOUT_S = 180.0


def run_demo(settings: DemoSettings) -> int:
    """Run the demo; returns 0 when no claim fails (with a control: when its claim does).

    Raises RoseError for bad input and for a process that could not be started. Nothing is left
    running, whichever way it ends.
    """
    plan = plan_of(settings)
    ports = Ports.from_base(settings.port_base)
    _preflight(settings, ports)
    layout = RunLayout(settings.out)
    layout.prepare()
    return asyncio.run(_interruptible(_Run(settings, layout, ports, plan).play()))


def _preflight(settings: DemoSettings, ports: Ports) -> None:
    # Several jobs share the guest, and have no dedicated engine.
    check_host(ENGINES if settings.jobs == 1 else ENGINES - 1)
    ports.check()
    if settings.trace:
        read_trace(settings.trace)
    if settings.host_model:
        check_model(settings.host_model)


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


def _raise_first(ended: Sequence[BaseException | None]) -> None:
    """Raise what ended a task that was to go on until it was cancelled."""
    for error in ended:
        if isinstance(error, Exception):
            raise error


class _Run:
    """One run from the first process to the report."""

    def __init__(
        self, settings: DemoSettings, layout: RunLayout, ports: Ports, plan: ExperimentPlan
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._ports = ports
        self._plan = plan
        self._t0_s = time.monotonic()
        jobs = settings.job_names if settings.jobs > 1 else ()
        self._board = Board(self._t0_s, jobs=jobs)
        self._events = EventLog(layout.logs, "demo", KEEP_ALL)

    async def play(self) -> int:
        self._write_run_info(None)
        with open_view() as view:
            drawing = asyncio.create_task(self._board.draw(view))
            try:
                await self._play()
            finally:
                drawing.cancel()
                ended = await asyncio.gather(drawing, return_exceptions=True)
        _raise_first(ended)
        report = write_report(self._layout.out)
        if self._settings.quickstart:
            print_quickstart(report, self._layout.out)
        else:
            print_summary(report.verdicts, self._layout.out)
        return exit_code(report.verdicts, self._settings.control)

    async def _play(self) -> None:
        self._board.stage = "preparing models"
        models = await prepare_models(self._settings, self._board)
        stack = Stack(self._settings, self._layout, self._ports, models.policy_dir, models.host_dir)
        try:
            self._board.stage = "starting engines"
            await stack.start()
            async with self._watching(stack) as watcher:
                await self._train(stack, watcher)
        finally:
            self._board.stage = "stopping"
            await stack.stop()
            self._events.close()
            self._layout.gather()
            self._write_run_info(time.monotonic())

    @contextlib.asynccontextmanager
    async def _watching(self, stack: Stack) -> AsyncIterator[Watcher]:
        watcher = Watcher(stack.scheduler, stack.gateway_url)
        tasks = [
            asyncio.create_task(self._board.follow(watcher)),
            asyncio.create_task(sample_memory(stack, self._layout, self._board)),
        ]
        try:
            yield watcher
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            await watcher.close()
        _raise_first(ended)

    async def _train(self, stack: Stack, watcher: Watcher) -> None:
        assert stack.load is not None
        await wait_ready(stack, watcher, self._board, self._events)
        if DEDICATED in stack.replicas:
            yield_to_trainer(stack.roots, DEDICATED)
        if self._settings.control == "naive":
            level_with_host(stack.roots, GUEST)
        drills = Drills(stack, watcher, self._events)
        conductor = Conductor(self._plan, stack, watcher, drills)
        self._board.attach(conductor, drills)
        self._board.stage = "measuring the host alone"
        await stack.load.say(cmd="pace", busy=HOST_BUSY)
        self._note(await stack.load.expect("paced", PACE_TIMEOUT_S))
        # The host has no load yet: both replicas play, and both are warm when blocks begin.
        await watcher.harvest(rose_pb2.HARVEST_MODE_ACTIVE)
        for trainer in stack.trainers.values():
            await trainer.say(cmd="start")
        if self._settings.held_out_maps:
            self._board.stage = "held-out maps before training"
            for job, trainer in stack.trainers.items():
                self._note(await trainer.expect("eval", EVALUATION_TIMEOUT_S), job)
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
                    self._note(event, job)
                    self._board.stage = "finishing"
                case "done":
                    self._note(event, job)
                    return
                case _:
                    continue

    async def _next_event(
        self, job: str, stack: Stack, blocks: "asyncio.Task[None]"
    ) -> dict[str, object]:
        """The trainer's next event, unless the experiment around it breaks first."""
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

    def _note(self, event: dict[str, object], job: str | None = None) -> None:
        """Keep an event of a child, or of a job's trainer, among the raw records."""
        fields = {name: value for name, value in event.items() if name != "event"}
        whose = {} if job is None else {"job": job}
        self._events.write(str(event["event"]), **fields, **whose)

    def _write_run_info(self, end_s: float | None) -> None:
        info = {"t0_s": self._t0_s, "settings": self._settings.as_record(), "end_s": end_s}
        Path(self._layout.out / "run.json").write_text(json.dumps(info, indent=1) + "\n")
