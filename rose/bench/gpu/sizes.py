"""How large what is measured is."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from rose.bench.gpu.serve.sizes import ServingSizes
from rose.errors import ConfigError

LEAST_ROUNDS = 3
SERVING = ServingSizes()


@dataclass(frozen=True, slots=True)
class Sizes:
    """gib: of each tensor that kernels are timed on, more than any cache. density: share of changed
    weights. check_size: weights of each comparison with numpy. model: see `models`. serving: of
    host and guests.
    """

    gib: float = 4.0
    density: float = 0.02
    rounds: int = 10
    check_size: int = (1 << 22) + 5
    model: str = "8b"
    serving: ServingSizes = SERVING

    def __post_init__(self) -> None:
        if not 0 < self.gib <= 16:
            raise ConfigError("--gib is above 0 and at most 16")
        if not 0 < self.density < 1:
            raise ConfigError("--density is a share between 0 and 1")
        if self.rounds < LEAST_ROUNDS:
            raise ConfigError(f"--rounds is at least {LEAST_ROUNDS}: a median needs them")

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        """From what `asdict` makes of it."""
        serving = ServingSizes.of(plain["serving"])
        return cls(**{**plain, "serving": serving})

    def told(self, *, serving: bool) -> dict[str, Any]:
        """What a record holds: those of host and guests, or all others; no path among them."""
        plain = asdict(self)
        engines: dict[str, Any] = plain.pop("serving")
        if not serving:
            return plain
        return engines | {"azure": self.serving.trace_digest}

    @property
    def tensor_bytes(self) -> int:
        """Bytes of each timed tensor."""
        return int(self.gib * (1 << 30))
