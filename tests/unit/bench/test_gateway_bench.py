"""The gateway benchmark counts only whole turns, and judges ROSE by the rows of its cells."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from bench.gateway import ADDED_P50_S, AT_STREAMS, checks, rows, table
from bench.load.standin import Pace, StandInConnection
from bench.load.streams import REPLICA, TOKEN_STREAM, StreamLoad, Wire, run

LOAD = StreamLoad(streams=3, seconds=0.4, prompt_tokens=8, chunks=4, chunk_tokens=4, full_gap_s=0.5)


async def measured(wire: Wire, load: StreamLoad, *, stock: bool = False) -> dict[str, Any]:
    pace = Pace(LOAD.first_s, LOAD.gap_s, LOAD.chunk_tokens)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(partial(StandInConnection, pace, stock), "127.0.0.1", 0)
    try:
        return await run([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"], wire, load)
    finally:
        server.close()


async def test_whole_turns_are_timed() -> None:
    result = await measured(REPLICA, LOAD)
    assert (result["errors"], result["errors_kept"]) == (0, [])
    assert result["turns"] >= LOAD.streams
    for what in ("first_s", "later_s"):
        assert 0 < result[what]["p50"] <= result[what]["p99"] <= result[what]["max"] < 10


async def test_answers_that_are_not_turns_are_errors() -> None:
    result = await measured(REPLICA, LOAD, stock=True)
    assert result["turns"] == 0
    assert result["errors"] > 0
    assert "404" in result["errors_kept"][0]


async def test_a_lost_chunk_is_an_error_and_not_a_turn() -> None:
    short = replace(REPLICA, body=lambda name, prompt, _: REPLICA.body(name, prompt, 16))
    result = await measured(short, replace(LOAD, chunks=5))
    assert result["turns"] == 0
    assert "4 chunks instead of 5" in result["errors_kept"]


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
        "errors_kept": [],
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
    found = {check.name: check.verdict for check in checks([direct, rose], [])}
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
    failed = [c.name for c in checks(made, []) if c.verdict == "FAILS"]
    assert any(name.startswith(check) for name in failed)


def test_who_limits_a_cell_is_said() -> None:
    made = rows([_cell("direct", 0.001, engine_busy=0.9), _cell("rose", 0.01, router_waited=0.5)])
    assert [row["limited_by"] for row in made] == ["engine", "others on the machine"]


def test_sessions_below_the_oracles_share_fail() -> None:
    row = {"engine": "vllm", "of_oracle": 0.8}
    assert [check.verdict for check in checks([], [row])] == ["FAILS"]
    assert [check.verdict for check in checks([], [{**row, "of_oracle": 0.9}])] == ["HOLDS"]
