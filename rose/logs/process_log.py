"""Log of one process: text on standard error, or JSON lines on standard output for a collector.

    {"time":"2026-11-26T16:12:24.123Z","level":"info","component":"gateway","logger":"asyncio",…}

With JSON the records of event, audit and usage logs are repeated there at level info, since the
files of a pod are gone with it.
"""

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NoReturn

from typing_extensions import override

from rose.clock import utc_text
from rose.errors import ConfigError
from rose.logs.rotating_jsonl import LogThread
from rose.otlp import OWN_LOGGERS, log_handler

OPTIONS: Final = {
    "level": ("info", ("debug", "info", "warning", "error")),
    "format": ("text", ("text", "json")),
}
"""Defaults and values of the options --log-level and --log-format."""
_RECORDS: Final = logging.getLogger("records")
# Records of log files are repeated with JSON, and exported where OTLP is asked for.
_OFF: Final = logging.CRITICAL + 1
_RECORDS.setLevel(_OFF)
_RECORDS.propagate = False


class AsideHandler(logging.Handler):
    """Log handler that passes records to another one in a thread: a full pipe stops no caller.

    Records beyond WAITING pending ones are dropped. at_end: function that `close` has called after
    the last record.
    """

    def __init__(
        self, handler: logging.Handler, at_end: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__()
        self._handler, self._at_end = handler, at_end
        self._thread = LogThread("rose-log")

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self._thread.put(lambda: self._handler.emit(record))

    @override
    def close(self) -> None:
        """Write the pending records, as far as the reader takes them within a second."""
        self._thread.put(self._at_end)
        self._thread.close(1.0)
        super().close()


class JsonFormatter(logging.Formatter):
    """Formatter of log records as JSON objects, one a line. component: name of the process."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    @override
    def format(self, record: logging.LogRecord) -> str:
        fields = dict(getattr(record, "fields", {}))
        said: dict[str, object] = {
            "time": fields.pop("time", None) or utc_text(record.created),
            "level": record.levelname.lower(),
            "component": self._component,
            "logger": record.name,
        }
        if fields:
            said |= {"event": fields.pop("event", record.getMessage()), "fields": fields}
        else:
            said["message"] = record.getMessage()
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        encoded = partial(json.dumps, separators=(",", ":"), default=str)
        try:
            return encoded(said, allow_nan=False)
        except ValueError:
            # JSON has no such number.
            return encoded(json.loads(encoded(said), parse_constant=str))


def repeat(log: str) -> Callable[[Mapping[str, object]], None]:
    """Return a function that repeats a record of a log file in the process's log, if that is JSON.

    log: last part of the logger's name, such as `audit`.
    """
    logger = logging.getLogger(f"{_RECORDS.name}.{log}")
    return lambda record: logger.info("%s", log, extra={"fields": record})


class _ReadBefore(argparse.Action):
    """Option that `start_logging` reads before all others; parsed options do not have it."""

    def __call__(self, *_: object, **__: object) -> None:
        return


class _Given(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def add_logging_options(parser: argparse.ArgumentParser) -> None:
    """Add --log-level and --log-format to a parser; `start_logging` reads them."""
    for name, (usual, values) in OPTIONS.items():
        what = f"of the process's log (default $ROSE_LOG_{name.upper()}, or {usual})"
        parser.add_argument(
            f"--log-{name}",
            action=_ReadBefore,
            choices=values,
            default=argparse.SUPPRESS,
            help=what,
        )


def start_logging(component: str, argv: Sequence[str]) -> None:
    """Configure this process's `logging` as the command line or else the environment says.

    Words of `argv` that are wrong are left to the process's own parser. It does nothing if the root
    logger has a handler already. Raises ConfigError for an unknown value in the environment.
    """
    given = _Given(add_help=False)
    for name, (usual, values) in OPTIONS.items():
        variable = f"ROSE_LOG_{name.upper()}"
        usual = os.environ.get(variable) or usual
        if usual not in values:
            raise ConfigError(f"{variable}={usual!r:.40}: give one of {', '.join(values)}")
        given.add_argument(f"--log-{name}", choices=values, default=usual)
    try:
        options, _ = given.parse_known_args(list(argv))
    except argparse.ArgumentError:
        return
    if logging.getLogger().handlers:
        return  # Somebody else has.
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    if options.log_format == "json":
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(JsonFormatter(component))
        logging.captureWarnings(capture=True)
        sys.excepthook = lambda *info: logging.critical("unexpected error", exc_info=info)
        _RECORDS.setLevel(logging.NOTSET)
        _RECORDS.propagate = True
    logging.basicConfig(level=options.log_level.upper(), handlers=[AsideHandler(handler)])
    if (exported := log_handler(component)) is not None:
        export = AsideHandler(*exported)
        export.addFilter(lambda record: not record.name.startswith(OWN_LOGGERS))
        logging.getLogger().addHandler(export)
        _RECORDS.setLevel(logging.NOTSET)
        if not _RECORDS.propagate:
            _RECORDS.addHandler(export)


def _own() -> logging.Logger:
    # The lines of `announce` and `complain` are shown by themselves where the log is text.
    return logging.getLogger("rose") if _RECORDS.propagate else _RECORDS


def announce(process: str, line: str) -> None:
    """Write a line for the operator to standard output, with JSON as a record.

    A reader that is gone, or a full disk, is ignored: no work depends on it.
    """
    _own().info("%s", line)
    if _RECORDS.propagate:
        return
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{process}: {line}\n")
        sys.stdout.flush()


def complain(process: str, error: object) -> None:
    """Write the error that ends a process to standard error, with JSON as a record."""
    _own().error("%s", error)
    if not _RECORDS.propagate:
        sys.stderr.write(f"{process}: {error}\n")
