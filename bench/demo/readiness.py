"""Waits until everything that was started is of use, and says how far it is."""

import asyncio
import os
import time

from bench.demo.experiment.watcher import Watcher
from bench.demo.stack import START_TIMEOUT_S, Stack
from bench.demo.view import Board, TrainingProgress
from rose.errors import EngineStartError, UnavailableError
from rose.logs.eventlog import EventLog
from rose.process.child import JsonlProcess

CHILD_TIMEOUT_S = 240.0
POLL_S = 0.25
# Only what the bars show before an engine answers; nothing waits for it.
USUAL_START_S = 60.0


async def wait_ready(stack: Stack, watcher: Watcher, board: Board, events: EventLog) -> None:
    """Return once host, replicas, trainer and load generator are ready.

    Raises EngineStartError when one of them dies or takes too long.
    """
    started_s = time.monotonic()
    parts = {
        "host": asyncio.create_task(stack.wait_host(START_TIMEOUT_S)),
    }
    for name in stack.replicas:
        parts[name] = asyncio.create_task(_wait_replica(stack, watcher, name))
    for name, trainer in stack.trainers.items():
        parts[name] = asyncio.create_task(_heard(trainer))
    if stack.load:
        parts["load"] = asyncio.create_task(_heard(stack.load))
    try:
        while not all(part.done() for part in parts.values()):
            stack.check()
            await asyncio.wait(
                [part for part in parts.values() if not part.done()],
                timeout=POLL_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for part in parts.values():
                if part.done():
                    part.result()
            board.progress = [
                _bar(name, part.done(), time.monotonic() - started_s)
                for name, part in parts.items()
            ]
    finally:
        board.progress = ()
        for part in parts.values():
            part.cancel()
        await asyncio.gather(*parts.values(), return_exceptions=True)
    events.write("ready", after_s=time.monotonic() - started_s)


async def _heard(child: JsonlProcess) -> None:
    await child.expect("ready", CHILD_TIMEOUT_S)


async def _wait_replica(stack: Stack, watcher: Watcher, name: str) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            snapshot = await watcher.snapshot()
        except UnavailableError:
            await asyncio.sleep(POLL_S)
            continue
        if any(replica.id == name and replica.healthy for replica in snapshot.replicas):
            return
        for guest in snapshot.guests:
            if guest.replica == name and (guest.restarts or guest.state == "failed"):
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


def _bar(name: str, done: bool, elapsed_s: float) -> TrainingProgress:
    so_far_s = USUAL_START_S if done else min(elapsed_s, 0.95 * USUAL_START_S)
    return TrainingProgress(name, so_far_s, USUAL_START_S)
