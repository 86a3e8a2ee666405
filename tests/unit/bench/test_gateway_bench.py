import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.gateway.__main__ import main
from bench.gateway.arms import (
    COMPLETIONS,
    REPLICA,
    SGLANG,
    TOKEN_STREAM,
    TOKENS,
    Wire,
    arms_over_standin,
    peer_command,
    peers,
    rose_command,
)
from bench.gateway.generator import STREAMS, Load, run
from bench.gateway.processes import MeasuredProcess, StandInEngine, cores
from bench.gateway.report import ADDED_P50_S, AT_STREAMS, checks, rows, table
from bench.gateway.standin_engine import EngineConnection, Pace
from elastic_scheduler import ReplicaKind
from rose.addresses import free_ports
from rose.errors import ConfigError, EngineStartError
from rose.gateway import Gateway, GatewaySettings, StaticReplica
from tests.patience import PATIENCE_S

LOAD = Load(streams=3, seconds=0.4, prompt_tokens=8, chunks=4, chunk_tokens=4, full_gap_s=0.5)


@asynccontextmanager
async def engine(stock: bool = False, slow_s: float = 0.0) -> AsyncIterator[str]:
    pace = Pace(LOAD.first_s, LOAD.gap_s, LOAD.chunk_tokens)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(partial(EngineConnection, pace, stock), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def timed_run(url: str, wire: Wire) -> tuple[Any, float]:
    """What was measured, and the seconds of all of it: nothing in it took longer."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    return await run([url], wire, LOAD), loop.time() - began_s


@pytest.mark.parametrize("wire", [REPLICA, COMPLETIONS, SGLANG], ids=lambda wire: wire.name)
async def test_the_engine_asked_directly_answers_at_its_pace(wire: Wire) -> None:
    async with engine(stock=wire is not REPLICA) as url:
        times, took_s = await timed_run(url, wire)
    result: dict[str, Any] = times.result()
    assert (result["errors"], result["said"]) == (0, [])
    assert result["turns"] >= LOAD.streams
    for what in ("first_s", "later_s"):
        assert 0 < result[what]["p50"] <= result[what]["p99"] <= result[what]["max"] < took_s


@pytest.mark.parametrize(
    ("wire", "stock"),
    [(TOKENS, False), (TOKEN_STREAM, False), (TOKENS, True), (TOKEN_STREAM, True)],
    ids=lambda value: value.name if isinstance(value, Wire) else "stock" if value else "ours",
)
async def test_roses_gateway_hands_the_stamps_through(wire: Wire, stock: bool) -> None:
    async with engine(stock) as url:
        rows = (StaticReplica("e0", ReplicaKind.DEDICATED, url, 64),)
        async with Gateway(GatewaySettings(0, replicas=rows)) as gateway:
            async with asyncio.timeout(PATIENCE_S):
                while not gateway.status().usable:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            times, took_s = await timed_run(f"http://127.0.0.1:{gateway.port}", wire)
    result: dict[str, Any] = times.result()
    assert (result["errors"], result["said"]) == (0, [])
    assert result["turns"] >= LOAD.streams
    assert 0 < result["first_s"]["p50"] < took_s
    assert (result["later_s"]["p50"] is None) == wire.whole


async def test_answers_that_are_not_turns_are_errors() -> None:
    async with engine(stock=True) as url:
        times = await run([url], REPLICA, LOAD)
    result: dict[str, Any] = times.result()
    assert result["turns"] == 0
    assert result["errors"] > 0
    assert "404" in result["said"][0]


def test_a_lost_chunk_is_an_error_and_not_a_turn() -> None:
    more = Load(**{**{f: getattr(LOAD, f) for f in LOAD.__dataclass_fields__}, "chunks": 5})
    assert more.max_tokens == 20

    async def ask() -> dict[str, Any]:
        async with engine() as url:
            short = Wire("x", REPLICA.path, lambda i, p, b: REPLICA.body(i, p, 16), REPLICA.stamps)
            return (await run([url], short, more)).result()

    result = asyncio.run(ask())
    assert result["turns"] == 0
    assert "4 chunks instead of 5" in result["said"]


def _cell(router: str, p50_s: float, **more: Any) -> dict[str, Any]:
    quantiles = {"p50": p50_s, "p99": 2 * p50_s, "max": 3 * p50_s}
    return {
        "engine": "standin replica",
        "router": router,
        "wire": REPLICA.name if router == "direct" else TOKEN_STREAM.name,
        "baseline": REPLICA.name,
        "streams": AT_STREAMS,
        "round": 0,
        "due_turns_per_s": 100.0,
        "first_s": quantiles,
        "later_s": quantiles,
        "turns_per_s": 100.0,
        "turns": 500,
        "errors": 0,
        "said": [],
        "router_busy": 0.1,
        "router_waited": 0.0,
        "engine_busy": 0.1,
        "generator_busy": 0.1,
    } | more


def test_a_row_is_the_median_of_what_each_round_added() -> None:
    cells = [
        _cell(router, p50_s, round=number)
        for number, (direct_s, rose_s) in enumerate(
            [(0.001, 0.0015), (0.002, 0.009), (0.001, 0.002)]
        )
        for router, p50_s in (("direct", direct_s), ("rose", rose_s))
    ]
    direct, rose = rows(cells)
    assert direct["added_ttft_p50_s"] is None
    assert rose["added_ttft_p50_s"] == pytest.approx(0.001)
    assert rose["added_itl_p99_s"] == pytest.approx(0.002)
    assert (rose["turns"], rose["limited_by"]) == (1500, "")
    found = {check["check"]: check["verdict"] for check in checks([direct, rose], [])}
    label = f"tokens at {AT_STREAMS} streams"
    assert found[f"added_ttft_p50_s, {label}"] == "HOLDS"
    assert rose["added_ttft_p50_s"] <= ADDED_P50_S + 1e-9
    assert label in table({"rows": [direct, rose], "checks": checks([direct, rose], [])})


@pytest.mark.parametrize(
    ("worse", "check"),
    [
        ({"errors": 1}, "errors"),
        ({"turns_per_s": 10.0}, "turns of those due"),
        ({"first_s": {"p50": 0.1, "p99": 0.1, "max": 0.1}}, "added_ttft_p50_s"),
        ({"first_s": {"p50": 0.001, "p99": 0.1, "max": 0.1}}, "added_ttft_p99_s"),
        ({"later_s": {"p50": 0.001, "p99": 0.1, "max": 0.1}}, "added_itl_p99_s"),
        ({"later_s": {"p50": 0.001, "p99": 0.002, "max": 3.0}}, "worst s"),
    ],
)
def test_each_limit_can_fail(worse: dict[str, Any], check: str) -> None:
    made = rows([_cell("direct", 0.001), _cell("rose", 0.0015, **worse)])
    failed = [c["check"] for c in checks(made, []) if c["verdict"] == "FAILS"]
    assert any(str(name).startswith(check) for name in failed)


def test_who_limits_a_cell_is_said() -> None:
    made = rows([_cell("direct", 0.001, engine_busy=0.9), _cell("rose", 0.01, router_waited=0.5)])
    assert [row["limited_by"] for row in made] == ["engine", "others on the machine"]


def test_sessions_below_the_oracles_share_fail() -> None:
    row = {"engine": "vllm", "of_oracle": 0.8}
    assert [check["verdict"] for check in checks([], [row])] == ["FAILS"]
    assert [check["verdict"] for check in checks([], [{**row, "of_oracle": 0.9}])] == ["HOLDS"]


def test_peers_are_given_or_found_or_said_to_be_missing() -> None:
    found, missing = peers(["other=run --at {port} --to {urls}"])
    assert found["other"] == "run --at {port} --to {urls}"
    assert {*missing} | {*found} == {"other", "vllm-router", "sglang-router"}
    assert peer_command(found["other"], 80, 81, ["a", "b"]) == [
        "run",
        "--at",
        "80",
        "--to",
        "a",
        "b",
    ]
    with pytest.raises(ConfigError, match="NAME=COMMAND"):
        peers(["other=run"])
    names = [(arm.router, arm.wire.name) for arm in arms_over_standin(["vllm-router"])]
    assert ("vllm-router", "completions") in names
    assert ("direct", "generate") not in names
    assert ("direct", "generate") in [
        (arm.router, arm.wire.name) for arm in arms_over_standin(["sglang-router"])
    ]


def test_few_streams_go_faster_so_that_every_cell_has_turns() -> None:
    assert [Load(streams).turn_s < 8 for streams in STREAMS] == [True] * len(STREAMS)
    assert Load(1).turn_s < 0.1 < Load(100).turn_s


def test_wrong_input_is_one_line_and_exit_code_2(tmp_path: Any, capsys: Any) -> None:
    for wrong in (["--streams", "0"], ["--peer", "x"], ["--sessions", "f"], ["--rounds", "0"]):
        assert main(["--out", str(tmp_path), *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_routers_are_started_as_the_benchmark_starts_them(tmp_path: Path) -> None:
    with ExitStack() as stack:
        port, *ports = free_ports(5)
        engine = StandInEngine(ports, tmp_path / "engine.log", cores()["engine"])
        stack.callback(engine.end)
        command = rose_command(port, engine.urls, 8)
        gateway = MeasuredProcess("rose", command, tmp_path / "rose.log", cores()["router"])
        stack.callback(gateway.end)
        gateway.wait_answers(f"http://127.0.0.1:{port}/health", len(engine.urls), PATIENCE_S)
        with pytest.raises(EngineStartError, match="does not answer"):
            gateway.wait_answers(f"http://127.0.0.1:{port}/health", len(ports), 0.3)
