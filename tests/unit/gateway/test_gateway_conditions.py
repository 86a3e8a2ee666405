"""Priorities, deadlines, slow readers: what callers may ask for, and may not cost others."""

import asyncio
import json
import socket
from typing import Any

from gateway_cases import entry, gateway_with, serving, until
from wire_cases import VLLM, ask, stream, vllm_body

from rose.gateway import Gateway
from tests.fakes.replica import StandInReplica
from tests.harness.waiting import PATIENCE_S


async def test_waiting_turns_go_by_priority_then_by_arrival() -> None:
    async with serving(StandInReplica(delay_s=0.01), row={"max_sequences": 1}) as (
        replica,
        gw,
        session,
    ):
        first = asyncio.create_task(ask(session, VLLM, vllm_body(5, request_id="first")))
        await until(lambda: replica.live == 1)
        turns = []
        for name, priority in (("late", 5), ("early-a", -1), ("middle", 0), ("early-b", -1)):
            body = vllm_body(1, request_id=name, priority=priority)
            turns.append(asyncio.create_task(ask(session, VLLM, body)))
            await until(lambda: gw.status().waiting == len(turns))
        await asyncio.gather(first, *turns)
    order = [asked["request_id"].split(".")[0] for asked in replica.requests]
    assert order == ["first", "early-a", "early-b", "middle", "late"]


async def test_a_deadline_ends_waiting_and_running_turns_with_504() -> None:
    async with serving(row={"max_sequences": 1}, stall_s=9) as (replica, gw, session):
        replica.hang_after = 2
        running = asyncio.create_task(ask(session, VLLM, vllm_body(5, timeout_s=0.2)))
        await until(lambda: replica.live == 1)
        headers = {"X-Request-Timeout": "0.05"}
        waiting, answer, _ = await ask(session, VLLM, vllm_body(5), headers=headers)
        status, partial, _ = await running
        bad, _, _ = await ask(session, VLLM, vllm_body(5), headers={"X-Request-Timeout": "x"})
        await until(lambda: replica.cancelled == 1)
        assert gw.status().waiting == 0
    assert (waiting, status, bad) == (504, 504, 400)
    assert answer["error"]["type"] == "GatewayTimeoutError"
    assert "2 tokens so far" in partial["error"]["message"]


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
            async with asyncio.timeout(PATIENCE_S):
                while stats.slow_readers < len(readers):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            # Their turns are done and kept: nothing was generated for nothing.
            _, whole, _ = await ask(session, VLLM, vllm_body(TOKENS, request_id="whole"))
        finally:
            for reader in readers:
                reader.close()
    assert status == 200
    assert len(whole["choices"][0]["token_ids"]) == TOKENS
    assert len(replica.requests) == 3


async def test_what_the_gateway_holds_for_a_slow_reader_is_bounded() -> None:
    async with (
        StandInReplica() as replica,
        gateway_with(entry(replica, "guest-0"), slow_reader_s=20) as gw,
    ):
        reader = await _slow_reader(gw, vllm_body(TOKENS, request_id="slow", stream=True))
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not gw.stats.turns:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
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
