"""`python -m bench.gateway`: what routers add to turns and tokens, beside the bare engine.

With `--real` two stock engines of vLLM with a tiny model serve. Without stamps in the chunks a
router's share is a difference of times that are mostly the engine's, so these rows say that it
works and what it costs roughly; exact figures are the stand-in's.

Sessions are replayed small there, turns whose prompts grow. A file, gzip or plain, has one session
a line: `{"turns": [[start_s, input_tokens, output_tokens, think_s, api_s], …]}`; without one,
sessions of the same shape are made up. Prompts are cut to `max_prompt` tokens by one factor for
all, think times to `think_s` in the middle by another.

Writes gateway.json and gateway.txt. Exit code 0, 1 when a limit fails, 2 for bad input.
"""

import argparse
import asyncio
import gzip
import itertools
import json
import random
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Self

from bench.chaos import ChaosFleet
from bench.common.checks import (
    FAILS,
    Check,
    at_least,
    at_most,
    checks_table,
    columns_table,
    number,
    row_verdict,
)
from bench.common.processes import BenchProcess, ProcessFleet, cores, gateway_command
from bench.common.report import OUT, machine, parser_of, put_both, reported, say
from bench.common.stats import metric
from bench.common.tiny_models import FLEET_MODEL
from bench.load.standin import StandInEngine
from bench.load.streams import (
    COMPLETIONS,
    REAL_TEXT,
    REAL_TOKENS,
    REPLICA,
    SGLANG,
    STREAMS,
    TOKEN_STREAM,
    TOKENS,
    Generator,
    StreamLoad,
    Wire,
)
from rose.addresses import free_ports
from rose.client import RolloutClient, Sampling
from rose.engines import EngineRole
from rose.errors import ConfigError, EngineStartError

PROG = "bench.gateway"
QUICK_STREAMS = (1, 100, 2000)
Say = Callable[[str], None]
DIRECT, ROSE = "direct", "rose"
# Peers by the module that holds them; all take the same options.
PEERS = {"vllm-router": "vllm_router", "sglang-router": "sglang_router"}
# sglang-router takes token ids on SGLang's own route only.
PEER_WIRES = {"vllm-router": COMPLETIONS, "sglang-router": SGLANG}
MANY = "100000"
# ROSE replicas and stock engines.
PORTS = 4 + 4
VOCABULARY = 96
OUTPUT_TOKENS = 4
REAL_STREAMS = (1, 10, 50)
# vLLM's own counters, in tokens; only stock engines have them: replicas leave their upkeep out.
QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
# A process this busy for most of a cell is what limits it.
BUSY = 0.85
# A router that is ready to run for this share of the time and may not shows others' load.
WAITED = 0.2
AT_STREAMS = 2000
ADDED_P50_S, ADDED_P99_S = 0.001, 0.005
# Longer than this without a token, where the engine wrote one, is a stall.
STALL_S = 2.0
# Streams go on with the next turn at once, so a router that keeps up gets all turns through.
DONE = 0.9
OF_ORACLE = 0.85
# Fields that tell a way and its number of streams.
KEYS = ("engine", "router", "wire", "streams")


@dataclass(frozen=True, slots=True)
class GatewayArm:
    """One way to the engine, through the process of `router`, which is DIRECT for none.

    `stock`: the engine is one without ROSE. `baseline`: the wire of the direct arm beside it.
    """

    router: str
    wire: Wire
    baseline: Wire
    stock: bool = False

    @property
    def engine(self) -> str:
        """Name of the engine in the table, which is never a real one's."""
        return "standin stock" if self.stock else "standin replica"

    @property
    def process(self) -> str:
        """Name of the router process: ROSE's gateway runs once for each kind of engine."""
        return f"{self.router}-stock" if self.router == ROSE and self.stock else self.router


