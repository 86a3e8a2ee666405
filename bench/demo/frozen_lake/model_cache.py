"""The models of the demo, made once in a process of their own and kept."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path

from bench.demo.cli import DemoSettings
from bench.demo.frozen_lake.models import Models
from bench.demo.view import Board, TrainingProgress
from rose.errors import RoseError
from rose.process.child import ManagedProcess, ProcessSpec

CACHE = Path("out/models")


async def prepare_models(settings: DemoSettings, board: Board) -> Models:
    """The cached models, made first where they are missing (about a minute)."""
    arguments = ["--cache", str(CACHE), *(["--long-turns"] if settings.long_turns else [])]
    process = await ManagedProcess.start(
        ProcessSpec(
            name="models",
            argv=(sys.executable, "-m", "bench.demo.frozen_lake.models", *arguments),
            log=settings.out / "logs" / "models.log",
            piped=True,
        )
    )
    try:
        return await _follow(process, board)
    finally:
        board.progress = ()
        await process.stop()


async def _follow(process: ManagedProcess, board: Board) -> Models:
    while line := await process.stdout.readline():
        event = json.loads(line)
        if event["event"] == "models":
            return Models(Path(event["policy_dir"]), Path(event["host_dir"]))
        board.progress = [TrainingProgress(event["label"], event["share"], 1.0)]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5.0):
            await process.wait()
    raise RoseError(f"the demo's models could not be made; see {process.spec.log}")
