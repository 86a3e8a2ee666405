"""Run of the benchmark: engines up, host measured alone, blocks played, events drilled."""

import asyncio
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from bench.common import tiny_models
from bench.coserve.calibration import TARGETS_FROM, choose_targets, find_rates, measure_capacity
from bench.coserve.engines import (
    GUEST_MODEL,
    HOST_MODEL,
    HOST_SEQUENCES,
    METADATA,
    MODELS,
    CoserveDrills,
    Engines,
)
from bench.coserve.plan import (
    CALIBRATION,
    EVENT_ALONE,
    EVENT_BUSY,
    HOST,
    WARM_UP,
    ArmCell,
    BenchSettings,
    PlanBlock,
    fit_rounds,
    make_events,
    make_rounds,
    round_s,
    rounds_wanted,
)
from bench.coserve.player import Granting, Player, playing
from bench.coserve.records import (
    CLIENT_REQUESTS,
    EVENTS,
    RUN,
    Calibration,
    CoserveRunInfo,
    read_requests,
)
from bench.coserve.result import RESULT
from bench.load.protocol import LoadConfig
from executor import ControlPage
from executor.control_page.page import PAGE_FOLDER
from executor.step_log import HEADER, used_bytes
from rose.azure_trace import read_trace
from rose.engines import EngineKind, check_host
from rose.errors import ConfigError, RoseError
from rose.logs.eventlog import KEEP_ALL, JsonlLog
from rose.process.child import ManagedProcess, ProcessSpec
from weight_transfer import SigningKey

ENGINES = 3
FLUSH_S = 0.5
WARM_UP_S = 3.0
MOST_WARM_UPS = 10
MODELS_TIMEOUT_S = 300.0
MODEL_ROOT, LOGS = "models", "logs"
WRITTEN = (MODEL_ROOT, LOGS, METADATA, RUN, RESULT, "*.jsonl", "steps-*.bin", "*.png")


MakeBlocks = Callable[[BenchSettings, list[ArmCell]], list[PlanBlock]]


def run_bench(settings: BenchSettings, make_blocks: MakeBlocks | None = None) -> None:
    """Measure, and leave the raw records in `settings.out`. Raises RoseError for bad input.

    make_blocks: plans the blocks of the loads found; default: rounds of all arms.
    """
    if settings.trace:
        read_trace(settings.trace)
    check_host(ENGINES)
    _prepare(settings.out)
    asyncio.run(_CoserveRun(settings, make_blocks or round_blocks).play())


def _prepare(out: Path) -> None:
    """Empty the folder but for models of an earlier run; refuse a folder with other files."""
    out.mkdir(parents=True, exist_ok=True)
    for path in out.iterdir():
        if not any(path.match(pattern) for pattern in WRITTEN):
            raise ConfigError(f"{out} holds {path.name}, which is no part of a run; choose another")
    for path in out.iterdir():
        if path.is_dir() and path.name != MODEL_ROOT:
            shutil.rmtree(path)
        elif path.name != MODEL_ROOT:
            path.unlink()
    (out / LOGS).mkdir()


def round_blocks(settings: BenchSettings, cells: list[ArmCell]) -> list[PlanBlock]:
    """Plan the rounds of each load that the budget allows."""
    s = settings
    wanted = [rounds_wanted(c, s.block_s, s.requests_per_arm, s.min_rounds) for c in cells]
    one_s = round_s(s.block_s, s.idle_block_s)
    rounds = fit_rounds(wanted, one_s, s.budget_s, s.min_rounds)
    return make_rounds(cells, rounds, s.block_s, s.idle_block_s, s.seed)