def arms_over_standin(peers: Sequence[str]) -> list[GatewayArm]:
    arms = [
        GatewayArm(DIRECT, REPLICA, REPLICA),
        GatewayArm(ROSE, TOKENS, REPLICA),
        GatewayArm(ROSE, TOKEN_STREAM, REPLICA),
        GatewayArm(DIRECT, COMPLETIONS, COMPLETIONS, stock=True),
        GatewayArm(ROSE, TOKEN_STREAM, COMPLETIONS, stock=True),
    ]
    wires = {peer: PEER_WIRES.get(peer, COMPLETIONS) for peer in peers}
    others = dict.fromkeys(wire for wire in wires.values() if wire is not COMPLETIONS)
    arms += [GatewayArm(DIRECT, wire, wire, stock=True) for wire in others]
    return arms + [GatewayArm(peer, wire, wire, stock=True) for peer, wire in wires.items()]


def peer_command(text: str, port: int, metrics_port: int, urls: Sequence[str]) -> list[str]:
    """Return a peer's command line, with `{port}`, `{metrics_port}` and `{urls}` filled in."""
    values = {"port": str(port), "metrics_port": str(metrics_port), "urls": " ".join(urls)}
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return shlex.split(text)


def peers(given: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return commands by name, given or installed, and the names of the peers that are missing."""
    commands: dict[str, str] = {}
    for text in given:
        name, mark, command = text.partition("=")
        if not mark or "{port}" not in command or "{urls}" not in command:
            raise ConfigError(f"--peer {text}: write NAME=COMMAND with {{port}} and {{urls}} in it")
        commands[name] = command
    missing = []
    for name, module in PEERS.items():
        if name in commands:
            continue
        if find_spec(module) is None:
            missing.append(name)
            continue
        commands[name] = (
            f"{shlex.quote(sys.executable)} -m {module}.launch_router --host 127.0.0.1"
            f" --port {{port}} --worker-urls {{urls}} --max-concurrent-requests {MANY}"
            f" --prometheus-port {{metrics_port}}"
        )
    return commands, missing


def measured_cell(
    generator: Generator,
    urls: Sequence[str],
    load: StreamLoad,
    seed: int,
    processes: Mapping[str, BenchProcess],
    **names: Any,  # noqa: ANN401 - as a row has them
) -> dict[str, Any]:
    """Return the record of one cell.

    processes: those whose shares of a processor are measured. names: engine, router, wire,
    baseline, round, and the turns that are due.
    """
    before = {who: each.cpu_use() for who, each in processes.items()}
    began_s = time.monotonic()
    measured = generator.cell(urls, names["wire"], load, seed)
    took_s = time.monotonic() - began_s
    cell: dict[str, Any] = {**names, "streams": load.streams, "load": load.as_json()}
    cell |= {"engine_busy": 0.0, "router_busy": 0.0, "router_waited": 0.0}
    for who, each in processes.items():
        busy, waited = each.cpu_use().share_since(before[who], took_s)
        cell |= {f"{who}_busy": busy, f"{who}_waited": waited}
    return cell | dict(measured)


class StandInBench:
    """Processes over the stand-in engine. Context manager."""

    def __init__(self, folder: Path, peers: Mapping[str, str], max_streams: int, say: Say) -> None:
        self._peers, self._max_streams, self._say = peers, max_streams, say
        self._cores, self._fleet = cores(), ProcessFleet(folder)
        self._seeds = itertools.count()
        self._urls: dict[str, str] = {}
        self.skipped: dict[str, str] = {}

    def __enter__(self) -> Self:
        try:
            ports = free_ports(PORTS)
            self._engine = StandInEngine.of(ports, self._log("engine"), self._cores["engine"])
            self._fleet.add(self._engine)
            self._generator = Generator.of(self._log("generator"), self._cores["generator"])
            self._fleet.add(self._generator.start())
            self._start_routers()
        except BaseException:
            self._fleet.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._fleet.close()

    def rounds(self, streams: Sequence[int], rounds: int, seconds: float) -> list[dict[str, Any]]:
        arms = arms_over_standin([name for name in self._peers if name in self._urls])
        return [
            self._cell(arm, StreamLoad(count, seconds), number)
            for number in range(rounds)
            for count in streams
            for arm in arms
        ]

    def _cell(self, arm: GatewayArm, load: StreamLoad, number: int) -> dict[str, Any]:
        self._say(f"{load.streams} streams, {arm.engine}, {arm.router}, {arm.wire.name}, {number}")
        self._engine.pace(load.first_s, load.gap_s, load.chunk_tokens)
        processes: dict[str, BenchProcess] = {"engine": self._engine}
        urls = self._engine.stock_urls if arm.stock else self._engine.urls
        if arm.router != DIRECT:
            processes["router"] = self._fleet.members[arm.process]
            urls = [self._urls[arm.process]]
        return measured_cell(
            *(self._generator, urls, load, next(self._seeds), processes),
            engine=arm.engine,
            router=arm.router,
            wire=arm.wire.name,
            baseline=arm.baseline.name,
            round=number,
            due_turns_per_s=load.streams / load.turn_s,
        )

    def _start_routers(self) -> None:
        """Start all routers; peers that do not start are left out, ROSE's own gateway has to."""
        engine, ports = self._engine, iter(free_ports(2 + 2 * len(self._peers)))
        commands: dict[str, tuple[int, Sequence[str]]] = {}
        for name, urls in ((ROSE, engine.urls), (f"{ROSE}-stock", engine.stock_urls)):
            port = next(ports)
            replicas = {f"e{k}": url for k, url in enumerate(urls)}
            command = gateway_command(port, replicas, self._max_streams, "--max-waiting=4096")
            commands[name] = (port, command)
        for name, text in self._peers.items():
            port = next(ports)
            commands[name] = (port, peer_command(text, port, next(ports), engine.stock_urls))
        for name, (port, argv) in commands.items():
            router = BenchProcess(name, argv, self._log(name), self._cores["router"])
            self._fleet.add(router.start())
            url = f"http://127.0.0.1:{port}"
            try:
                router.wait_answers(f"{url}/health", 0 if name in self._peers else PORTS // 2)
                self._urls[name] = url
            except EngineStartError as error:
                if name not in self._peers:
                    raise
                self.skipped[name] = str(error)

    def _log(self, name: str) -> Path:
        return self._fleet.folder / f"gateway-{name}.log"


Ask = Callable[[str, int, list[int]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """A prompt's length in tokens, and the pause before it in seconds."""

    prompt_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class AgentSession:
    """One trajectory."""

    id: str
    turns: tuple[SessionTurn, ...]

    def prompt(self, turn: int) -> list[int]:
        """Return the session's tokens up to this turn, with which its next prompt begins."""
        dice = random.Random(self.id)  # noqa: S311 - the same tokens whoever asks
        return [dice.randrange(VOCABULARY) for _ in range(self.turns[turn].prompt_tokens)]


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the replay."""

    sessions: int = 24
    turns: int = 12
    max_prompt: int = 400
    think_s: float = 0.05


def read_sessions(path: Path, scale: Scale) -> list[AgentSession]:
    """Return the first sessions of a file with at least three turns. Raises ConfigError."""
    opened = gzip.open if path.suffix == ".gz" else open
    rows: list[list[tuple[int, float]]] = []
    try:
        with opened(path, "rt") as lines:
            for line in lines:
                turns = [(int(turn[1]), float(turn[3])) for turn in json.loads(line)["turns"]]
                if len(turns) >= 3:
                    rows.append(turns[: scale.turns])
                if len(rows) == scale.sessions:
                    break
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{path} holds no sessions: {error}") from error
    return _scaled(rows, scale)


def made_up_sessions(scale: Scale, seed: int = 0) -> list[AgentSession]:
    """Return sessions whose prompts grow turn by turn, with long-tailed think times."""
    dice = random.Random(seed)  # noqa: S311 - repeatable
    rows = []
    for _ in range(scale.sessions):
        length, turns = dice.randint(15_000, 60_000), []
        for _ in range(dice.randint(3, scale.turns)):
            turns.append((length, dice.lognormvariate(2.3, 0.8)))
            length += dice.randint(300, 8_000)
        rows.append(turns)
    return _scaled(rows, scale)


def _scaled(rows: Sequence[Sequence[tuple[int, float]]], scale: Scale) -> list[AgentSession]:
    longest = max(tokens for turns in rows for tokens, _ in turns)
    thinks = sorted(think for turns in rows for _, think in turns)
    middle_s = max(thinks[len(thinks) // 2], 1e-3)
    return [
        AgentSession(
            f"agent-{number}",
            tuple(
                SessionTurn(
                    max(8, tokens * scale.max_prompt // longest),
                    min(4.0, think / middle_s) * scale.think_s,
                )
                for tokens, think in turns
            ),
        )
        for number, turns in enumerate(rows)
    ]


async def replay(sessions: Sequence[AgentSession], ask: Ask) -> int:
    """Play all sessions side by side, each turn after its think time; return the turns."""

    async def one(session: AgentSession) -> int:
        for place, turn in enumerate(session.turns):
            await asyncio.sleep(turn.think_s)
            await ask(session.id, place, session.prompt(place))
        return len(session.turns)

    return sum(await asyncio.gather(*map(one, sessions)))


async def over_real_engines(
    folder: Path,
    sessions: Mapping[str, Sequence[AgentSession]],
    rounds: int,
    seconds: float,
    say: Say,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return cells and rows of sessions; `folder` has the model in `model`."""
    say("starting two real engines")
    async with ChaosFleet(
        folder, folder / "model", 2, gateways_count=1, role=EngineRole.STOCK
    ) as fleet:
        log = folder / "gateway-generator.log"
        with Generator.of(log, cores()["generator"]) as generator:
            cells = await asyncio.to_thread(_cells, fleet, generator, rounds, seconds, say)
        rows = []
        for name, some in sessions.items():
            say(f"sessions, {name}")
            rows.append(await _session_row(fleet, name, some))
    return cells, rows


def _cells(
    fleet: ChaosFleet, generator: Generator, rounds: int, seconds: float, say: Say
) -> list[dict[str, Any]]:
    direct = [replica.spec.url for replica in fleet.replicas]
    ways = (("direct", REAL_TEXT, direct), ("rose", REAL_TOKENS, fleet.urls))
    cells: list[dict[str, Any]] = []
    for repeat in range(-1, rounds):
        for streams in REAL_STREAMS:
            for router, wire, urls in ways:
                load = StreamLoad(streams, seconds, prompt_tokens=64, chunks=16, chunk_tokens=4)
                cell = measured_cell(
                    *(generator, urls, load, len(cells), {"router": fleet.gateways[0]}),
                    engine="vllm",
                    router=router,
                    wire=wire.name,
                    baseline=REAL_TEXT.name,
                    round=repeat,
                    due_turns_per_s=None,
                )
                # The first steps of an engine take seconds.
                if repeat >= 0:
                    say(f"{streams} streams, vllm, {router}, {repeat}")
                    cells.append(cell)
    return cells


async def _session_row(
    fleet: ChaosFleet, name: str, sessions: Sequence[AgentSession]
) -> dict[str, Any]:
    """Return hit rates of routed sessions, and of the same ones when each stays where it is put.

    Other ids are other tokens: what one run leaves in the caches is of no use to the next.
    """
    sessions = [replace(session, id=f"{name}, {session.id}") for session in sessions]
    async with RolloutClient(fleet.urls) as client:

        async def routed(session: str, turn: int, prompt: list[int]) -> None:
            sampling = Sampling(max_tokens=OUTPUT_TOKENS)
            await client.generate(
                prompt, sampling, request_id=f"{session}/{turn}", session_id=session
            )

        before = await _counters(fleet)
        turns = await replay(sessions, routed)
        between = await _counters(fleet)
    pinned = [replace(session, id=f"pinned-{session.id}") for session in sessions]
    home = {session.id: k % len(fleet.replicas) for k, session in enumerate(pinned)}

    async def stay(session: str, turn: int, prompt: list[int]) -> None:
        body = {"request_id": f"{session}/{turn}", "prompt": prompt, "max_tokens": OUTPUT_TOKENS}
        url = f"{fleet.replicas[home[session]].spec.url}{REAL_TEXT.path}"
        async with fleet.http.post(url, json=body) as answer:
            answer.raise_for_status()
            await answer.read()

    await replay(pinned, stay)
    after = await _counters(fleet)
    mine, oracle = _rate(before, between), _rate(between, after)
    return {
        "engine": f"vllm, {name}",
        "sessions": len(sessions),
        "turns": turns,
        "routed_hit_rate": mine,
        "oracle_hit_rate": oracle,
        "of_oracle": mine / oracle if oracle else 0.0,
    }


async def _counters(fleet: ChaosFleet) -> tuple[float, float]:
    """Return tokens looked up and found in all prefix caches so far."""
    asked = found = 0.0
    for replica in fleet.replicas:
        async with fleet.http.get(f"{replica.spec.url}/metrics") as answer:
            text = await answer.text()
        asked, found = asked + metric(text, [QUERIES]), found + metric(text, [HITS])
    return asked, found


def _rate(before: tuple[float, float], after: tuple[float, float]) -> float:
    asked = after[0] - before[0]
    return (after[1] - before[1]) / asked if asked else 0.0


def rows(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each way and number of streams: medians over the rounds."""
    groups = defaultdict[tuple[object, ...], list[Mapping[str, Any]]](list)
    for cell in cells:
        groups[tuple(cell[key] for key in KEYS)].append(cell)
    return [_row(mine, [_direct(cells, cell) for cell in mine]) for mine in groups.values()]


def _direct(cells: Sequence[Mapping[str, Any]], cell: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the direct cell of the same engine, streams and round."""
    where = ("engine", "streams", "round")
    return next(
        c
        for c in cells
        if c["router"] == "direct"
        and c["wire"] == cell["baseline"]
        and all(c[key] == cell[key] for key in where)
    )


def _row(mine: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = mine[0]

    def added(what: str, quantile: str) -> float | None:
        """Return the median over the rounds of the difference; None with nothing to compare."""
        if first["router"] == DIRECT:
            return None
        pairs = [(a[what][quantile], b[what][quantile]) for a, b in zip(mine, base, strict=True)]
        return _middle([a - b for a, b in pairs if a is not None and b is not None])

    longest = [c[what]["max"] for c in mine for what in ("first_s", "later_s")]
    middles = ("router_waited", "router_busy", "engine_busy", "generator_busy")
    row = {
        **{key: first[key] for key in KEYS},
        "added_ttft_p50_s": added("first_s", "p50"),
        "added_ttft_p99_s": added("first_s", "p99"),
        "added_itl_p99_s": added("later_s", "p99"),
        "worst_s": max((value for value in longest if value is not None), default=None),
        "turns_per_s": median(c["turns_per_s"] for c in mine),
        "turns": sum(c["turns"] for c in mine),
        "errors": sum(c["errors"] for c in mine),
        "due_turns_per_s": first["due_turns_per_s"],  # None: a real engine's pace is its own
        **{name: median(c[name] for c in mine) for name in middles},
        "direct_ttft_p50_s": _middle([c["first_s"]["p50"] for c in base]),
        "direct_ttft_p99_s": _middle([c["first_s"]["p99"] for c in base]),
    }
    limits = [who for who in ("router", "engine", "generator") if row[f"{who}_busy"] > BUSY]
    if row["router_waited"] > WAITED:
        limits.append("others on the machine")
    row["limited_by"] = ", ".join(limits)
    row["errors_kept"] = [error for cell in mine for error in cell["errors_kept"]][:3]
    return row


def _middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def checks(rows: Sequence[Mapping[str, Any]], sessions: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Judge every figure of ROSE's; other routers are there to compare with."""
    found: list[Check] = []
    ours = [r for r in rows if r["router"] == "rose" and r["engine"].startswith("standin")]
    for row in ours:
        label = f"{row['wire']} at {row['streams']} streams"
        found.append(at_most(f"errors, {label}", row["errors"], 0))
        done = row["turns_per_s"] / row["due_turns_per_s"]
        found.append(at_least(f"turns of those due, {label}", done, DONE))
        if row["worst_s"] is not None:
            found.append(at_most(f"worst s, {label}", row["worst_s"], STALL_S))
        if row["streams"] != AT_STREAMS:
            continue
        for key, limit in (
            ("added_ttft_p50_s", ADDED_P50_S),
            ("added_ttft_p99_s", ADDED_P99_S),
            ("added_itl_p99_s", ADDED_P99_S),
        ):
            if row[key] is not None:
                found.append(at_most(f"{key}, {label}", row[key], limit))
    for row in sessions:
        label = f"prefix hits of the oracle's, {row['engine']}"
        found.append(at_least(label, row["of_oracle"], OF_ORACLE))
    return found


def table(result: Mapping[str, Any]) -> str:
    def ms(name: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda row: number(None if row[name] is None else row[name] * 1e3, 2)

    def share(name: str, shown: str = ".0%") -> Callable[[Mapping[str, Any]], str]:
        return lambda row: format(row[name], shown)

    blocks = [
        columns_table(
            "Added by a router: to a turn (its request's way in and its first token's way out; of"
            " a whole answer, the last token's) and to each later token",
            result["rows"],
            {
                "engine": lambda row: row["engine"],
                "router": lambda row: f"{row['router']}, {row['wire']}",
                "streams": lambda row: str(row["streams"]),
                "turn +p50 ms": ms("added_ttft_p50_s"),
                "turn +p99 ms": ms("added_ttft_p99_s"),
                "token +p99 ms": ms("added_itl_p99_s"),
                "worst ms": ms("worst_s"),
                "turns/s": share("turns_per_s", ".1f"),
                "errors": lambda row: str(row["errors"]),
                "router busy": share("router_busy"),
                "waits": share("router_waited"),
                "limited by": lambda row: row["limited_by"] or "-",
            },
        )
    ]
    for name, why in result.get("skipped", {}).items():
        blocks.append(f"{name}: skipped, {why}\n")
    if sessions := result.get("sessions"):
        columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "engine": lambda row: row["engine"],
            "sessions": lambda row: str(row["sessions"]),
            "turns": lambda row: str(row["turns"]),
            "routed": share("routed_hit_rate", ".1%"),
            "oracle": share("oracle_hit_rate", ".1%"),
            "of the oracle": share("of_oracle", ".1%"),
        }
        blocks.append(columns_table("Prefix hit rate of agentic sessions", sessions, columns))
    if checks := result.get("checks"):
        blocks.append(checks_table(checks, ".3g"))
    return "\n".join(blocks)


progress = partial(say, "gateway")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return reported(PROG, lambda: measured(args))


def measured(args: argparse.Namespace) -> int:
    """Measure all cells and return the exit code."""
    commands, missing = peers(args.peer)
    streams = args.streams or (QUICK_STREAMS if args.quick else STREAMS)
    if min(streams) < 1 or args.rounds < 1 or args.seconds <= 0:
        raise ConfigError("--streams, --rounds and --seconds: above 0")
    if args.sessions is not None and not args.real:
        raise ConfigError("--sessions are replayed on real engines: add --real")
    args.out.mkdir(parents=True, exist_ok=True)
    rounds = 1 if args.quick else args.rounds
    with StandInBench(args.out, commands, max(streams), progress) as bench:
        cells = bench.rounds(streams, rounds, args.seconds)
        skipped = {**dict.fromkeys(missing, "not installed: see --peer"), **bench.skipped}
    sessions: list[dict[str, Any]] = []
    if args.real:
        scale, folder = Scale(), args.out / "gateway-real"
        replayed = {"made up": made_up_sessions(scale)}
        if args.sessions is not None:
            replayed["recorded"] = read_sessions(args.sessions, scale)
        FLEET_MODEL.save(folder / "model")
        real, sessions = asyncio.run(
            over_real_engines(folder, replayed, rounds, args.seconds, progress)
        )
        cells += real
    made = rows(cells)
    judged = checks(made, sessions)
    result = {
        "machine": {**machine(), "placement": cores()},
        "rows": made,
        "sessions": sessions,
        "skipped": skipped,
        "checks": judged,
        "cells": cells,
    }
    put_both(args.out, "gateway", result, table(result))
    return int(row_verdict(judged) == FAILS)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, PROG, OUT, rounds=3, seconds=8.0)
    parser.add_argument("--streams", type=int, nargs="+", metavar="N")
    parser.add_argument("--quick", action="store_true", help="one round, three numbers of streams")
    parser.add_argument("--real", action="store_true", help="over real vLLM too: two minutes more")
    parser.add_argument(
        "--sessions", type=Path, metavar="FILE", help="recorded sessions to replay on real vLLM"
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="another router; {port} and {urls} in its command are filled in",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
