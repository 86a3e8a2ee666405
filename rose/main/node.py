"""`rose node --config FILE`: run a node daemon until it is told to stop.

With `--discover DIR` it guards up to eight hosts whose pages are in that folder.

SIGTERM, SIGINT  drain, end the guests, exit
SIGUSR1          set the kill switch: guests end at once and stay away until `rose unkill RUN_DIR`
SIGKILL          guests freeze, and end themselves unless the next daemon adopts them in time
"""

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from executor import PageError
from executor.control_page.page import on_disk
from rose.command_line.parser import Parser
from rose.errors import ConfigError, RefusedError, RoseError
from rose.logs.process_log import add_logging_options, complain, start_logging
from rose.node.config import NodeConfig
from rose.node.daemon import NodeDaemon
from rose.process.background_tasks import run_fairly
from rose.process.filelock import HeldFile
from rose.process.http_port import raise_descriptor_limit

STANDBY_POLL_S = 0.05
EXIT_BAD_INPUT, EXIT_INTERRUPTED = 2, 130

_logger = logging.getLogger("rose.node")


def parser(prog: str = "rose node") -> Parser:
    """Return the command-line parser of `rose node`."""
    parser = Parser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="the node's JSON file")
    what = "find the hosts of this machine in a folder that they share (their ROSE_HOST_DIR)"
    parser.add_argument("--discover", type=Path, metavar="DIR", help=what)
    what = "wait until the daemon that runs this node ends, then adopt its guests"
    parser.add_argument("--standby", action="store_true", help=what)
    add_logging_options(parser)
    return parser


def main(argv: Sequence[str] | None = None, config: type[NodeConfig] = NodeConfig) -> int:
    """Run a node daemon until it is told to stop; return the exit code: 0, 2 after one line for bad
    input, 130 for Ctrl-C.

    config: class that reads the node's file.
    """
    try:
        args = parser().parse_args(argv)
        start_logging("node", sys.argv[1:] if argv is None else argv)
        raise_descriptor_limit()
        # A peer that keeps the loop busy must not keep the guard's thread waiting.
        run_fairly(_run(config.load(args.config, args.discover), standby=args.standby))
    except (RoseError, PageError) as error:
        complain("rose node", error)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


RUN_DIR_ON_DISK = (
    "run_dir %s is on a disk: while the disk hangs, `rose kill` waits and guests freeze; give a"
    " folder in memory, beside the control page, and weights_dir on the disk"
)


async def _run(config: NodeConfig, *, standby: bool) -> None:
    # A collection of all imported objects takes longer than a tick of the guard.
    gc.freeze()
    # Another user may have made it, if its parent is open to all, as /dev/shm is.
    if config.run_dir.is_dir() and config.run_dir.stat().st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"run_dir {config.run_dir} is another user's; remove it or give another")
    if (config.host or config.discover) and on_disk(config.run_dir):
        _logger.warning(RUN_DIR_ON_DISK, config.run_dir)
    # Held while this process lives: two daemons would both write the grant.
    lock = await _own(config.run_dir / "daemon.lock", patient=standby)
    daemon = NodeDaemon(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stop)
    # Handle it outside of the loop: a loop that is stuck in a callback must still obey.
    signal.signal(signal.SIGUSR1, lambda *_: daemon.kill())
    try:
        await daemon.run()
    finally:
        lock.close()


async def _own(path: Path, *, patient: bool) -> HeldFile:
    told = False
    while True:
        try:
            return HeldFile.take(path)
        except RefusedError as error:
            if not patient:
                raise
            if not told:
                _logger.info("stands by: %s", error)
                told = True
            await asyncio.sleep(STANDBY_POLL_S)


if __name__ == "__main__":
    sys.exit(main())
