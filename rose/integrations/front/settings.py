"""Settings of `rose front` and `rose publish`, as options; the trainer's are also `ROSE_*`."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.addresses import check_exposure
from rose.command_line.parser import Parser, add_insecure
from rose.errors import ConfigError
from rose.integrations.settings import PREFIX, TrainerSettings
from rose.logs.process_log import add_logging_options
from rose.security.certificates import add_certificate_options
from rose.security.roles import Role
from rose.security.tokens import AUDIENCE

MOST_RANKS = 1_024


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Settings of `rose front`; times in seconds.

    weights_roots: folders below which checkpoints are read. marker: name of the file that says a
    folder is whole. whole_s: wait for a folder that is still being written. silent_s: time without
    a byte of the gateway's answer after which it is given up. tp_size, pp_size: reported to
    trainers, as of one engine.
    """

    port: int
    trainer: TrainerSettings
    weights_roots: tuple[Path, ...]
    host: str = "127.0.0.1"
    marker: str | None = None
    whole_s: float = 30.0
    silent_s: float = 3_600.0
    tp_size: int = 1
    pp_size: int = 1
    max_connections: int | None = None
    insecure: bool = False
    token_keys: Path | None = None
    token_audience: str = AUDIENCE

    def __post_init__(self) -> None:
        certificates = self.trainer.certificates()
        if certificates is None:
            what = "publish any folder below --weights-root as the job's weights, and use replicas"
            check_exposure(self.host, self.insecure, what)
        else:
            certificates.insist(Role.TRAINER)
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"--port is {self.port}; give one from 0 to 65535")
        if not 0 < self.silent_s < math.inf or not 0 <= self.whole_s < math.inf:
            raise ConfigError("--silent-s, --whole-s: seconds, above 0 the first")
        if not (1 <= self.tp_size <= MOST_RANKS and 1 <= self.pp_size <= MOST_RANKS):
            raise ConfigError(f"--tp-size, --pp-size: from 1 to {MOST_RANKS}")
        if self.max_connections is not None and self.max_connections < 1:
            raise ConfigError("--max-connections: at least 1")
        checked_marker(self.marker)


def checked_marker(marker: str | None) -> str | None:
    """Return `marker` if it is a file's name or None. Raises ConfigError for a path."""
    if marker is not None and (not marker or "/" in marker or "\0" in marker):
        raise ConfigError(f"--marker {marker!r:.80}: give the name of a file, as STABLE")
    return marker


def front_parser(prog: str = "rose front") -> Parser:
    """Return the command-line parser of `rose front`."""
    parser = Parser(prog, description="Answer the control calls of vLLM and SGLang for a trainer.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    add_insecure(parser)
    parser.add_argument(
        "--token-keys", type=Path, metavar="FILE", help="public keys: callers bear tokens"
    )
    parser.add_argument("--token-audience", default=AUDIENCE, metavar="NAME", help=AUDIENCE)
    parser.add_argument(
        "--weights-root",
        dest="weights_roots",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="checkpoints are read below it alone; several",
    )
    parser.add_argument("--marker", metavar="NAME", help="file that says a folder is whole: STABLE")
    parser.add_argument(
        "--whole-s", type=float, default=30.0, help="how long one is waited for (default 30)"
    )
    parser.add_argument(
        "--silent-s", type=float, default=3_600.0, help="of the gateway's answers (default 3600)"
    )
    parser.add_argument("--tp-size", type=int, default=1, help="ranks that it says it has")
    parser.add_argument("--pp-size", type=int, default=1)
    parser.add_argument("--max-connections", type=int)
    add_trainer_options(parser)
    add_logging_options(parser)
    return parser


def parse_front(argv: Sequence[str]) -> FrontSettings:
    """Return settings from the words of a `rose front` command line.

    Raises ConfigError with what to correct.
    """
    options = vars(front_parser().parse_args(argv))
    trainer = taken_trainer(options)
    roots = tuple(options.pop("weights_roots"))
    return FrontSettings(trainer=trainer, weights_roots=roots, **options)


_TRAINER: dict[str, tuple[str, type, str, str]] = {
    "job": ("--job", str, "JOB", "whose weights these are"),
    "scheduler": ("--scheduler", str, "HOST:PORT", "several with commas"),
    "gateway": ("--gateway", str, "URL", "which says who serves what"),
    "checkpoint": ("--checkpoint", Path, "DIR", "what replicas start with: version 0"),
    "root": ("--root", Path, "DIR", "of published versions; with it a restart goes on"),
    "signing_key": ("--signing-key", Path, "FILE", "the job's, of `rose token key`"),
    "publish_host": ("--publish-host", str, "HOST", "where nodes fetch versions"),
    "publish_port": ("--publish-port", int, "N", "any free port without it"),
    "max_staleness": ("--max-staleness", int, "N", "versions that turns may lag"),
    "replicas": ("--replicas", int, "N", "so many serve a version before it is in force"),
    "timeout_s": ("--timeout-s", float, "S", "bound of each wait"),
    "token_file": ("--token-file", Path, "FILE", "shown to gateways that ask for tokens"),
}
_FIELDS = {"signing_key": "key", "publish_host": "host", "publish_port": "port"}


def add_trainer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a trainer's connection to ROSE to a parser; `taken_trainer` reads them."""
    group = parser.add_argument_group("job", f"each may be {PREFIX}* in the environment instead")
    for name, (option, kind, shown, what) in _TRAINER.items():
        group.add_argument(option, dest=name, type=kind, metavar=shown, help=what)
    group.add_argument(
        "--take-over", action="store_true", default=None, help="replace a trainer that still runs"
    )
    add_certificate_options(parser)


def taken_trainer(options: dict[str, Any]) -> TrainerSettings:
    """Remove the options of `add_trainer_options` from parsed options; return them as settings,
    with `ROSE_*` variables for those not given.

    Raises ConfigError.
    """
    given = {_FIELDS.get(name, name): options.pop(name) for name in _TRAINER}
    given["take_over"] = options.pop("take_over")
    given["ca"], given["certificate"] = options.pop("ca"), options.pop("certificate")
    given["certificate_key"] = options.pop("key")
    return TrainerSettings.from_env(
        **{name: value for name, value in given.items() if value is not None}
    )
