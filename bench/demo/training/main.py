"""`python -m bench.demo.training.main --config FILE`: the trainer process of the demo.

stdin   {"cmd":"start"}, then perhaps {"cmd":"finish"}
stdout  ready, eval, step …, eval, done; or error with a message
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.demo.faulty_trainer import CorruptPublisher, LossyJournal
from bench.demo.training.forward import load_version_zero
from bench.demo.training.trainer import BasePublisher, DemoTrainer, TrainConfig
from rose.client import RolloutClient, RolloutError
from rose.errors import RoseError
from rose.security.keys import signing_key
from rose.weight_distribution import WeightPublisher


def say(event: dict[str, Any]) -> None:
    """One event to whoever started us."""
    sys.stdout.write(json.dumps(event, separators=(",", ":")) + "\n")
    sys.stdout.flush()


async def commands() -> asyncio.StreamReader:
    """Standard input as a stream."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


async def train(config: TrainConfig) -> None:
    """The whole process."""
    torch.set_num_threads(config.torch_threads)
    stdin = await commands()
    corrupt = config.control == "corrupt-chunk"
    publisher = (CorruptPublisher if corrupt else WeightPublisher)(
        config.job,
        config.scheduler,
        config.publish_root,
        config.publish_port,
        signing_key(config.key),
    )
    async with RolloutClient(config.gateway_url, job=config.job) as client, publisher:
        if config.shared:
            await publish_model(publisher, config)
        source = LossyJournal(client) if config.control == "drop-token" else client
        trainer = DemoTrainer(config, source, publisher, say)
        say({"event": "ready"})
        if not await stdin.readline():
            return
        listening = asyncio.create_task(_listen(stdin, trainer))
        try:
            await trainer.run()
        finally:
            listening.cancel()
        if config.shared:
            # Whoever trains on has the guest for itself from now on.
            await publisher.end_job()


async def publish_model(publisher: BasePublisher, config: TrainConfig) -> None:
    """Publish the model as the first version, with a base that leads to it from any other job's."""
    model = load_version_zero(config.model_dir)
    await publisher.publish_base(0, model)
    await publisher.publish(config.first_version, 0, model, model)


async def _listen(stdin: asyncio.StreamReader, trainer: DemoTrainer) -> None:
    while line := await stdin.readline():
        if json.loads(line).get("cmd") == "finish":
            trainer.cut()


def main(argv: Sequence[str] | None = None) -> int:
    """Train until told to finish; what goes wrong is an event, and exit code 2."""
    parser = argparse.ArgumentParser(prog="bench.demo.training.main", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        asyncio.run(train(TrainConfig.read(args.config)))
    except (RoseError, RolloutError) as error:
        say({"event": "error", "message": str(error)})
        return 2
    except Exception as error:
        # A bug: whoever started us learns of it at once, its traceback goes to the log.
        say({"event": "error", "message": f"the trainer broke, see its log: {error!r}"})
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
