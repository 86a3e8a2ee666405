"""`rose node --config FILE`: run a node daemon until it is told to stop."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from executor import PageError
from rose.errors import RoseError
from rose.node.config import NodeConfig
from rose.node.daemon import NodeDaemon


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit code 2 with one line on bad input."""
    parser = argparse.ArgumentParser(prog="rose node", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the node's JSON file")
    args = parser.parse_args(argv)
    try:
        asyncio.run(_run(NodeConfig.load(args.config)))
    except (RoseError, PageError) as error:
        sys.stderr.write(f"rose node: {error}\n")
        return 2
    return 0


async def _run(config: NodeConfig) -> None:
    daemon = NodeDaemon(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stop)
    await daemon.run()


if __name__ == "__main__":
    sys.exit(main())
