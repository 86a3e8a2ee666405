"""Priorities, deadlines, slow readers: what callers may ask for, and may not cost others."""

import asyncio
import json
import socket
from typing import Any

from rose.gateway import Gateway
from tests.fakes.replica import StandInReplica
from tests.unit.gateway.gateway_cases import begin, entry, failing_over, serving, until
from tests.unit.gateway.wire_cases import VLLM, ask, stream, tokens_of, vllm_body


async def test_a_deadline_ends_waiting_and_running_turns_with_504() -> None:
    async with serving(row={"max_sequences": 1}, stall_s=9) as (replica, gw, session):
        replica.hang_after = 2
        running = begin(session, vllm_body(5, timeout_s=0.2))
        await until(lambda: replica.live == 1)
        headers = {"X-Request-Timeout": "0.05"}
        waiting, answer, _ = await ask(session, VLLM, vllm_body(5), headers=headers)
        status, partial, _ = await running
        await until(lambda: replica.cancelled == 1)
        assert gw.status().waiting == 0
    assert (waiting, status) == (504, 504)
    assert answer["error"]["type"] == "GatewayTimeoutError"
    assert "2 tokens so far" in partial["error"]["message"]


# ---- priorities where places are few ----

LOW, HIGH = 7, -7


def order_of(replica: StandInReplica) -> list[str]:
    return [asked["request_id"].split(".")[0] for asked in replica.requests]


def named(http: Any, name: str, priority: int, **fields: Any) -> Any:
    body = vllm_body(fields.pop("tokens", 4), request_id=name, priority=priority, **fields)
    return begin(http, body)


async def test_waiting_turns_go_by_priority_then_by_arrival() -> None:
    replica = StandInReplica(delay_s=0.01)
    async with serving(replica, row={"max_sequences": 1}) as (_, gw, http):
        # The first one lasts until all others wait, however slow this machine is.
        turns = [named(http, "first", LOW, tokens=1_000)]
        await until(lambda: replica.live == 1)
        waiting = {"low-a": LOW, "high-a": HIGH, "middle": 0, "high-b": HIGH, "low-b": LOW}
        for name, priority in waiting.items():
            turns.append(named(http, name, priority))
            await until(lambda: gw.status().waiting == len(turns) - 1)
        replica.delay_s = 0.0
        # More keep coming while places become free: they stand behind those of their priority.
        await until(lambda: gw.status().waiting < len(waiting))
        turns.append(named(http, "low-c", LOW))
        answers = await asyncio.gather(*turns)
        assert gw.status().waiting == 0
    assert [status for status, _, _ in answers] == [200] * 7
    assert order_of(replica) == ["first", "high-a", "high-b", "middle", "low-a", "low-b", "low-c"]
    # The engine is told as well: it orders what it has queued itself.
    said = [asked["priority"] for asked in replica.requests]
    assert said == [LOW, HIGH, HIGH, 0, LOW, LOW, LOW]


async def test_turns_of_a_revoked_replica_do_not_pass_one_of_higher_priority() -> None:
    replicas = StandInReplica(delay_s=0.01), StandInReplica(delay_s=0.01)
    async with failing_over(*replicas, stall_s=9) as (lost, kept, gw, http):
        lost.hang_after = 2
        gw.set_table((entry(lost, "guest-0", max_sequences=3),))
        turns = [named(http, f"low-{k}", LOW) for k in range(3)]
        await until(lambda: lost.live == 3)
        turns += [named(http, "high", HIGH), named(http, "new", LOW)]
        await until(lambda: gw.status().waiting == 2)
        gw.set_table(())
        await until(lambda: gw.status().waiting == 5)
        gw.set_table((entry(kept, "own-0", max_sequences=1),))
        answers = await asyncio.gather(*turns)
    assert [status for status, _, _ in answers] == [200] * 5
    order = order_of(kept)
    # Among turns of equal priority those that had begun before go first.
    assert (order[0], order[-1]) == ("high", "new")
    assert sorted(order[1:4]) == ["low-0", "low-1", "low-2"]


