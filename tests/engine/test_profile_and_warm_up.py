"""A real engine is profiled; a fresh one starts with that profile and is warm before its lease."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import aiohttp
import psutil
import pytest
import pytest_asyncio
from standin_node import StandInNode
from tiny_model import VOCABULARY, save_tiny_model

from executor import ControlPage
from rose.engines import EngineProcess, EngineRole, EngineSpec
from rose.errors import EngineStartError
from rose.ports import free_port
from slo import StepProfile

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
]

START_S = 240.0
# What two shared cores may keep a process waiting.
LATE_S = 0.2
PROMPT_TOKENS, OUTPUT_TOKENS, SEQUENCES = 64, 24, 16


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("profile")
    save_tiny_model(root / "model", dtype="bfloat16")
    return root


def profile(root: Path, *options: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "rose.cli.main", "profile", "--out", root / "profile.json"]
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


@dataclass
class Guest:
    spec: EngineSpec
    page: ControlPage
    http: aiohttp.ClientSession
    first_turn_s: float
    state: dict[str, object]
    tokens_before: int
    kv_used_before: int

    async def turn_s(self, seed: int) -> float:
        return await turn_s(self.http, self.spec.url, seed)


async def turn_s(http: aiohttp.ClientSession, url: str, seed: int) -> float:
    """Seconds of a whole turn; each seed has a prompt of its own."""
    body = {
        "request_id": "turn",
        "token_ids": [(seed * 31 + 7 * k) % VOCABULARY for k in range(PROMPT_TOKENS)],
        "sampling": {"temperature": 1.0, "max_tokens": OUTPUT_TOKENS},
    }
    began_s = time.perf_counter()
    async with http.post(f"{url}/rose/v1/generate", json=body) as answer:
        last = (await answer.read()).splitlines()[-1]
    assert json.loads(last) == {"finish_reason": "length"}
    return time.perf_counter() - began_s


def spec_of(root: Path, page: ControlPage, **more: object) -> EngineSpec:
    port = free_port()
    return EngineSpec(
        name="guest",
        role=EngineRole.GUEST,
        model_dir=root / "model",
        port=port,
        log=root / "guest.log",
        max_num_seqs=SEQUENCES,
        max_model_len=256,
        control_page=page.path,
        extra_args=("--skip-tokenizer-init",),
        **more,  # type: ignore[arg-type]
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guest(root: Path, profiled: "subprocess.CompletedProcess[str]") -> AsyncIterator[Guest]:
    assert profiled.returncode == 0, profiled.stderr
    page = ControlPage.create(root / "page")
    node = StandInNode(page)
    node.start()
    spec = spec_of(root, page, warm_up_s=120.0, step_profile=root / "profile.json")
    engine = await EngineProcess.start(spec)
    try:
        await engine.wait_healthy(START_S)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
            async with http.get(f"{spec.url}/rose/v1/state") as answer:
                state = await answer.json()
            said = page.guest.read()
            assert said is not None
            async with http.post(f"{spec.url}/rose/v1/admit", json={"epoch": 1}) as answer:
                assert answer.status == 200
            first_s = await turn_s(http, spec.url, seed=0)
            yield Guest(spec, page, http, first_s, state, said.tokens_total, said.kv_used)
    finally:
        await engine.stop()
        node.stop()
        page.close()


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


async def test_the_first_leased_turn_of_a_fresh_engine_is_as_fast_as_later_ones(
    guest: Guest,
) -> None:
    later_s = median([await guest.turn_s(seed) for seed in range(1, 8)])
    # Cold, it would take seconds.
    assert guest.first_turn_s <= 2 * later_s + LATE_S, (guest.first_turn_s, later_s)


async def test_a_warm_up_counts_no_tokens_and_leaves_no_prefix(guest: Guest) -> None:
    assert guest.state["warm"] is True
    assert guest.state["tokens_total"] == 0
    assert guest.tokens_before == 0
    assert guest.kv_used_before == 0
    said = guest.page.guest.read()
    assert said is not None
    assert said.tokens_total % OUTPUT_TOKENS == 0
    assert said.tokens_total > 0


async def test_a_guest_does_not_start_with_a_profile_that_cannot_be_used(root: Path) -> None:
    (root / "bad.json").write_text("{}")
    page = ControlPage.create(root / "page-bad")
    node = StandInNode(page)
    node.start()
    more = {"extra_env": {"ROSE_STEP_PROFILE": str(root / "bad.json")}}
    spec = replace(spec_of(root, page, **more), log=root / "guest-bad.log")
    engine = await EngineProcess.start(spec)
    try:
        with pytest.raises(EngineStartError, match="not a step profile") as error:
            await engine.wait_healthy(START_S)
        assert "\n" not in str(error.value)
    finally:
        await engine.stop()
        node.stop()
        page.close()


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
