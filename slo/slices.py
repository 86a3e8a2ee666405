"""A ring of time slices: what happened lately, in bounded memory, on a clock that is handed in."""

import math
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SliceRing(Generic[T]):
    """The last `slices` spans of `slice_s` seconds, each with a T of its own made by `make`.

    A slice that fell out of the ring is replaced when its place is needed. Slices ahead of the
    asked time are ignored: a clock that went back sees nothing of its former future.
    Raises ValueError unless both sizes are positive.
    """

    def __init__(self, slice_s: float, slices: int, make: Callable[[], T]) -> None:
        if not (math.isfinite(slice_s) and slice_s > 0 and slices > 0):
            raise ValueError(f"ring of {slices} slices of {slice_s} s; both must be positive")
        self.slice_s = slice_s
        self.span_s = slice_s * slices
        self._make = make
        self._places: list[tuple[int, T] | None] = [None] * slices

    def epoch(self, now_s: float) -> int:
        """Number of the slice that `now_s` lies in."""
        return math.floor(now_s / self.slice_s)

    def at(self, now_s: float) -> T | None:
        """The slice of `now_s`, made if need be; None if its place holds a later one."""
        epoch = self.epoch(now_s)
        place = epoch % len(self._places)
        held = self._places[place]
        if held is not None and held[0] >= epoch:
            return held[1] if held[0] == epoch else None
        made = self._make()
        self._places[place] = (epoch, made)
        return made

    def window(self, now_s: float, window_s: float | None = None) -> list[T]:
        """Slices of the last `window_s` seconds (all without one), the running slice among them.

        Whole slices: up to one slice of time less than asked for. Raises ValueError for a window
        that the ring cannot hold.
        """
        window_s = self.span_s if window_s is None else window_s
        if not 0 < window_s <= self.span_s:
            raise ValueError(f"window of {window_s} s; the ring holds up to {self.span_s} s")
        last = self.epoch(now_s)
        first = last - math.ceil(window_s / self.slice_s - 1e-9)
        return [held[1] for held in self._places if held is not None and first < held[0] <= last]
