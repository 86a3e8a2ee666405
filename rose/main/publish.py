"""Command line of the watcher: `rose publish --watch DIR …`."""

import signal
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rose.command_line.parser import Parser
from rose.errors import ConfigError, RefusedError, UnavailableError
from rose.integrations.front.settings import add_trainer_options, checked_marker, taken_trainer
from rose.integrations.front.watch import CheckpointWatcher, Noted
from rose.integrations.policy_publisher import PolicyPublisher
from rose.logs.process_log import add_logging_options, announce, start_logging

_say = partial(announce, "rose publish")
LOOK_S = 0.5
MOST_PAUSE_S = 30.0


def parser(prog: str = "rose publish") -> Parser:
    """Return the command-line parser of `rose publish`."""
    parser = Parser(prog, description="Publish the checkpoints that a trainer saves.")
    parser.add_argument(
        "--watch", type=Path, required=True, metavar="DIR", help="holds step_N, checkpoint-N, …"
    )
    parser.add_argument(
        "--inside", default="", metavar="PATH", help="where in a step the weights are"
    )
    parser.add_argument("--marker", metavar="NAME", help="file that says a step is whole: STABLE")
    parser.add_argument("--settled-s", type=float, default=2.0, help="without a marker (default 2)")
    parser.add_argument("--once", action="store_true", help="end after the newest one")
    parser.add_argument(
        "--whole-s", type=float, default=30.0, help="how long --once waits (default 30)"
    )
    add_trainer_options(parser)
    add_logging_options(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Publish new checkpoints until SIGTERM or SIGINT, or with --once the newest one; return 0.

    Raises RoseError with one line.
    """
    start_logging("publish", argv)
    options = vars(parser().parse_args(argv))
    settings = taken_trainer(options)
    checked_marker(options["marker"])
    state = settings.root.with_name(settings.root.name + ".watched.json")
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    with PolicyPublisher(settings) as publisher:
        watcher = CheckpointWatcher(
            publisher,
            options["watch"],
            state,
            inside=options["inside"],
            marker=options["marker"],
            settled_s=options["settled_s"],
            say=_say,
        )
        _say(f"watching {options['watch']} for job {settings.job}, at version {publisher.version}")
        if options["once"]:
            _once(watcher, options["whole_s"], stop)
        else:
            _always(watcher, stop)
    return 0


def _always(watcher: CheckpointWatcher, stop: threading.Event) -> None:
    pause_s = LOOK_S
    while not stop.wait(pause_s):
        try:
            noted = watcher.step()
            pause_s = LOOK_S
        except UnavailableError as error:
            pause_s = min(2 * pause_s, MOST_PAUSE_S)
            _say(str(error))
        except RefusedError as error:
            _say(f"a checkpoint is left out: {error}")
        else:
            if noted is not None:
                _published(noted)


def _once(watcher: CheckpointWatcher, whole_s: float, stop: threading.Event) -> None:
    until_s = time.monotonic() + whole_s
    while not stop.is_set():
        noted = watcher.step()
        if noted is not None:
            _published(noted)
            return
        if watcher.last is not None and not watcher.waits:
            last = watcher.last
            _say(f"nothing is newer than {last.name}, which is version {last.version}")
            return
        if time.monotonic() >= until_s:
            why = f": {watcher.lacks}" if watcher.lacks else ""
            raise ConfigError(
                f"no whole checkpoint within {whole_s:g} s{why}; see --marker, --inside"
            )
        stop.wait(LOOK_S)


def _published(noted: Noted) -> None:
    _say(f"{noted.name} is version {noted.version}, and served")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
