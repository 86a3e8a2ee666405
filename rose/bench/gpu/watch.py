"""Clocks, power and heat while a piece runs."""

import threading
from types import TracebackType

from rose.nvml import Card, CardError, CardReader, Usage

EVERY_S = 0.5


class Watch:
    """Looks at the card now and then; a card that stops answering ends the looking."""

    def __init__(self, reader: CardReader, card: Card, every_s: float = EVERY_S) -> None:
        self._reader = reader
        self._card = card
        self._every_s = every_s
        self._over = threading.Event()
        self._seen: list[Usage] = []
        self._ended = ""
        self._thread = threading.Thread(target=self._look, name="gpu-watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def summary(self) -> dict[str, object]:
        """What was seen: ranges, and every reason for which clocks were held down."""
        return {
            "looks": len(self._seen),
            "ended": self._ended,
            "sm_mhz": _ends([look.sm_mhz for look in self._seen]),
            "memory_mhz": _ends([look.memory_mhz for look in self._seen]),
            "power_w": _ends([look.power_w for look in self._seen]),
            "temperature_c": _ends([look.temperature_c for look in self._seen]),
            "used_bytes_most": max((look.used_bytes for look in self._seen), default=None),
            "slowed": sorted({why for look in self._seen for why in look.slowed}),
        }

    def _look(self) -> None:
        try:
            while not self._over.wait(self._every_s):
                self._seen.append(self._reader.usage(self._card))
        except CardError as error:
            self._ended = str(error)


def _ends(values: list[int | None] | list[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if known else None
