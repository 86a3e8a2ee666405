"""Time in which a guest stops, and gives a gibibyte of KV memory back, full of rollouts.

    python -m bench.micro.kv_return [--engine sglang] [--tensor-parallel-size 2] [--out FILE]

First it is frozen again and again, at any moment of a step: a freeze lasts from writing the grant
until the guest says that its last step is done, and is held against that step and FREEZE_SLACK_S.

Then each round fills at least RETURNED_BYTES of KV memory with running rollouts, lowers the cap,
and takes the time from writing the grant until the guest section says that the memory is gone: the
wait for the step in flight, the preemption, the return of the pages and the measurement of what is
resident are all in it. In every other round the guest is frozen first, as on the reclaim ladder.

Exit code 1 when a p99 misses its limit.
"""

import asyncio
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import psutil

from bench.common.engines import SGLANG_PYTHON
from bench.common.report import machine, parser_of, put_judged
from executor import ControlPage, Grant, GrantMode, GuestState, HostState
from executor.control_page.page import PAGE_FOLDER
from rose.addresses import free_port
from rose.engines import EngineKind, EngineProcess, EngineRole, EngineSpec, module_path
from slo import percentile

RETURNED_BYTES = 1 << 30
RETURN_TARGET_S = 0.15
FREEZE_SLACK_S = 0.005
FREEZES = 200
KV_BYTES = RETURNED_BYTES + (256 << 20)
VOCABULARY = 96
STREAMS = 48
FILL_BUDGET = 1024
# A granule may hold this much besides the wanted bytes.
SLACK_BYTES = 32 << 20
KV_TOKEN_BYTES = 128 << 10
# Tokens of a block that an engine counts.
BLOCK_TOKENS = {EngineKind.VLLM: 32, EngineKind.SGLANG: 1}
# The gate asks for this beside a host, so that the step in flight is short. SGLang parks the
# rollouts beyond, and leaves their KV to its prefix cache.
SHORT_STEP_BUDGET = 4
# Budget of the steps before a freeze, where all KV is to be of rollouts that run.
FROZEN_STEP_BUDGET = {EngineKind.VLLM: SHORT_STEP_BUDGET, EngineKind.SGLANG: STREAMS}
ENGINE_ARGS = {
    EngineKind.VLLM: ("--skip-tokenizer-init", "--no-enable-prefix-caching"),
    # By default it keeps room for all tokens that each rollout may still have.
    EngineKind.SGLANG: ("--skip-tokenizer-init", "--schedule-conservativeness=0.2"),
}
START_S = 240.0
FILL_S = 120.0


