"""What one cell measured."""

import time
from array import array

import numpy as np

ERRORS_KEPT = 5
QUANTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}


class Times:
    """Times of turns and tokens in seconds; counted only between `start` and `stop`."""

    def __init__(self) -> None:
        self._on = False
        self._began_s = self._seconds = 0.0
        self._cpu = time.process_time()
        self._first, self._later = array("d"), array("d")
        self._turns = self._errors = 0
        self._said: list[str] = []

    @property
    def turns(self) -> int:
        """Turns that ended as they should."""
        return self._turns

    @turns.setter
    def turns(self, value: int) -> None:
        if self._on:
            self._turns = value

    def start(self) -> None:
        """From here on it counts."""
        self._on, self._began_s, self._cpu = True, time.monotonic(), time.process_time()

    def stop(self) -> None:
        """It counts no more."""
        self._on = False
        self._seconds = time.monotonic() - self._began_s
        self._cpu = time.process_time() - self._cpu

    def first(self, under_way_s: float) -> None:
        """A turn's first chunk: its request's way to the engine and the chunk's way back."""
        if self._on:
            self._first.append(under_way_s)

    def later(self, under_way_s: float) -> None:
        """The way of any later chunk."""
        if self._on:
            self._later.append(under_way_s)

    def error(self, said: str) -> None:
        """A turn that did not end as it should, whenever it was."""
        self._errors += 1
        if len(self._said) < ERRORS_KEPT:
            self._said.append(said)

    def result(self) -> dict[str, object]:
        """Quantiles in seconds, counts, and how busy this process was."""
        return {
            "first_s": _quantiles(self._first),
            "later_s": _quantiles(self._later),
            "samples": len(self._first),
            "turns": self._turns,
            "turns_per_s": self._turns / self._seconds if self._seconds else 0.0,
            "errors": self._errors,
            "said": self._said,
            "generator_busy": self._cpu / self._seconds if self._seconds else 0.0,
        }


def _quantiles(values: "array[float]") -> dict[str, float | None]:
    if not values:
        return dict.fromkeys(QUANTILES)
    found = np.quantile(np.frombuffer(values), [*QUANTILES.values()])
    return {name: float(value) for name, value in zip(QUANTILES, found, strict=True)}
