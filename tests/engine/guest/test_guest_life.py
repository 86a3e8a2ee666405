"""One real guest from its start to its end, with the profile that `rose profile` made for it.

It computes nothing of its start beside a busy host, is warm before it takes turns, returns memory
level by level, and is killed for what is left. The tests build on one another; they leave no guest.
"""

import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio
from standin_node import StandInNode
from tiny_model import VOCABULARY, save_tiny_model
from vllm_versions import PYTHON_25, needs_25, run_by

from executor import ControlPage, GuestState
from executor.guest.gate_client import GATED_START
from executor.kv.reclaim_ladder import Finished, ReclaimLevel, ReclaimOutcome
from rose.addresses import free_port
from rose.engines import EngineProcess, EngineRole, EngineSpec
from rose.errors import EngineStartError
from rose.logs.eventlog import EventLog
from rose.node.guest.memory_gauges import HostMemory
from rose.node.guest.reclaimer import Reclaimer
from rose.node.replica_client import ReplicaClient
from rose.process.procfs import group_bytes
from slo import StepProfile
from tests.harness.waiting import until_async

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
]

log = logging.getLogger(__name__)
START_S = 240.0
# Nothing happens beside a busy host for this long.
HELD_S = 3.0
WAITS, WAITED = "the start waits until its host is idle", "passes of the start waited"
# A cold turn takes seconds; what two shared cores may keep a process waiting does not.
LATE_S = 0.5
PROMPT_TOKENS, OUTPUT_TOKENS, SEQUENCES = 64, 24, 16
MIB = 1 << 20
KV_BYTES = 512 * MIB
TURN = {"request_id": "turn", "token_ids": [1, 2, 3], "sampling": {"max_tokens": 4}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("life")
    save_tiny_model(root / "model", dtype="bfloat16")
    return root


def profile(root: Path, *options: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "rose.cli", "profile", "--out", root / "profile.json"]
    return subprocess.run(
        [*map(str, command), "--model", str(root / "model"), *map(str, options)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.fixture(scope="module")
def profiled(root: Path) -> "subprocess.CompletedProcess[str]":
    return profile(root, "--max-num-seqs", SEQUENCES, "--max-model-len", 256)


def spec_of(root: Path, page: ControlPage, python: str | None = None, **more: Any) -> EngineSpec:
    """A guest that asks its host before each pass of its start."""
    how = run_by(python, root)
    theirs = how.get("extra_env", {}).get("PYTHONPATH", "")
    paths = [str(Path(__file__).parent), theirs, os.environ.get("PYTHONPATH", "")]
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), GATED_START: "1"}
    return EngineSpec(
        name="guest",
        role=EngineRole.GUEST,
        model_dir=root / "model",
        port=free_port(),
        log=root / "guest.log",
        kv_bytes=KV_BYTES,
        max_num_seqs=SEQUENCES,
        max_model_len=256,
        control_page=page.path,
        orphan_s=60.0,
        python=how.get("python"),
        extra_args=("--skip-tokenizer-init", "--worker-cls=gated_cpu_worker.GatedCpuWorker"),
        extra_env=environ | {"VLLM_SERVER_DEV_MODE": "1"},
        **more,
    )


async def started_beside_a_busy_host(spec: EngineSpec, node: StandInNode) -> EngineProcess:
    """Start it, let it wait for its host, and check that it does; returns once it is healthy."""

    def said(words: str) -> bool:
        assert engine.process.returncode is None, engine.last_words()
        return words in spec.log.read_text(errors="replace")

    node.host_running = 2
    engine = await EngineProcess.start(spec)
    try:
        await until_async(lambda: said(WAITS), START_S, "the first pass waits", 0.1)
        await asyncio.sleep(HELD_S)
        assert not said(WAITED), "its host was busy all the time"
        node.host_running = 0
        await engine.wait_healthy(START_S)
        lines = spec.log.read_text(errors="replace").splitlines()
        (held,) = (line for line in lines if WAITED in line)
        assert float(held.split(" waited ")[1].split()[0]) > HELD_S / 2
    except BaseException:
        await engine.stop()
        raise
    return engine


class ReclaimedGuest:
    """The guest of a life, for its reclaim."""

    name, sleep_bytes = "guest", None

    def __init__(self, life: "Life", can_sleep: bool) -> None:
        self._life = life
        self.can_sleep = can_sleep
        self.sleep, self.kill = life.client.sleep, life.kill

    @property
    def state(self) -> GuestState | None:
        return self._life.page.guest.peek()

    def gauge(self) -> HostMemory:
        return HostMemory(lambda: self._life.engine.process.pid)

    def hold(self, cap: int | None) -> None:
        if cap is None:
            self._life.node.reset()
        else:
            self._life.node.hold(cap)


@dataclass
class Life:
    """The guest, what its node would have for a reclaim, and what it said when it was healthy."""

    page: ControlPage
    node: StandInNode
    engine: EngineProcess
    http: aiohttp.ClientSession
    events: EventLog
    state: dict[str, Any]
    before: GuestState
    refused: tuple[int, str]
    first_turn_s: float = 0.0
    killed: asyncio.Task[None] | None = None

    @property
    def client(self) -> ReplicaClient:
        return ReplicaClient(self.http, self.engine.spec.url, lambda: self.engine.headers)

    @property
    def memory(self) -> int | None:
        return group_bytes(self.engine.process.pid)

    def kill(self, _: str) -> None:
        self.killed = asyncio.create_task(self.engine.process.kill())

    def reclaimer(self, *, sleeps: bool) -> Reclaimer:
        return Reclaimer(ReclaimedGuest(self, sleeps), self.events)

    async def turn_s(self, seed: int) -> float:
        """Seconds of a whole turn; each seed has a prompt of its own."""
        body = TURN | {
            "token_ids": [(seed * 31 + 7 * k) % VOCABULARY for k in range(PROMPT_TOKENS)],
            "sampling": {"temperature": 1.0, "max_tokens": OUTPUT_TOKENS},
        }
        began_s = time.perf_counter()
        status, text = await self.turn(body)
        assert status == 200, text
        assert json.loads(text.splitlines()[-1]) == {"finish_reason": "length"}
        return time.perf_counter() - began_s

    async def turn(self, body: dict[str, Any]) -> tuple[int, str]:
        url = f"{self.engine.spec.url}/rose/v1/generate"
        async with self.http.post(url, json=body) as answer:
            return answer.status, await answer.text()

    async def settled(self) -> None:
        """Return once a second has passed in which an engine that just started grew no more."""
        async with asyncio.timeout(60):
            before, now = -KV_BYTES, self.memory or 0
            while abs(now - before) > MIB:
                await asyncio.sleep(1.0)
                before, now = now, self.memory or 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def life(root: Path, profiled: "subprocess.CompletedProcess[str]") -> AsyncIterator[Life]:
    assert profiled.returncode == 0, profiled.stderr
    page = ControlPage.create(root / "page")
    node = StandInNode(page)
    node.start()
    events = EventLog(root, "node")
    engine: EngineProcess | None = None
    try:
        spec = spec_of(root, page, warm_up_s=120.0, step_profile=root / "profile.json")
        engine = await started_beside_a_busy_host(spec, node)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
            async with http.get(f"{spec.url}/rose/v1/state") as answer:
                state = await answer.json()
            before = page.guest.read()
            assert before is not None
            life = Life(page, node, engine, http, events, state, before, (0, ""))
            life.refused = await life.turn(TURN)
            async with http.post(
                f"{spec.url}/rose/v1/admit", json={"epoch": 1}, headers=engine.headers
            ) as answer:
                assert answer.status == 200
            life.first_turn_s = await life.turn_s(seed=0)
            yield life
    finally:
        if engine is not None:
            await engine.stop()
        node.stop()
        page.close()
        events.close()


async def test_a_profile_is_printed_saved_and_leaves_nothing_running(
    root: Path, profiled: "subprocess.CompletedProcess[str]"
) -> None:
    assert profiled.returncode == 0, profiled.stderr
    saved = StepProfile.from_json((root / "profile.json").read_text())
    assert saved.samples >= 30
    assert 0 < saved.fit_error < 0.5
    assert saved.seconds(512, 16, 2_000) > saved.seconds(16, 16, 500) > 0
    assert "predicted ms" in profiled.stdout
    commands = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(root / "model") in command]