def save_wide_model(folder: Path) -> None:
    """Save a small model with a large one's KV cache: 128 KiB a token, as 8B in bf16."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


class StandInHost(threading.Thread):
    """Stands in for the host and the node daemon: an idle host, and a grant that stays alive."""

    def __init__(self, page: ControlPage) -> None:
        super().__init__(daemon=True)
        self._page = page
        self._host = page.take_host()
        self._lock = threading.Lock()
        self._grant = Grant(GrantMode.RUN, token_budget=FILL_BUDGET, max_sequences=STREAMS)
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.05):
            self.allow()

    def allow(
        self,
        mode: GrantMode | None = None,
        token_budget: int | None = None,
        kv_granule_cap: int | None = None,
    ) -> None:
        """Change the grant, and write it now."""
        change = {"mode": mode, "token_budget": token_budget, "kv_granule_cap": kv_granule_cap}
        with self._lock:
            new = {name: value for name, value in change.items() if value is not None}
            self._grant = replace(self._grant, **new)  # type: ignore[arg-type]
            now_ns = time.monotonic_ns()
            self._host.write(HostState(heartbeat_ns=now_ns))
            self._host.beat(now_ns)
            self._page.grant.write(
                replace(self._grant, heartbeat_ns=now_ns, expiry_ns=now_ns + 500_000_000)
            )

    def stop(self) -> None:
        self._ended.set()
        self.join()
        self._host.close()


@dataclass(frozen=True, slots=True)
class KvRound:
    """One fall of the cap."""

    frozen_first: bool
    returned_s: float
    step_s: float
    returned_bytes: int
    resident_fell_bytes: int
    preempted: int


@dataclass(frozen=True, slots=True)
class FreezeRound:
    """One freeze, and the last step that the guest had."""

    stopped_s: float
    step_s: float


@dataclass
class KvReturnBench:
    """A guest under load."""

    engine: EngineKind
    page: ControlPage
    node: StandInHost
    core: psutil.Process
    url: str
    _state: GuestState = field(default_factory=GuestState)

    def state(self) -> GuestState:
        """Return the guest section; what was read last where its writer is held in the middle."""
        self._state = self.page.guest.peek() or self._state
        return self._state

    async def until(self, holds: Callable[[GuestState], bool], within_s: float) -> GuestState:
        deadline_s = time.monotonic() + within_s
        while not holds(state := self.state()):
            if time.monotonic() > deadline_s:
                raise SystemExit(f"not within {within_s} s: {state}")
            await asyncio.sleep(0.0002)
        return state

    async def stream(self, http: aiohttp.ClientSession, rng: random.Random) -> None:
        """Ask for rollouts without end, one after the other."""
        while True:
            body = {
                "request_id": "turn",
                "token_ids": [rng.randrange(VOCABULARY) for _ in range(224)],
                "sampling": {"temperature": 0.0, "max_tokens": 200},
            }
            async with http.post(f"{self.url}/rose/v1/generate", json=body) as answer:
                await answer.read()

    async def freeze(self, rng: random.Random) -> FreezeRound:
        """Let it run, freeze it at some moment of a step, wait until it stands."""
        self.node.allow(GrantMode.RUN, FILL_BUDGET, kv_granule_cap=0)
        before = self.state()
        running = await self.until(lambda state: state.step_seq >= before.step_seq + 3, FILL_S)
        await asyncio.sleep(rng.random() * running.last_step_ns / 1e9)
        began_s = time.monotonic()
        self.node.allow(GrantMode.FREEZE)
        after = await self.until(
            lambda state: state.gate_reason == "frozen" and not state.in_step, 10
        )
        return FreezeRound(time.monotonic() - began_s, after.last_step_ns / 1e9)

    async def round(self, *, frozen_first: bool) -> KvRound:
        self.node.allow(GrantMode.RUN, FILL_BUDGET, kv_granule_cap=0)
        full = (RETURNED_BYTES + SLACK_BYTES) // (KV_TOKEN_BYTES * BLOCK_TOKENS[self.engine])
        filled = await self.until(lambda state: state.kv_used >= full, FILL_S)
        # Blocks are counted when a step begins and touched while it computes: so a few more.
        budget = FROZEN_STEP_BUDGET[self.engine] if frozen_first else SHORT_STEP_BUDGET
        self.node.allow(token_budget=budget)
        await self.until(lambda state: state.step_seq >= filled.step_seq + 5, FILL_S)
        if frozen_first:
            self.node.allow(GrantMode.FREEZE)
            await self.until(lambda state: state.gate_reason == "frozen", 5)
        before, resident = self.state(), self.core.memory_info().rss
        began_s = time.monotonic()
        granules = -(-RETURNED_BYTES // before.granule_bytes)
        self.node.allow(kv_granule_cap=before.granules_total - granules)
        goal = before.bytes_mapped - RETURNED_BYTES + (8 << 20)
        after = await self.until(lambda state: state.bytes_mapped <= goal, 10)
        returned_s = time.monotonic() - began_s
        return KvRound(
            frozen_first,
            returned_s,
            before.last_step_ns / 1e9,
            before.bytes_mapped - after.bytes_mapped,
            resident - self.core.memory_info().rss,
            before.running - after.running,
        )


def summary(rounds: list[KvRound]) -> dict[str, object]:
    """Return percentiles by the nearest rank; seconds and bytes."""
    times_s = [one.returned_s for one in rounds]
    return {
        "rounds": len(rounds),
        "returned_p50_s": round(percentile(times_s, 0.5), 4),
        "returned_p99_s": round(percentile(times_s, 0.99), 4),
        "returned_max_s": round(max(times_s), 4),
        "step_max_s": round(max(one.step_s for one in rounds), 4),
        "returned_bytes_min": min(one.returned_bytes for one in rounds),
        "resident_fell_bytes_min": min(one.resident_fell_bytes for one in rounds),
        "preempted_mean": round(sum(one.preempted for one in rounds) / len(rounds), 1),
    }


def freezes_summary(freezes: list[FreezeRound]) -> dict[str, object]:
    """Return percentiles of freezes; `over`: time beyond the last step."""
    over_s = [one.stopped_s - one.step_s for one in freezes]
    return {
        "freezes": len(freezes),
        "stopped_p50_s": round(percentile([one.stopped_s for one in freezes], 0.5), 4),
        "stopped_p99_s": round(percentile([one.stopped_s for one in freezes], 0.99), 4),
        "step_p99_s": round(percentile([one.step_s for one in freezes], 0.99), 4),
        "over_p99_s": round(percentile(over_s, 0.99), 4),
        "over_max_s": round(max(over_s), 4),
    }


def spec_of(engine: EngineKind, ranks: int, folder: Path, page: Path) -> EngineSpec:
    sglang = engine is EngineKind.SGLANG
    return EngineSpec(
        name="guest",
        role=EngineRole.GUEST,
        engine=engine,
        python=SGLANG_PYTHON.absolute() if sglang else None,
        model_dir=folder / "model",
        port=free_port(),
        log=folder / "guest.log",
        dtype="float32",
        kv_bytes=KV_BYTES,
        max_model_len=512,
        max_num_seqs=STREAMS,
        tensor_parallel=ranks,
        control_page=page,
        extra_args=ENGINE_ARGS[engine],
        extra_env={"PYTHONPATH": module_path(folder / "metadata")} if sglang else {},
    )


async def measure(
    engine_kind: EngineKind, ranks: int, rounds: int, folder: Path
) -> tuple[list[FreezeRound], list[KvRound]]:
    """Start the guest and its load, and measure."""
    save_wide_model(folder / "model")
    page = ControlPage.create(folder / "page")
    node = StandInHost(page)
    node.start()
    spec = spec_of(engine_kind, ranks, folder, page.path)
    engine = await EngineProcess.start(spec)
    try:
        await engine.wait_healthy(START_S)
        family = psutil.Process(engine.process.pid).children(recursive=True)
        core = max(family, key=lambda process: process.memory_info().rss)
        bench = KvReturnBench(engine_kind, page, node, core, spec.url)
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            await http.post(f"{spec.url}/rose/v1/admit", json={"epoch": 1}, headers=engine.headers)
            rng = random.Random(0)  # noqa: S311 -- prompts, not secrets
            streams = [asyncio.create_task(bench.stream(http, rng)) for _ in range(STREAMS)]
            try:
                frozen = [await bench.freeze(rng) for _ in range(FREEZES)]
                found = []
                for number in range(rounds):
                    found.append(await bench.round(frozen_first=number % 2 == 1))
                    sys.stderr.write(f"{found[-1]}\n")
            finally:
                for stream in streams:
                    stream.cancel()
            return frozen, found
    finally:
        await engine.stop()
        node.stop()
        page.close()


def main() -> int:
    """Measure, and print or write one JSON object."""
    parser = parser_of(__doc__, "bench.micro.kv_return", rounds=40)
    parser.add_argument("--engine", type=EngineKind, choices=list(EngineKind), default="vllm")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    args = parser.parse_args()
    ranks = args.tensor_parallel_size
    before = machine()
    with tempfile.TemporaryDirectory(prefix="rose-kv-return-", dir=PAGE_FOLDER) as folder:
        freezes, rounds = asyncio.run(measure(args.engine, ranks, args.rounds, Path(folder)))
    over_s = percentile([one.stopped_s - one.step_s for one in freezes], 0.99)
    returned_s = percentile([one.returned_s for one in rounds], 0.99)
    holds = over_s <= FREEZE_SLACK_S and returned_s <= RETURN_TARGET_S
    report = {
        "engine": args.engine,
        "ranks": ranks,
        "machine": before,
        "holds": holds,
        "freeze_slack_s": FREEZE_SLACK_S,
        "freeze": freezes_summary(freezes),
        "kv_bytes": KV_BYTES,
        "asked_back_bytes": RETURNED_BYTES,
        "return_target_s": RETURN_TARGET_S,
        "all": summary(rounds),
        "running": summary([one for one in rounds if not one.frozen_first]),
        "frozen_first": summary([one for one in rounds if one.frozen_first]),
    }
    return put_judged(report, args.out, good=holds, shown=args.out is None)


if __name__ == "__main__":
    sys.exit(main())
