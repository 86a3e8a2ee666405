"""Limits on input from peers: fields of messages by what they may hold.

Names, figures and counts from outside are checked. Invalid names are refused and never cut, since
two long ones could become one; texts that only people read are cut. Every refusal is a
`ConfigError`, the line that its peer gets. A type below names its check, which
`rose.scheduler.wire` calls with the value and with the words that name it.
"""

import math
from collections.abc import Mapping, Sized
from typing import Annotated

from elastic_scheduler.leases.lease_table import MAX_NAME_CHARS, MAX_VERSION
from rose.addresses import checked_source, checked_url
from rose.errors import ConfigError

# A node runs an engine or a few; a gateway folds the jobs of its turns into 64.
MAX_REPLICAS = 256
MAX_HOSTS = 64
MAX_JOBS = 256
MAX_MODELS = 64
MAX_SWITCHES = 4_096
MAX_LABELS = 64
MAX_TEXT_CHARS = 512
MAX_WEIGHT = 1e6
# Bound on figures of telemetry: latencies, windows, shares.
MAX_FIGURE = 1e9
# Beyond any real sum, and far enough below what a sum of them can hold.
MAX_SUM = 1e15


def checked_name(name: str, whose: str) -> str:
    """Return the name. Raises ConfigError unless it has 1 to 253 printable characters."""
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise ConfigError(
            f"{whose} is {name[:40]!r}; give a name of 1 to {MAX_NAME_CHARS} printable characters"
        )
    return name


def cut_text(text: str, whose: str = "") -> str:
    """Return the first 512 characters of a text. Never raises."""
    del whose
    return text[:MAX_TEXT_CHARS]


def check_number(things: Sized, most: int, whose: str) -> None:
    """Raise ConfigError if there are more than `most` things in one message."""
    if len(things) > most:
        raise ConfigError(f"{whose}: {len(things)} at once; send at most {most}")


def checked_version(version: int, whose: str) -> int:
    """Return the weight version. Raises ConfigError unless it is 0 to 2^53."""
    if not 0 <= version <= MAX_VERSION:
        raise ConfigError(f"{whose} is {version}; give one of 0 to 2^53")
    return version


def checked_figure(value: float, whose: str, most: float = MAX_FIGURE) -> float:
    """Return the figure. Raises ConfigError unless it is finite and 0 to `most`."""
    if not (math.isfinite(value) and 0 <= value <= most):
        raise ConfigError(f"{whose} is {value}; send a figure of 0 to {most:.0f}")
    return value


def _labels(labels: Mapping[str, str], whose: str) -> dict[str, str]:
    check_number(labels, MAX_LABELS, whose)
    return {checked_name(key, whose): cut_text(value) for key, value in labels.items()}


Name = Annotated[str, checked_name]
OptionalName = Annotated[str, lambda name, whose: name and checked_name(name, whose)]
Text = Annotated[str, cut_text]
SourceUrl = Annotated[str, checked_source]
OptionalUrl = Annotated[str, lambda url, whose: url and checked_url(url, whose)]
Labels = Annotated[dict[str, str], _labels]
Version = Annotated[int, checked_version]
Figure = Annotated[float, checked_figure]
Sum = Annotated[float, lambda value, whose: checked_figure(value, whose, MAX_SUM)]
# A trainer that sends no weight has the weight 1.
Weight = Annotated[float, lambda value, whose: checked_figure(value, whose, MAX_WEIGHT) or 1.0]
