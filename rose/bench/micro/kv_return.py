"""How fast a guest gives a gibibyte of KV memory back: a real engine, rollouts running in it.

    python -m rose.bench.micro.kv_return --rounds 40 > out/bench/kv_return.json

Each round fills at least RETURNED_BYTES of KV memory with running rollouts, lowers the cap, and
takes the time from writing the grant until the guest section says that the memory is gone: the wait
for the step in flight, the preemption, the return of the pages and the measurement of what is
resident are all in it. In every other round the guest is frozen first, as on the reclaim ladder.
"""

import argparse
import asyncio
import json
import platform
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import psutil

from executor import ControlPage, Grant, GrantMode, GuestState, HostState
from rose.addresses import free_port
from rose.engines import EngineProcess, EngineRole, EngineSpec
from slo import percentile

RETURNED_BYTES = 1 << 30
KV_BYTES = RETURNED_BYTES + (256 << 20)
BLOCK_BYTES = 4 << 20
VOCABULARY = 96
STREAMS = 48
FILL_BUDGET, SHORT_STEP_BUDGET = 1024, 4
START_S = 240.0
FILL_S = 120.0


def save_wide_model(folder: Path) -> None:
    """A small model with the KV cache of a large one: 128 KiB a token, as an 8B model in bf16."""
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


class Node(threading.Thread):
    """Stands in for the host and the node daemon: an idle host, and a grant that stays alive."""

    def __init__(self, page: ControlPage) -> None:
        super().__init__(daemon=True)
        self._page = page
        self._host = page.take_host()
        self._lock = threading.Lock()
        self._grant = Grant(GrantMode.RUN, token_budget=FILL_BUDGET, max_sequences=STREAMS)
        self._ended = threading.Event()

    def run(self) -> None:
        """Keep the grant alive."""
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
        """End the thread."""
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


@dataclass
class KvReturnBench:
    """A guest under load."""

    page: ControlPage
    node: Node
    core: psutil.Process
    url: str

    def state(self) -> GuestState:
        """The guest section."""
        state = self.page.guest.read()
        if state is None:
            raise SystemExit("the guest publishes nothing")
        return state

    async def until(self, holds: Callable[[GuestState], bool], within_s: float) -> GuestState:
        """Poll the page until it holds."""
        deadline_s = time.monotonic() + within_s
        while not holds(state := self.state()):
            if time.monotonic() > deadline_s:
                raise SystemExit(f"not within {within_s} s: {state}")
            await asyncio.sleep(0.0002)
        return state

    async def stream(self, http: aiohttp.ClientSession, rng: random.Random) -> None:
        """Rollouts without end, one after the other."""
        while True:
            body = {
                "request_id": "turn",
                "token_ids": [rng.randrange(VOCABULARY) for _ in range(224)],
                "sampling": {"temperature": 0.0, "max_tokens": 200},
            }
            async with http.post(f"{self.url}/rose/v1/generate", json=body) as answer:
                await answer.read()

    async def round(self, *, frozen_first: bool) -> KvRound:
        """Fill, shrink, measure, grow."""
        self.node.allow(GrantMode.RUN, FILL_BUDGET, kv_granule_cap=0)
        full = RETURNED_BYTES // BLOCK_BYTES
        filled = await self.until(lambda state: state.kv_used >= full + 8, FILL_S)
        # Short steps, as the gate asks for beside a host. Blocks are counted when a step begins and
        # touched while it computes: so a few more.
        self.node.allow(token_budget=SHORT_STEP_BUDGET)
        await self.until(lambda state: state.step_seq >= filled.step_seq + 5, FILL_S)
        if frozen_first:
            self.node.allow(GrantMode.FREEZE)
            await self.until(lambda state: state.gate_reason == "frozen", 5)
        before, resident = self.state(), self.core.memory_info().rss
        began_s = time.monotonic()
        self.node.allow(kv_granule_cap=before.granules_total - full)
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
    """Percentiles by the nearest rank; seconds and bytes."""
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


async def measure(rounds: int, folder: Path) -> list[KvRound]:
    """Start the guest and its load, and measure."""
    save_wide_model(folder / "model")
    page = ControlPage.create(folder / "page")
    node = Node(page)
    node.start()
    port = free_port()
    spec = EngineSpec(
        name="guest",
        role=EngineRole.GUEST,
        model_dir=folder / "model",
        port=port,
        log=folder / "guest.log",
        dtype="float32",
        kv_bytes=KV_BYTES,
        max_num_seqs=STREAMS,
        control_page=page.path,
        extra_args=("--skip-tokenizer-init", "--no-enable-prefix-caching"),
    )
    engine = await EngineProcess.start(spec)
    try:
        await engine.wait_healthy(START_S)
        family = psutil.Process(engine.process.pid).children(recursive=True)
        core = max(family, key=lambda process: process.memory_info().rss)
        bench = KvReturnBench(page, node, core, spec.url)
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            await http.post(f"{spec.url}/rose/v1/admit", json={"epoch": 1}, headers=engine.headers)
            rng = random.Random(0)  # noqa: S311 -- prompts, not secrets
            streams = [asyncio.create_task(bench.stream(http, rng)) for _ in range(STREAMS)]
            found = []
            for number in range(rounds):
                found.append(await bench.round(frozen_first=number % 2 == 1))
                sys.stderr.write(f"{found[-1]}\n")
            for stream in streams:
                stream.cancel()
            return found
    finally:
        await engine.stop()
        node.stop()
        page.close()


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rose-kv-return-"))
    try:
        rounds = asyncio.run(measure(arguments.rounds, folder))
    finally:
        shutil.rmtree(folder)
    report = {
        "machine": {"cpus": psutil.cpu_count(), "kernel": platform.release()},
        "kv_bytes": KV_BYTES,
        "asked_back_bytes": RETURNED_BYTES,
        "all": summary(rounds),
        "running": summary([one for one in rounds if not one.frozen_first]),
        "frozen_first": summary([one for one in rounds if one.frozen_first]),
    }
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
