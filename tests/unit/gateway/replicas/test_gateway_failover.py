"""Pauses of a turn at its reader: deaths of replicas and revoked leases."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import pytest

from rose.gateway import ReplicaEntry
from rose.gateway.replicas import watch
from rose.gateway.replicas.watch import WatchedTable
from rose.rpc import rose_pb2
from rose.rpc.leader_channel import LeaderChannel
from tests.fakes.replica import StandInReplica
from tests.unit.gateway.gateway_cases import (
    Ticks,
    base_url,
    begin,
    entry,
    failing_over,
    gateway_with,
    until,
)
from tests.unit.gateway.wire_cases import VLLM, ask, tokens_of, vllm_body

TURNS, TOKENS = 30, 20
# Ticks of 1 ms.
FAILOVER_P99_TICKS = 250
ADMISSION_STOP_TICKS = 50


async def follow(session: Any, turn: int, ticks: Ticks) -> tuple[list[int], list[int], int]:
    """Tokens of a streamed turn, at which tick each came, and its attempts."""
    body = vllm_body(TOKENS, request_id=f"r{turn}", token_ids=[1, 1000 * turn], stream=True)
    tokens: list[int] = []
    times: list[int] = []
    attempts = 0
    async with session.post(VLLM, json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                new = chunk["choices"][0]["token_ids"]
                tokens += new
                times += [ticks.count] * len(new)
                attempts = chunk.get("attempts", attempts)
    return tokens, times, attempts


async def test_a_death_costs_one_attempt_and_a_quarter_of_a_second_at_most() -> None:
    async with (
        StandInReplica(delay_s=0.05) as dying,
        StandInReplica(delay_s=0.05) as living,
        gateway_with(entry(dying, "guest-0"), entry(living, "ded-0"), stall_s=2.0) as gw,
        aiohttp.ClientSession(base_url(gw), connector=aiohttp.TCPConnector(limit=0)) as session,
        Ticks() as ticks,
    ):
        turns = [asyncio.create_task(follow(session, turn, ticks)) for turn in range(TURNS)]
        await until(lambda: dying.live > 10 and living.live > 10)
        await asyncio.sleep(0.3)
        victims = dying.live
        died = ticks.count
        dying.kill()
        answers = await asyncio.gather(*turns)
        stats = gw.stats
        assert victims > 10
        # The victims' turns move once; no other turn moves, and none twice.
        assert stats.continuations == stats.attempts - TURNS <= victims
    pauses = []
    for turn, (tokens, times, attempts) in enumerate(answers):
        assert tokens == list(range(1000 * turn + 1, 1000 * turn + 1 + TOKENS))
        assert attempts <= 2
        if attempts == 2:
            pauses.append(min(at for at in times if at > died + 1) - died)
    assert len(pauses) > 10
    assert sorted(pauses)[int(0.99 * (len(pauses) - 1))] <= FAILOVER_P99_TICKS


async def test_a_revoked_lease_stops_admission_and_streams_within_50_ms() -> None:
    replicas = StandInReplica(delay_s=0.01), StandInReplica(delay_s=0.01)
    async with failing_over(*replicas, stall_s=9) as (guest, own, gw, session), Ticks() as ticks:
        guest.hang_after = 5
        turn = begin(session, vllm_body(10))
        await until(lambda: gw.stats.tokens["guest-0"] == 5)
        revoked = ticks.count
        gw.set_table((entry(guest, "guest-0", leased=False), entry(own, "own-0")))
        before = len(guest.requests)
        await until(lambda: guest.cancelled == 1)
        stopped_after = ticks.count - revoked
        others = await asyncio.gather(*(ask(session, VLLM, vllm_body(2)) for _ in range(20)))
        status, answer, _ = await turn
        assert gw.status().live_turns == {"guest-0": 0, "own-0": 0}
    assert status == 200
    assert tokens_of(answer) == list(range(101, 111))
    assert stopped_after <= ADMISSION_STOP_TICKS
    assert len(guest.requests) == before, "no turn begins there after the revocation"
    assert all(s == 200 for s, _, _ in others)


async def test_a_pushed_table_takes_effect_within_50_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the scheduler's push to the gateway's table: nothing polls, nothing sleeps."""
    pushed: asyncio.Queue[Any] = asyncio.Queue()
    call = SimpleNamespace(read=pushed.get, cancel=lambda: None)
    stub = SimpleNamespace(WatchReplicas=lambda request: call)
    monkeypatch.setattr(watch.rose_pb2_grpc, "SchedulerStub", lambda channel: stub)
    monkeypatch.setattr(LeaderChannel, "connected", AsyncMock())
    taken: list[tuple[int, bool]] = []

    def sink(rows: tuple[ReplicaEntry, ...], _: tuple[str, ...]) -> None:
        taken.append((ticks.count, bool(rows and rows[0].leased)))

    table = WatchedTable("127.0.0.1:1", "g", 5.0, lambda *a, **kw: None)
    row = rose_pb2.Replica(id="g", kind=rose_pb2.REPLICA_KIND_GUEST, url="http://h", leased=True)
    async with Ticks() as ticks:
        running = asyncio.create_task(table.run(sink))
        await pushed.put(rose_pb2.ReplicaTable(replicas=[row]))
        await until(lambda: bool(taken))
        row.leased = False
        revoked = ticks.count
        await pushed.put(rose_pb2.ReplicaTable(replicas=[row]))
        await until(lambda: len(taken) == 2)
        running.cancel()
    assert taken[1][1] is False
    assert taken[1][0] - revoked <= ADMISSION_STOP_TICKS
