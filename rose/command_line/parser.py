"""Parser of command lines: errors are one line, with the nearest known word for a typo."""

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from rose.command_line.examples import examples_of
from rose.errors import ConfigError
from rose.logs.rotating_jsonl import BOUNDED, LogLimits

_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """Argument parser that raises `ConfigError` with one line instead of printing a usage page and
    exiting.

    Its help ends with examples of the command.
    """

    def add_commands(self) -> "argparse._SubParsersAction[Parser]":
        """Add a required command; return the action to which its commands are added."""
        return self.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def format_help(self) -> str:
        return super().format_help() + examples_of(self.prog)

    def parse_known_args(  # type: ignore[override]  # argparse's overloads tell apart namespaces
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the words; return options and leftover words.

        Raises ConfigError, first for an unknown option: its value would be taken for a command.
        """
        for word in args or ():
            option = word.partition("=")[0]
            if word == "--":
                break
            if word.startswith("--") and not any(o.startswith(option) for o in _options(self)):
                self.error(f"unrecognized arguments: {option}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with argparse's message, the nearest known word, and --help."""
        raise ConfigError(f"{self._explained(message)}; see `{self.prog} --help`")

    def _explained(self, message: str) -> str:
        choice = _CHOICE.search(message)
        if choice:
            word, known = choice[1], re.findall(r"[\w-]+", choice[2])
            hint = nearest(word, known) or f"; choose from {', '.join(known)}"
            return f"there is no {word!r}{hint}"
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            word = unknown.split()[0].partition("=")[0]
            what = "option" if word.startswith("-") else "argument"
            return f"unknown {what} {word!r}{nearest(word, _options(self))}"
        return message


def add_insecure(parser: argparse.ArgumentParser) -> None:
    """Add `--insecure`, which allows a port of the network without authentication."""
    what = "serve an address of the network, though nobody is asked who he is"
    parser.add_argument("--insecure", action="store_true", help=what)


def add_metrics_options(parser: argparse.ArgumentParser, host: str = "address of") -> None:
    """Add --metrics-port and --metrics-host to a parser. host: beginning of the latter's help."""
    what = "serve /metrics there (default: nowhere)"
    parser.add_argument("--metrics-port", type=int, metavar="N", help=what)
    what = f"{host} /metrics (default: loopback; others over TLS, or with --insecure)"
    parser.add_argument("--metrics-host", default="127.0.0.1", metavar="HOST", help=what)


def check_metrics_port(port: int | None) -> None:
    """Raise ConfigError for a port outside 1 to 65535; None, for no metrics, is allowed."""
    if port is not None and not 0 < port < 1 << 16:
        raise ConfigError(f"metrics port {port} does not exist; give 1 to 65535")


def add_log_limits(parser: argparse.ArgumentParser) -> None:
    """Add --log-file-bytes and --log-files to a parser; `taken_log_limits` reads them."""
    parser.add_argument(
        "--log-file-bytes",
        type=int,
        default=BOUNDED.file_bytes,
        metavar="N",
        help=f"of each log file, 0 for no limit (default {BOUNDED.file_bytes})",
    )
    what = f"files kept of each log (default {BOUNDED.files})"
    parser.add_argument("--log-files", type=int, default=BOUNDED.files, metavar="N", help=what)


def taken_log_limits(options: dict[str, Any]) -> LogLimits:
    """Remove the options of `add_log_limits` from parsed options; return them as limits.

    Raises ConfigError for useless ones.
    """
    file_bytes, files = options.pop("log_file_bytes"), options.pop("log_files")
    return LogLimits(file_bytes or None, files)


_UNITS_S: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def duration_s(text: str) -> float:
    """Return the seconds of a text such as `90s`, `15m`, `1h` or `30d`; a type for argparse."""
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give 90s, 15m, 1h or 30d")
    return float(int(match[1]) * _UNITS_S[match[2]])


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """Return the option strings of a parser and of all its commands."""
    options = list(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                options += _options(child)
    return options


def nearest(word: str, known: list[str]) -> str:
    """Return ` (did you mean 'x'?)` with the known word nearest to `word`; "" if none is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""
