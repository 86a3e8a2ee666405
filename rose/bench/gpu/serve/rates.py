"""`serving-rates.json`: which arrival rate keeps a host busy for how long, kept between calls.

A rate only chooses a load: how busy it kept the host is measured again in every block.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rose.bench.coserve.records import Calibration
from rose.errors import ConfigError

RATES = "serving-rates.json"


class _File(msgspec.Struct, frozen=True):
    host: dict[str, str | int | float | None]
    rates: list[Calibration]


class KeptRates:
    """`host`: what the rates depend on; those of another host are forgotten."""

    def __init__(self, path: Path, host: Mapping[str, str | int | float | None]) -> None:
        """Raises ConfigError for a file that is damaged."""
        self._path = path
        self._host = dict(host)
        self._rates: dict[tuple[float, str], Calibration] = {}
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=_File)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"{path} is damaged ({error}); delete it") from error
        if kept.host == self._host:
            self._rates = {(rate.busy_target, rate.traffic): rate for rate in kept.rates}

    def get(self, busy: float, traffic: str) -> Calibration | None:
        """The rate of an earlier search, None without one."""
        return self._rates.get((busy, traffic))

    def put(self, found: Calibration) -> None:
        """Keep it for the next session too."""
        self._rates[found.busy_target, found.traffic] = found
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_suffix(f".{os.getpid()}.tmp")
        file = _File(self._host, list(self._rates.values()))
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(file)) + b"\n")
        beside.replace(self._path)
