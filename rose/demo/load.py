"""The load generator process: an open loop of bursty requests to the host.

    stdin   {"cmd":"pace","busy":0.4}                         measure the host, set the rate
            {"cmd":"segment","segment":k,"block":b,"arm":a}   play segment k from its start
            {"cmd":"off"}                                     send nothing more
            {"cmd":"quit"}, or end of input                   finish and exit
    stdout  {"event":"ready"}  {"event":"paced","request_s","mean_rate_per_s"}
            {"event":"stats","sent","done","errors"}  {"event":"error","message"}

Open loop: a request leaves when it is due, whatever became of the ones before. What exceeds the
bound on outstanding requests is recorded as `dropped`, an error.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import aiohttp
import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rose.demo.arrivals import (
    Arrival,
    LoadShape,
    generate_segment,
    rescale_trace,
    trace_segment,
)
from rose.demo.host_client import Completion, CompletionBody, complete
from rose.demo.records import ClientRequest
from rose.demo.trace import read_trace
from rose.errors import RoseError

STATS_PERIOD_S = 1.0
# vLLM's server closes idle connections after 5 s; let go of them first.
KEEPALIVE_S = 2.0
MAX_COMMAND_BYTES = 4_096
# Requests sent one after another to learn how long the host takes for one; the first warm it up.
PACE_WARM_UP, PACE_REQUESTS = 3, 12


class LoadConfig(BaseModel):
    """The file named by `--config`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    model: str
    out: Path
    seed: int = 0
    trace: Path | None = None
    mean_rate_per_s: float = Field(default=4.0, gt=0)
    segment_s: float = Field(default=15.0, gt=0)
    max_prompt_tokens: int = Field(default=96, ge=8)
    max_output_tokens: int = Field(default=16, ge=4)
    token_ids: tuple[int, int] = (3, 250)
    max_outstanding: int = Field(default=128, ge=1, le=4_096)
    timeout_s: float = Field(default=30.0, gt=0)
    drain_s: float = Field(default=5.0, ge=0)

    def shape(self, mean_rate_per_s: float | None = None) -> LoadShape:
        """The load these numbers describe, at another rate if one is given."""
        return LoadShape(
            mean_rate_per_s=mean_rate_per_s or self.mean_rate_per_s,
            segment_s=self.segment_s,
            max_prompt_tokens=self.max_prompt_tokens,
            max_output_tokens=self.max_output_tokens,
        )


class Command(msgspec.Struct, frozen=True):
    """A line of stdin."""

    cmd: Literal["pace", "segment", "off", "quit"]
    busy: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.4
    segment: int = 0
    block: int = 0
    arm: str = ""


class Stats(msgspec.Struct, tag_field="event", tag="stats"):
    """Requests since the start; `errors` counts everything that did not end `ok`."""

    sent: int = 0
    done: int = 0
    errors: int = 0


class Paced(msgspec.Struct, tag_field="event", tag="paced", frozen=True):
    """What pacing found: seconds that a lone request takes, and the rate that follows."""

    request_s: float
    mean_rate_per_s: float


def segment_source(config: LoadConfig, shape: LoadShape) -> Callable[[int], Sequence[Arrival]]:
    """The function from a segment's number to its arrivals."""
    if config.trace is None:
        return lambda segment: generate_segment(shape, config.seed, segment)
    rescaled = rescale_trace(read_trace(config.trace), shape)
    return lambda segment: trace_segment(rescaled, config.segment_s, segment)


def make_prompt(config: LoadConfig, command: Command, index: int, prompt_tokens: int) -> list[int]:
    """Token ids that differ between blocks.

    Were they equal, the second arm of a pair would find the first one's prefixes cached.
    """
    name = f"{config.seed}/{command.block}/{command.segment}/{index}"
    rng = random.Random(name)  # noqa: S311 - a load, not a secret
    return rng.choices(range(*config.token_ids), k=prompt_tokens)


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
        self._arrivals = segment_source(config, config.shape())
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
            prompt = make_prompt(self._config, Command("pace", block=-1), index, prompt_tokens)
            body = CompletionBody(self._config.model, prompt, output_tokens)
            name, now_s = f"pace{index}", time.monotonic()
            result = await complete(self._session, self._url, body, name, now_s)
            if result.status != "ok":
                raise RoseError(f"the host failed a first request: {result.status}; see its log")
            taken_s.append(result.e2e_s)
        request_s = statistics.median(taken_s[PACE_WARM_UP:])
        rate_per_s = busy / request_s
        self._arrivals = segment_source(self._config, self._config.shape(rate_per_s))
        return Paced(request_s, rate_per_s)

    def play(self, command: Command) -> None:
        """Start a segment from its beginning, in place of the one that is playing."""
        self.stop()
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

    async def _play(self, command: Command, start_s: float) -> None:
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
        self, command: Command, index: int, arrival: Arrival, offset_s: float, arrival_s: float
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
        body = CompletionBody(self._config.model, prompt, arrival.output_tokens)
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
    decoder = msgspec.json.Decoder(Command)
    while line := await commands.readline():
        try:
            command = decoder.decode(line)
        except msgspec.DecodeError as error:
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
    """Entry point of `python -m rose.demo.load`; 2 when the configuration or a command is bad."""
    parser = argparse.ArgumentParser(prog="rose.demo.load", description="Load the host in bursts.")
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
