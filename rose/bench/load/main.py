"""`python -m rose.bench.load.main --config FILE`: the load generator process (see rose.bench.load.protocol)."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import msgspec
from pydantic import ValidationError

from rose.bench.load.generator import LoadGenerator
from rose.bench.load.protocol import LoadCommand, LoadConfig, Stats
from rose.errors import BAD_BYTES, RoseError

STATS_PERIOD_S = 1.0
# vLLM's server closes idle connections after 5 s; let go of them first.
KEEPALIVE_S = 2.0
MAX_COMMAND_BYTES = 4_096


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
        prog="rose.bench.load.main", description="Load the host in bursts."
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
