"""Log of one process: text on standard error, or JSON lines on standard output for a collector.

    {"time":"2026-11-26T16:12:24.123Z","level":"warning","component":"gateway","logger":"asyncio","message":"…"}
    {"time":…,"level":"info","component":"scheduler","logger":"records.audit","event":"lease_granted","fields":{…}}

All loggers of the process go through it. With JSON the records of event, audit and usage logs are
repeated there at level info, since files of a pod are gone with it.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from typing_extensions import override

from rose.clock import utc_text
from rose.errors import ConfigError
from rose.logs.rotating_jsonl import LogThread

LEVELS: Final = ("debug", "info", "warning", "error")
FORMATS: Final = ("text", "json")
LEVEL_ENV: Final = "ROSE_LOG_LEVEL"
FORMAT_ENV: Final = "ROSE_LOG_FORMAT"
_RECORDS: Final = logging.getLogger("records")
# Records of log files are repeated with JSON alone.
_OFF: Final = logging.CRITICAL + 1
_RECORDS.setLevel(_OFF)


class AsideHandler(logging.Handler):
    """Log handler that passes records to another one in a thread: a full pipe stops no caller.

    Records beyond WAITING pending ones are dropped.
    """

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__()
        self._handler = handler
        self._thread = LogThread("rose-log")

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self._thread.put(lambda: self._handler.emit(record))

    @override
    def close(self) -> None:
        """Write the pending records, as far as the reader takes them within a second."""
        self._thread.close(1.0)
        super().close()


class JsonFormatter(logging.Formatter):
    """Formatter of log records as JSON objects, one a line. component: name of the process."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    @override
    def format(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, object] = getattr(record, "fields", {})
        said: dict[str, object] = {
            "time": fields.get("time") or utc_text(record.created),
            "level": record.levelname.lower(),
            "component": self._component,
            "logger": record.name,
        }
        if fields:
            rest = {name: value for name, value in fields.items() if name not in ("time", "event")}
            said |= {"event": fields.get("event", "usage"), "fields": rest}
        else:
            said["message"] = record.getMessage()
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        encoded = partial(json.dumps, separators=(",", ":"), default=str)
        try:
            return encoded(said, allow_nan=False)
        except ValueError:
            # A number that JSON lacks.
            return encoded(json.loads(encoded(said), parse_constant=str))


def repeat(log: str) -> Callable[[Mapping[str, object]], None]:
    """Return a function that repeats a record of a log file in the process's log, if that is JSON.

    log: last part of the logger's name, such as `audit`.
    """
    logger = logging.getLogger(f"{_RECORDS.name}.{log}")

    def write(record: Mapping[str, object]) -> None:
        if logger.isEnabledFor(logging.INFO):
            logger.info("record", extra={"fields": record})

    return write


class _ReadBefore(argparse.Action):
    """Option that `start_logging` reads before all others; parsed options do not have it."""

    def __call__(self, *_: object, **__: object) -> None:
        return


def add_logging_options(parser: argparse.ArgumentParser) -> None:
    """Add --log-level and --log-format to a parser; `start_logging` reads them."""
    for option, values, name in (
        ("--log-level", LEVELS, LEVEL_ENV),
        ("--log-format", FORMATS, FORMAT_ENV),
    ):
        usual = "info" if values is LEVELS else "text, on standard error"
        parser.add_argument(
            option,
            choices=values,
            action=_ReadBefore,
            default=argparse.SUPPRESS,
            help=f"of the process's log (default ${name}, or {usual})",
        )


def start_logging(component: str, argv: Sequence[str]) -> None:
    """Configure this process's `logging` as the command line or else the environment says.

    Words of `argv` that are wrong are left to the process's own parser. It does nothing if the root
    logger has a handler already. Raises ConfigError for an unknown value in the environment.
    """
    given = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    given.add_argument("--log-level", default=_environment(LEVEL_ENV, LEVELS, "info"))
    given.add_argument("--log-format", default=_environment(FORMAT_ENV, FORMATS, "text"))
    try:
        options, _ = given.parse_known_args(list(argv))
    except argparse.ArgumentError:
        return
    if logging.getLogger().handlers or options.log_level not in LEVELS:
        return
    if options.log_format != "json":
        log_to_stderr(options.log_level)
        return
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter(component))
    logging.basicConfig(level=options.log_level.upper(), handlers=[AsideHandler(handler)])
    logging.captureWarnings(capture=True)
    sys.excepthook = lambda *info: logging.critical("unexpected error", exc_info=info)
    _RECORDS.setLevel(logging.NOTSET)


def log_to_stderr(level: str = "info") -> None:
    """Configure this process's `logging` to text on standard error, through an AsideHandler.

    It does nothing if the root logger has a handler already.
    """
    if logging.getLogger().handlers:
        return  # Somebody else has.
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[AsideHandler(handler)])


def announce(process: str, line: str) -> None:
    """Write a line for the operator, `rose gateway: listening on …`, to standard output; with JSON
    as a record. Raises OSError if standard output cannot be written.
    """
    if _RECORDS.level == _OFF:
        sys.stdout.write(f"{process}: {line}\n")
        sys.stdout.flush()
    else:
        logging.getLogger("rose").info("%s", line)


def complain(process: str, error: object) -> None:
    """Write the error that ends a process as a line to standard error; with JSON as a record."""
    if _RECORDS.level == _OFF:
        sys.stderr.write(f"{process}: {error}\n")
    else:
        logging.getLogger("rose").error("%s", error)


def _environment(name: str, values: Sequence[str], usual: str) -> str:
    given = os.environ.get(name) or usual
    if given not in values:
        raise ConfigError(f"{name}={given!r:.40}: give one of {', '.join(values)}")
    return given
