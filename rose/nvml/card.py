"""What a card is and how busy it is, and who can tell: reads alone, no setting and no reset."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Card:
    """What stays as it is. None: the card does not tell.

    cuda: highest CUDA version (major, minor) that the driver serves.
    """

    index: int
    name: str
    uuid: str
    driver: str
    cuda: tuple[int, int]
    mig: bool
    compute_mode: str
    persistence: bool | None
    memory_bytes: int
    power_limit_w: float | None
    sm_mhz_most: int | None
    memory_mhz_most: int | None


@dataclass(frozen=True, slots=True)
class Usage:
    """One look at it. `slowed`: why its clocks are lower than they could be.

    processes: ids of those that compute on it, as the driver counts them: in a container they may
    be another namespace's, or hidden.
    """

    free_bytes: int
    used_bytes: int
    processes: tuple[int, ...]
    sm_mhz: int | None
    memory_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    slowed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Client:
    """A process that computes on a card. `pid`: as the driver counts, see `Usage.processes`.

    memory_bytes: None where the driver does not tell. mps: it is a client of MPS.
    """

    pid: int
    memory_bytes: int | None
    mps: bool = False


class CardReader(Protocol):
    """The driver, asked."""

    def cards(self) -> tuple[Card, ...]:
        """All cards of the machine. Raises CardError when there is no driver that answers."""
        ...

    def usage(self, card: Card) -> Usage:
        """Look at one of them. Raises CardError."""
        ...

    def clients(self, card: Card) -> tuple[Client, ...]:
        """Who computes on it, and with how much of its memory. Raises CardError."""
        ...

    def free_bytes(self, card: Card) -> int:
        """Memory of it that nobody has. Raises CardError."""
        ...
