"""`python -m bench.load.generator --config FILE`: the load generator process.

Load generator: plays segments of arrivals against one host, in an open loop.
"""

import argparse
import asyncio
import hashlib
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import aiohttp
import msgspec
from pydantic import ValidationError

from bench.load.protocol import (
    Arrival,
    ClientRequest,
    LoadCommand,
    LoadConfig,
    Paced,
    Stats,
    Traffic,
    generate_segment,
    make_prompt,
    rescale_trace,
    trace_segment,
)
from rose.azure_trace import read_trace
from rose.errors import BAD_BYTES, RoseError

_USAGE = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')
_DONE = b"data: [DONE]"
# The usage message and the end mark together are about 400 bytes.
_TAIL_BYTES = 2_048
# Requests sent one after another to learn how long the host takes for one; the first warm it up.
PACE_WARM_UP, PACE_REQUESTS = 3, 12
STATS_PERIOD_S = 1.0
# vLLM's server closes idle connections after 5 s; let go of them first.
KEEPALIVE_S = 2.0
MAX_COMMAND_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class Completion:
    """Result of one request; `status` is `ok` or says what went wrong."""

    status: str
    ttft_s: float | None
    e2e_s: float
    output_tokens: int
    output_digest: str | None = None


class CompletionBody(msgspec.Struct, frozen=True):
    """Body posted to `/v1/completions`."""

    model: str
    prompt: list[int]
    max_tokens: int
    temperature: float = 0.0
    # The arrivals fix the length of every answer; the model must not end it early.
    ignore_eos: bool = True
    stream: bool = True
    stream_options: dict[str, bool] = msgspec.field(default_factory=lambda: {"include_usage": True})
    return_token_ids: bool = False
    # SGLang's name for a request's id.
    rid: str | msgspec.UnsetType = msgspec.UNSET


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


_CHUNK = msgspec.json.Decoder(_Chunk)


def _digest(stream: bytes) -> str:
    """Return name of the tokens that a stream of chunks carried."""
    tokens: list[int] = []
    for line in stream.split(b"\n\n"):
        if line.startswith(b"data: {"):
            for choice in _CHUNK.decode(line[len(b"data: ") :]).choices:
                tokens += choice.token_ids or ()
    return hashlib.blake2b(repr(tokens).encode(), digest_size=8).hexdigest()


async def _stream(
    response: aiohttp.ClientResponse, whole: bytearray | None
) -> tuple[float | None, bytes]:
    """Return (clock at the first chunk or None, last bytes); `whole` takes the stream."""
    first_s = None
    tail = b""
    async for data in response.content.iter_any():
        if first_s is None:
            first_s = time.monotonic()
        if whole is not None:
            whole += data
        tail = data[-_TAIL_BYTES:] if len(data) >= _TAIL_BYTES else (tail + data)[-_TAIL_BYTES:]
    return first_s, tail


async def complete(
    session: aiohttp.ClientSession,
    url: str,
    body: CompletionBody,
    request_id: str,
    arrival_s: float,
    secret: Mapping[str, str] = MappingProxyType({}),
) -> Completion:
    """Post one completion; times count from `arrival_s`, when it should have been sent.

    `secret`: headers that the engine asks for, where it is one's own guest.

    Never raises for what a host can do wrong: that becomes the status.
    """
    first_s: float | None = None
    tokens = 0
    kept = bytearray() if body.return_token_ids else None
    headers = {"X-Request-Id": request_id, "Content-Type": "application/json", **secret}
    try:
        async with session.post(url, data=msgspec.json.encode(body), headers=headers) as response:
            if response.status != 200:
                status = f"http_{response.status}"
            else:
                first_s, tail = await _stream(response, kept)
                usage = _USAGE.search(tail)
                tokens = int(usage[1]) if usage else 0
                whole = _DONE in tail and tokens == body.max_tokens
                status = "ok" if whole else "broken"
    except TimeoutError:
        status = "timeout"
    except aiohttp.ClientError as error:
        status = f"client_{type(error).__name__}"
    end_s = time.monotonic()
    ttft_s = None if first_s is None else first_s - arrival_s
    # Chunks are parsed once nothing is measured any more.
    digest = _digest(bytes(kept)) if kept and status == "ok" else None
    return Completion(status, ttft_s, end_s - arrival_s, tokens, digest)