async def test_a_fresh_guest_takes_no_turns_before_its_lease(life: Life) -> None:
    """Its start waited for its host, else there were no guest: `started_beside_a_busy_host`."""
    status, text = life.refused
    assert (status, json.loads(text)["error"]["type"]) == (503, "draining")


async def test_the_first_leased_turn_of_a_fresh_engine_is_as_fast_as_later_ones(
    life: Life,
) -> None:
    later_s = median([await life.turn_s(seed) for seed in range(1, 8)])
    assert life.first_turn_s <= 2 * later_s + LATE_S, (life.first_turn_s, later_s)


async def test_a_warm_up_counts_no_tokens_and_leaves_no_prefix(life: Life) -> None:
    assert life.state["warm"] is True
    assert life.state["tokens_total"] == 0
    assert life.before.tokens_total == 0
    assert life.before.kv_used == 0
    said = life.page.guest.read()
    assert said is not None
    assert said.tokens_total % OUTPUT_TOKENS == 0
    assert said.tokens_total > 0


def told(finished: Finished) -> dict[ReclaimLevel, ReclaimOutcome]:
    for report in finished.levels:
        log.info(
            "%s: %s, %d MiB gone, %d MiB claimed, %.0f ms %s",
            *(report.level.name, report.outcome.value, report.freed_bytes // MIB),
            *(report.claimed_bytes // MIB, report.took_ns / 1e6, report.why),
        )
    log.info(
        "%d MiB wanted, %d MiB gone after %.0f ms",
        *(finished.wanted_bytes // MIB, finished.freed_bytes // MIB, finished.took_ns / 1e6),
    )
    return {report.level: report.outcome for report in finished.levels}


async def test_a_part_of_its_kv_comes_back_and_the_guest_lives_on(life: Life) -> None:
    await life.settled()
    before = life.memory
    finished = await life.reclaimer(sleeps=False).reclaim(200 * MIB, 5.0, "test")
    after = life.memory
    assert told(finished) == {
        ReclaimLevel.FREEZE: ReclaimOutcome.TOO_LITTLE,
        ReclaimLevel.BALLOON: ReclaimOutcome.FREED,
    }
    assert finished.enough
    assert finished.in_time
    assert before is not None
    assert after is not None
    assert 200 * MIB <= before - after < 260 * MIB
    assert (await life.client.state()).running == 0


async def test_sleep_reported_success_but_memory_stayed_held(life: Life) -> None:
    """vLLM 0.32 on CPU answers its sleep route with 200 and does nothing."""
    wanted = (life.memory or 0) - 100 * MIB
    finished = await life.reclaimer(sleeps=True).reclaim(wanted, 10.0, "test")
    outcomes = told(finished)
    assert outcomes[ReclaimLevel.RELEASE_KV] is ReclaimOutcome.TOO_LITTLE
    assert outcomes[ReclaimLevel.SLEEP] is ReclaimOutcome.HELD
    assert outcomes[ReclaimLevel.KILL] is ReclaimOutcome.FREED
    assert finished.enough
    assert finished.in_time
    assert life.killed is not None
    await life.killed
    assert life.memory == 0


@pytest.mark.nightly
@needs_25
async def test_the_start_of_the_older_vllm_waits_for_its_host_too(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", dtype="float32")
    page = ControlPage.create(tmp_path / "page")
    node = StandInNode(page)
    node.start()
    try:
        spec = spec_of(tmp_path, page, PYTHON_25, dtype="float32")
        await (await started_beside_a_busy_host(spec, node)).stop()
    finally:
        node.stop()
        page.close()


@pytest.mark.nightly
async def test_a_guest_does_not_start_with_a_profile_that_cannot_be_used(root: Path) -> None:
    (root / "bad.json").write_text("{}")
    page = ControlPage.create(root / "page-bad")
    node = StandInNode(page)
    node.start()
    spec = spec_of(root, page)
    environ = spec.extra_env | {"ROSE_STEP_PROFILE": str(root / "bad.json")}
    engine = await EngineProcess.start(replace(spec, log=root / "bad.log", extra_env=environ))
    try:
        with pytest.raises(EngineStartError, match="not a step profile") as error:
            await engine.wait_healthy(START_S)
        assert "\n" not in str(error.value)
    finally:
        await engine.stop()
        node.stop()
        page.close()


@pytest.mark.nightly
def test_an_engine_that_dies_at_start_is_said_in_one_line(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("tokenizer.json", "model.safetensors"):
        (model / name).write_text("{}")
    (model / "config.json").write_text(json.dumps({"model_type": "no such model"}))
    process = profile(tmp_path)
    assert process.returncode == 2
    assert process.stderr.count("\n") == 1
    assert "engine profile ended at start" in process.stderr
    log = Path(process.stderr.rsplit("see ", 1)[1].strip())
    assert log.exists(), "its log is kept"
    assert list(log.parent.iterdir()) == [log], "and nothing else"
    shutil.rmtree(log.parent)