async def test_what_is_urgent_and_cannot_run_here_holds_up_nobody_and_is_not_passed_elsewhere() -> (
    None
):
    """A free place of another policy version is no use to it; those of its own are."""
    async with failing_over(StandInReplica(1), StandInReplica(2, 0.01)) as (old, new, gw, http):
        rows = entry(old, "own-0", max_sequences=1), entry(new, "own-1", max_sequences=1)
        gw.set_table(rows[1:])
        turns = [named(http, "running", LOW, exact_version=2, tokens=20)]
        await until(lambda: new.live == 1)
        turns += [named(http, f"low-{k}", LOW) for k in range(6)]
        turns.append(named(http, "high", HIGH, exact_version=2))
        await until(lambda: gw.status().waiting == 7)
        gw.set_table(rows)
        await asyncio.gather(*turns)
    assert "high" not in order_of(old)
    assert order_of(new)[1] == "high"


# ---- slow readers ----

TOKENS = 4_000


def _connections(gateway: Gateway) -> set[Any]:
    """aiohttp's, of callers."""
    return set(gateway._listening.server.connections)


async def _slow_reader(gateway: Gateway, body: Any) -> socket.socket:
    """A client that sends a request, has a small window and takes nothing."""
    known = _connections(gateway)
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    reader.connect(("127.0.0.1", gateway.port))
    reader.setblocking(False)
    await until(lambda: _connections(gateway) > known)
    (connection,) = _connections(gateway) - known
    # Else the kernel alone would take megabytes.
    sending = connection.transport.get_extra_info("socket")
    sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
    data = json.dumps(body).encode()
    head = f"POST {VLLM} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    await asyncio.get_running_loop().sock_sendall(reader, head.encode() + data)
    return reader


async def test_a_reader_that_takes_nothing_is_cut_off_and_holds_up_nobody() -> None:
    async with serving(slow_reader_s=0.2) as (replica, gw, session):
        readers = [
            await _slow_reader(gw, vllm_body(TOKENS, request_id="whole")),
            await _slow_reader(gw, vllm_body(TOKENS, request_id="stream", stream=True)),
        ]
        try:
            status, _ = await stream(session, VLLM, vllm_body(5))
            stats = gw.stats
            await until(lambda: stats.slow_readers == len(readers))
            # Their turns are done and kept: nothing was generated for nothing.
            _, whole, _ = await ask(session, VLLM, vllm_body(TOKENS, request_id="whole"))
        finally:
            for reader in readers:
                reader.close()
    assert status == 200
    assert len(tokens_of(whole)) == TOKENS
    assert len(replica.requests) == 3


async def test_what_the_gateway_holds_for_a_slow_reader_is_bounded() -> None:
    async with serving(slow_reader_s=20) as (replica, gw, _):
        reader = await _slow_reader(gw, vllm_body(TOKENS, request_id="slow", stream=True))
        try:
            await until(lambda: gw.stats.turns > 0)
            (connection,) = _connections(gw)
            held_bytes = connection.transport.get_write_buffer_size()
        finally:
            reader.close()
    # The turn is done, its replica free; of its megabyte of events a buffer is encoded, no more.
    assert replica.live == 0
    assert 0 < held_bytes < 300_000


async def test_every_sample_of_a_request_counts_as_a_turn_that_waits() -> None:
    async with serving(row={"max_sequences": 2}, max_waiting=10) as (replica, gw, session):
        replica.hang_after = 0
        status, answer, headers = await ask(session, VLLM, vllm_body(2, sampling={"n": 256}))
        assert (status, "Retry-After" in headers) == (429, True), answer
        await until(lambda: not any(gw.status().live_turns.values()))
        assert gw.status().waiting == 0
        replica.hang_after = None
        # Two run and ten wait.
        status, answer, _ = await ask(session, VLLM, vllm_body(2, sampling={"n": 12}))
        assert (status, len(answer["choices"])) == (200, 12)