SegmentSource = Callable[[int], Sequence[Arrival]]


def segment_source(
    config: LoadConfig, rate_per_s: float | None = None, traffic: Traffic | None = None
) -> SegmentSource:
    """Return the function from a segment's number to its arrivals.

    Without `traffic` it is the configured trace, or else bursts. Raises RoseError for a trace that
    is missing or malformed.
    """
    traffic = traffic or ("trace" if config.trace else "bursty")
    shape = config.shape(rate_per_s, traffic)
    if traffic != "trace":
        return lambda segment: generate_segment(shape, config.seed, segment)
    if config.trace is None:
        raise RoseError("the load was started without a trace; name one in its configuration")
    rescaled = rescale_trace(read_trace(config.trace), shape)
    return lambda segment: trace_segment(rescaled, config.segment_s, segment)


class LoadGenerator:
    """Plays segments against one host and records every request."""

    def __init__(
        self,
        config: LoadConfig,
        session: aiohttp.ClientSession,
        records: BinaryIO,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.stats = Stats()
        self._tasks = tasks
        self._config = config
        self._session = session
        self._records = records
        self._arrivals = segment_source(config)
        self._url = f"{config.url}/v1/completions"
        self._outstanding: set[asyncio.Task[None]] = set()
        self._player: asyncio.Task[None] | None = None
        self._encoder = msgspec.json.Encoder()

    async def pace(self, busy: float) -> Paced:
        """Choose the mean rate that keeps the host busy for about `busy` of the time.

        Fast and slow machines get the same experiment. Batching makes bursts cheaper than lone
        requests, so the host ends a little below. Raises RoseError when the host answers wrongly.
        """
        prompt_tokens, output_tokens = self._config.shape().typical_tokens
        taken_s = []
        for index in range(PACE_WARM_UP + PACE_REQUESTS):
            prompt = make_prompt(self._config, LoadCommand("pace", block=-1), index, prompt_tokens)
            body = CompletionBody(self._config.model, prompt, output_tokens)
            name, now_s = f"pace{index}", time.monotonic()
            result = await complete(self._session, self._url, body, name, now_s)
            if result.status != "ok":
                raise RoseError(f"the host failed a first request: {result.status}; see its log")
            taken_s.append(result.e2e_s)
        request_s = statistics.median(taken_s[PACE_WARM_UP:])
        rate_per_s = busy / request_s
        self._arrivals = segment_source(self._config, rate_per_s)
        return Paced(request_s, rate_per_s)

    def play(self, command: LoadCommand) -> None:
        """Start a segment from its beginning, in place of the one that is playing."""
        self.stop()
        if command.rate_per_s is not None or command.traffic is not None:
            self._arrivals = segment_source(self._config, command.rate_per_s, command.traffic)
        self._player = self._tasks.create_task(self._play(command, time.monotonic()))

    def stop(self) -> None:
        """Send nothing more; requests that are out run to their end."""
        if self._player is not None:
            self._player.cancel()
            self._player = None
        self._records.flush()

    async def close(self) -> None:
        """Stop, and give outstanding requests `drain_s` to end; the rest becomes `abandoned`."""
        self.stop()
        if self._outstanding:
            _, late = await asyncio.wait(self._outstanding, timeout=self._config.drain_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        self._records.flush()

    async def _play(self, command: LoadCommand, start_s: float) -> None:
        """Send each arrival when it is due; past its end a segment starts over."""
        arrivals = self._arrivals(command.segment)
        sent = 0
        while arrivals:
            lap_s = (sent // len(arrivals)) * self._config.segment_s
            arrival = arrivals[sent % len(arrivals)]
            offset_s = round(lap_s + arrival.offset_s, 6)
            delay_s = start_s + offset_s - time.monotonic()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            self._send(command, sent, arrival, offset_s, start_s + offset_s)
            sent += 1

    def _send(
        self, command: LoadCommand, index: int, arrival: Arrival, offset_s: float, arrival_s: float
    ) -> None:
        """Start one request, or record it as dropped when too many are out."""
        record = ClientRequest(
            request_id=f"b{command.block}s{command.segment}n{index}",
            block=command.block,
            arm=command.arm,
            segment=command.segment,
            offset_s=offset_s,
            arrival_s=arrival_s,
            ttft_s=None,
            e2e_s=None,
            output_tokens=0,
            status="dropped",
        )
        self.stats.sent += 1
        if len(self._outstanding) >= self._config.max_outstanding:
            self._finish(record, None)
            return
        prompt = make_prompt(self._config, command, index, arrival.prompt_tokens)
        body = CompletionBody(
            self._config.model,
            prompt,
            arrival.output_tokens,
            return_token_ids=self._config.digest,
            rid=record.request_id if self._config.id_in_body else msgspec.UNSET,
        )
        task = self._tasks.create_task(self._request(record, body))
        self._outstanding.add(task)
        task.add_done_callback(self._outstanding.discard)

    async def _request(self, record: ClientRequest, body: CompletionBody) -> None:
        arrival_s = record.arrival_s
        try:
            result = await complete(self._session, self._url, body, record.request_id, arrival_s)
        except asyncio.CancelledError:
            waited_s = time.monotonic() - arrival_s
            self._finish(record, Completion("abandoned", None, waited_s, 0))
            raise
        self._finish(record, result)

    def _finish(self, record: ClientRequest, result: Completion | None) -> None:
        if result is not None:
            record = msgspec.structs.replace(
                record,
                status=result.status,
                ttft_s=result.ttft_s,
                e2e_s=result.e2e_s,
                output_tokens=result.output_tokens,
                output_digest=result.output_digest,
            )
        self.stats.done += 1
        self.stats.errors += record.status != "ok"
        self._records.write(self._encoder.encode(record) + b"\n")


def _say(message: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


async def _open_stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=MAX_COMMAND_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def _obey(generator: LoadGenerator, commands: asyncio.StreamReader) -> None:
    """Carry out commands until `quit` or the end of input."""
    decoder = msgspec.json.Decoder(LoadCommand)
    while line := await commands.readline():
        try:
            command = decoder.decode(line)
        except BAD_BYTES as error:
            raise RoseError(f"load: not a command: {line!r}: {error}") from error
        if command.cmd == "pace":
            _say(await generator.pace(command.busy))
        elif command.cmd == "segment":
            generator.play(command)
        elif command.cmd == "off":
            generator.stop()
        else:
            return


async def _report(stats: Stats) -> None:
    while True:
        await asyncio.sleep(STATS_PERIOD_S)
        _say(stats)


async def serve(config: LoadConfig) -> None:
    """Run the process until stdin ends. Raises `RoseError` for a line that is no command."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    timeout = aiohttp.ClientTimeout(total=config.timeout_s)
    problem: RoseError | None = None
    with config.out.open("ab") as records:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            asyncio.TaskGroup() as tasks,
        ):
            generator = LoadGenerator(config, session, records, tasks)
            commands = await _open_stdin()
            _say({"event": "ready"})
            reporter = tasks.create_task(_report(generator.stats))
            try:
                await _obey(generator, commands)
            except RoseError as error:
                problem = error
            reporter.cancel()
            await generator.close()
            _say(generator.stats)
    if problem is not None:
        raise problem


def main(argv: Sequence[str] | None = None) -> int:
    """Play load until standard input ends; 2 when the configuration or a command is bad."""
    parser = argparse.ArgumentParser(
        prog="bench.load.generator", description="Load the host in bursts."
    )
    parser.add_argument("--config", type=Path, required=True)
    path: Path = parser.parse_args(argv).config
    try:
        config = LoadConfig.model_validate_json(path.read_bytes())
        asyncio.run(serve(config))
    except (OSError, ValidationError, RoseError) as error:
        _say({"event": "error", "message": str(error)})
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