class _CoserveRun:
    def __init__(self, settings: BenchSettings, make_blocks: MakeBlocks) -> None:
        self._settings = settings
        self._make_blocks = make_blocks
        self._out = settings.out
        self._logs = settings.out / LOGS
        self._began_s = time.monotonic()
        self._load_before = os.getloadavg()[0]

    async def play(self) -> None:
        await _make_models(self._out)
        with tempfile.TemporaryDirectory(prefix="rose-bench-", dir=PAGE_FOLDER) as scratch:
            async with self._stack(Path(scratch)) as (player, drills):
                await self._measure(player, drills)
        for path in self._out.glob("steps-*.bin"):
            with path.open("rb") as file:
                used = used_bytes(file.read(HEADER.size))
            os.truncate(path, used)
        self._say("measured")

    @asynccontextmanager
    async def _stack(self, scratch: Path) -> AsyncIterator[tuple[Player, CoserveDrills]]:
        settings = self._settings
        key = SigningKey.generate()
        page = ControlPage.create(scratch / "page")
        granting = Granting(page, self._out, self._logs, settings.max_host_busy)
        engines = Engines(
            settings=settings,
            page=scratch / "page",
            logs=self._logs,
            key=key,
            store=scratch / "store",
        )
        events = JsonlLog(self._out / EVENTS, KEEP_ALL)
        self._say("engines start")
        async with playing(
            *(engines, page, granting, engines.start_all, self._load_config(engines), self._logs),
            first=EVENT_ALONE,
            guest=settings.guest_load,
            core=engines.cores[1],
            lent_priority=settings.lent_priority,
        ) as player:
            drills = CoserveDrills(
                engines, player.session, scratch / "store", events, settings.event_s
            )
            drills.publish(key, engines.model_root / GUEST_MODEL, settings.seed)
            yield player, drills

    async def _measure(self, player: Player, drills: CoserveDrills) -> None:
        settings = self._settings
        for _ in range(MOST_WARM_UPS):  # An engine's first tokens may come late.
            if (await player.play(PlanBlock(WARM_UP, WARM_UP_S, 0, 0))).guest_tokens:
                break
        self._say("host alone: capacity and rates")
        shape = self._load_config(drills.engines).shape()
        capacity = await measure_capacity(player, shape, HOST_SEQUENCES, settings.calibration_s)
        rates = await find_rates(player, settings)
        ttft_s, tpot_s = await self._targets(player, rates)
        self._write_run(capacity, rates, (ttft_s, tpot_s))
        if not settings.targets_given:
            self._say(f"targets TTFT {ttft_s:.3f} s, TPOT {tpot_s:.4f} s: host starts again")
            await drills.engines.restart_host(ttft_s, tpot_s)
        cells = [ArmCell(r.busy_target, r.traffic, r.rate_per_s) for r in rates]
        blocks = self._make_blocks(settings, cells)
        for number, block in enumerate(blocks, 1):
            load = f"{block.cell.busy_target} {block.cell.traffic}" if block.cell else "host off"
            self._say(f"block {number}/{len(blocks)}: {block.arm.name}, {load}")
            await player.play(block)
        # Steady arrivals where there are any: a burst hides the effect of an event.
        steady = [cell for cell in cells if cell.traffic == "poisson"] or cells
        near = min(steady, key=lambda cell: abs(cell.busy_target - EVENT_BUSY))
        for block in make_events(near, settings.event_rounds, settings.event_s):
            self._say(f"window: {block.arm.name}")
            await player.play(block, drills.of(block.arm.name))
        await player.load.say(cmd="quit")
        await player.load.process.wait()
        await asyncio.sleep(FLUSH_S)

    async def _targets(self, player: Player, rates: list[Calibration]) -> tuple[float, float]:
        settings = self._settings
        if settings.ttft_target_s is not None and settings.tpot_target_s is not None:
            return settings.ttft_target_s, settings.tpot_target_s
        await player.load.say(cmd="off")  # makes it write what it holds
        await asyncio.sleep(FLUSH_S)
        highest = max(settings.busy_targets)
        found = {r.rate_per_s for r in rates if r.busy_target == highest}
        blocks = {
            record.block
            for record in player.records
            if record.arm == CALIBRATION.name and record.rate_per_s in found
        }
        requests = [each for each in read_requests(self._out) if each.block in blocks]
        return choose_targets(requests)

    def _write_run(
        self, capacity_rps: float, rates: list[Calibration], targets: tuple[float, float]
    ) -> None:
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self._settings), default=str))
        for name in ("out", "port_base", "trace", "sglang_python"):
            del plain[name]  # where a run was made is no part of what it measured
        info = CoserveRunInfo(
            seed=self._settings.seed,
            quick=self._settings.quick,
            settings=plain,
            machine={
                "cpus": os.cpu_count(),
                "load_1min_before": self._load_before,
                "processor": platform.machine(),
                "accelerator": None,
                "python": platform.python_version(),
                "host_model": {"name": HOST_MODEL, **asdict(MODELS[HOST_MODEL])},
                "guest_model": {"name": GUEST_MODEL, **asdict(MODELS[GUEST_MODEL])},
            },
            capacity_rps=capacity_rps,
            calibrations=rates,
            ttft_target_s=targets[0],
            tpot_target_s=targets[1],
            targets_from="given" if self._settings.targets_given else TARGETS_FROM,
        )
        (self._out / RUN).write_bytes(msgspec.json.format(msgspec.json.encode(info)))

    def _load_config(self, engines: Engines) -> LoadConfig:
        return LoadConfig(
            url=engines.url(HOST),
            model=HOST,
            out=self._out / CLIENT_REQUESTS,
            seed=self._settings.seed,
            trace=self._settings.trace,
            segment_s=self._settings.block_s,
            max_outstanding=1_024,
            replay_prompts=True,
            digest=True,
            id_in_body=self._settings.host is EngineKind.SGLANG,
        )

    def _say(self, what: str) -> None:
        sys.stdout.write(f"{time.monotonic() - self._began_s:7.1f} s  {what}\n")
        sys.stdout.flush()


async def _make_models(out: Path) -> None:
    """Make the models in a process of its own, which alone loads torch; later runs keep them."""
    root = out / MODEL_ROOT
    if all((root / name / "tokenizer.json").is_file() for name in MODELS):
        return
    log = out / "logs" / "models.log"
    wanted = {
        name: {"model": asdict(model), "seed": seed}
        for seed, (name, model) in enumerate(MODELS.items())
    }
    argv = (sys.executable, "-m", tiny_models.__name__, str(root), json.dumps(wanted))
    process = await ManagedProcess.start(ProcessSpec(name="models", argv=argv, log=log))
    try:
        async with asyncio.timeout(MODELS_TIMEOUT_S):
            code = await process.wait()
    finally:
        await process.stop()
    if code:
        raise RoseError(f"the bench's models could not be made; see {log}")
