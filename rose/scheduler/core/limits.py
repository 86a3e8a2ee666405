"""Limits on input from peers: names, figures and counts are checked, complaints logged once.

No name, figure or number of things from outside is believed. Names are refused and never cut, since
two long ones could become one; texts that only people read are cut. Every refusal is a
`ConfigError`, the line that its peer gets. `Complaints` keeps the event log from growing as fast as
a peer errs.
"""

import math
from collections import OrderedDict
from collections.abc import Sized

from elastic_scheduler.leases.lease_table import MAX_NAME_CHARS, MAX_VERSION
from rose.errors import ConfigError
from rose.scheduler.core.messages import LogRecord

REMEMBERED = 1_024
# Offers repeat twice a second, and whoever reaches the port can think of new mistakes for ever.
MOST_A_MINUTE = 60
MINUTE_S = 60.0


class Complaints:
    """Complaints by (event, peer, reason), in bounded memory; times are monotonic seconds."""

    def __init__(self) -> None:
        self._said: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self._minute_s: float | None = None
        self._written = 0
        self._unsaid = 0

    def about(self, event: str, peer: str, reason: str, now_s: float) -> list[LogRecord]:
        """Return a complaint's record, none for a repeated one or beyond the minute's share."""
        told = self.due(now_s)
        key = (event, peer, reason)
        if key in self._said:
            self._said.move_to_end(key)
            return told
        if self._minute_s is None:
            self._minute_s = now_s
        if self._written >= MOST_A_MINUTE:
            self._unsaid += 1
            return told
        self._written += 1
        self._said[key] = None
        if len(self._said) > REMEMBERED:
            self._said.popitem(last=False)
        return [*told, LogRecord(event, {"node": peer, "reason": reason})]

    def due(self, now_s: float) -> list[LogRecord]:
        """Return the number of complaints left out in the minute, at its end."""
        if self._minute_s is None or now_s < self._minute_s + MINUTE_S:
            return []
        unsaid, self._unsaid = self._unsaid, 0
        self._minute_s, self._written = None, 0
        return [LogRecord("complaints_unsaid", {"count": unsaid})] if unsaid else []


# A node runs an engine or a few; a gateway folds the jobs of its turns into 64.
MAX_REPLICAS = 256
MAX_HOSTS = 64
MAX_JOBS = 256
MAX_MODELS = 64
MAX_SWITCHES = 4_096
MAX_LABELS = 64
MAX_TEXT_CHARS = 512
# Bound on figures of telemetry: latencies, windows, shares.
MAX_FIGURE = 1e9


def checked_name(name: str, whose: str) -> str:
    """Return a name that logs, keys and tables can hold."""
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise ConfigError(
            f"{whose} is {name[:40]!r}; give a name of 1 to {MAX_NAME_CHARS} printable characters"
        )
    return name


def cut_text(text: str) -> str:
    """Return as much of a text as people will read."""
    return text[:MAX_TEXT_CHARS]


def check_number(things: Sized, most: int, whose: str) -> None:
    """Refuse more than `most` of them at once."""
    if len(things) > most:
        raise ConfigError(f"{whose}: {len(things)} at once; send at most {most}")


def checked_version(version: int, whose: str) -> int:
    """Return a policy version that counts up from here for ever."""
    if not 0 <= version <= MAX_VERSION:
        raise ConfigError(f"{whose} is {version}; give one of 0 to 2^53")
    return version


def checked_figure(value: float, whose: str, most: float = MAX_FIGURE) -> float:
    """Return a measured figure that is one."""
    if not (math.isfinite(value) and 0 <= value <= most):
        raise ConfigError(f"{whose} is {value}; send a figure of 0 to {most:.0f}")
    return value
