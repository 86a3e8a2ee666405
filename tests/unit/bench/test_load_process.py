import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.harness.waiting import PATIENCE_S, until_async

StartHost = Callable[..., Awaitable["StandInHost"]]


class StandInHost:
    """Streams `max_tokens` chunks as vLLM's `/v1/completions` does, or does what `fault` says."""

    def __init__(self, fault: str | None = None, token_s: float = 0.0) -> None:
        self.fault = fault
        self.token_s = token_s
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.url = ""

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append((request.headers["X-Request-Id"], body))
        if self.fault == "busy":
            return web.json_response({"error": "busy"}, status=503)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(body["max_tokens"] if self.fault != "short" else 2):
            ids = ',"token_ids":[7]' if body["return_token_ids"] else ""
            chunk = f'data: {{"choices":[{{"text":"x"{ids}}}],"usage":null}}\n\n'
            await response.write(chunk.encode())
            await asyncio.sleep(self.token_s)
        if self.fault == "cut":
            assert request.transport is not None
            request.transport.abort()
            return response
        sent = 2 if self.fault == "short" else body["max_tokens"]
        usage = json.dumps({"choices": [], "usage": {"completion_tokens": sent}})
        await response.write(f"data: {usage}\n\ndata: [DONE]\n\n".encode())
        return response


@pytest.fixture
async def start_host() -> AsyncIterator[StartHost]:
    runners: list[web.AppRunner] = []

    async def start(**options: Any) -> StandInHost:
        host = StandInHost(**options)
        app = web.Application()
        app.router.add_post("/v1/completions", host.completions)
        runner = web.AppRunner(app, shutdown_timeout=0.05)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return host

    yield start
    for runner in runners:
        await runner.cleanup()


class LoadProcess:
    """`python -m bench.load.generator` as its parent sees it."""

    def __init__(self, host: StandInHost, folder: Path, **options: Any) -> None:
        self.out = folder / "client_requests.jsonl"
        config = {"url": host.url, "model": "host", "out": str(self.out)}
        config |= {"mean_rate_per_s": 150.0, "segment_s": 1.0, **options}
        self.config = folder / "load.json"
        self.config.write_text(json.dumps(config))

    async def run(
        self, *commands: dict[str, Any] | float | Callable[[], bool]
    ) -> tuple[int, list[dict[str, Any]]]:
        """Send commands, sleeping where a number stands, and until what stands there holds.

        Returns exit code and messages.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.load.generator", "--config", str(self.config)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        messages = [json.loads(await process.stdout.readline())]
        for command in commands:
            if isinstance(command, dict):
                process.stdin.write(json.dumps(command).encode() + b"\n")
                await process.stdin.drain()
            elif callable(command):
                await until_async(command, PATIENCE_S, "the load did as the test waits for")
            else:
                await asyncio.sleep(command)
        process.stdin.close()
        rest = await process.stdout.read()
        messages += [json.loads(line) for line in rest.splitlines()]
        return await process.wait(), messages

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()]


def segment(number: int, block: int, arm: str = "leased") -> dict[str, Any]:
    return {"cmd": "segment", "segment": number, "block": block, "arm": arm}


async def test_each_request_is_timed_from_when_it_was_due(
    start_host: StartHost, tmp_path: Path
) -> None:
    load = LoadProcess(await start_host(token_s=0.003), tmp_path)
    await load.run(segment(1, 1), 0.2, {"cmd": "quit"})
    for record in load.records():
        assert record["status"] == "ok"
        assert 0 < record["ttft_s"] < record["e2e_s"]
        assert record["e2e_s"] - record["ttft_s"] > 0.002 * (record["output_tokens"] - 1)
        assert 4 <= record["output_tokens"] <= 16


@pytest.mark.parametrize(
    ("fault", "status"), [("busy", "http_503"), ("short", "broken"), ("cut", "client_")]
)
async def test_whatever_the_host_does_wrong_is_recorded_as_an_error(
    start_host: StartHost, tmp_path: Path, fault: str, status: str
) -> None:
    load = LoadProcess(await start_host(fault=fault), tmp_path)
    code, messages = await load.run(segment(1, 1), 0.2, {"cmd": "quit"})
    records = load.records()
    assert code == 0
    assert records
    assert all(record["status"].startswith(status) for record in records)
    assert messages[-1]["errors"] == len(records)


async def test_the_loop_is_open_and_what_exceeds_its_bound_is_recorded(
    start_host: StartHost, tmp_path: Path
) -> None:
    load = LoadProcess(await start_host(token_s=5), tmp_path, max_outstanding=2, drain_s=0.05)
    _, messages = await load.run(segment(1, 1), 0.2, {"cmd": "quit"})
    statuses = [record["status"] for record in load.records()]
    assert statuses.count("abandoned") == 2
    assert statuses.count("dropped") == len(statuses) - 2 > 0
    assert messages[-1]["errors"] == len(statuses)


async def test_replayed_prompts_are_alike_in_every_block_and_answers_have_a_digest(
    start_host: StartHost, tmp_path: Path
) -> None:
    host = await start_host()
    load = LoadProcess(host, tmp_path, replay_prompts=True, digest=True)
    await load.run(segment(1, 1), 0.2, segment(1, 2), 0.2, {"cmd": "quit"})
    bodies = dict(host.seen)
    assert bodies["b1s1n0"]["prompt"] == bodies["b2s1n0"]["prompt"]
    digests = {(r["output_tokens"], r["output_digest"]) for r in load.records()}
    assert all(digest for _, digest in digests)
    # The stand-in says the same token over and over: one digest for each length.
    assert len(digests) == len({tokens for tokens, _ in digests})
