"""The pieces in the order in which they run: measurement, needs and time of each.

RoseError
├── CardError     (rose.nvml) this card cannot be measured now: nothing was touched
└── PieceError    one piece could not be measured, the others may
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from bench.common.checks import Check
from bench.gpu import limits
from bench.gpu.models import shape_of
from bench.gpu.sizes import (
    MODULES,
    ServingSizes,
    Sizes,
    bursts_s,
    memory_bytes,
    steady_s,
    updates_s,
)
from rose.errors import RoseError
from rose.nvml import CardError


def absent(names: Iterable[str]) -> list[str]:
    """Return those of `names` that cannot be imported."""

    def importable(name: str) -> bool:
        try:
            return find_spec(name) is not None
        except ModuleNotFoundError:  # its parent package is absent
            return False

    return [name for name in names if not importable(name)]


class PieceError(RoseError):
    """One piece could not be measured."""


Measured = dict[str, Any]
# Commands on a lent machine are cut off after ten minutes.
MOST_S = 570.0


@dataclass(frozen=True, slots=True)
class GpuPiece:
    """One piece.

    work: `module:function` that the piece's process imports and calls, with (Sizes, place), or
    with (ServingSession, seconds) when the piece is served.
    served: host and guests are started for it, once for all served pieces of a process.
    known_weights: its guest gets new weights, so version 0 is written to a file first.
    least: shortest time of a served piece once the engines are up.
    estimate_s: time on a card of 2024, alone. limit_s: longest time; then the process is ended.
    memory: bytes of the card. modules: packages that must be importable.
    """

    name: str
    what: str
    work: str
    estimate_s: float
    limit_s: float
    memory: Callable[[Sizes], int]
    modules: tuple[str, ...] = ()
    served: bool = False
    known_weights: bool = False
    least: Callable[[Sizes], float] | None = None
    checks: Callable[[Mapping[str, Any]], list[Check]] = lambda measured: []

    def __post_init__(self) -> None:
        if not self.estimate_s <= self.limit_s <= MOST_S:
            raise ValueError(f"piece {self.name} is not below {MOST_S:.0f} s")

    def least_s(self, sizes: Sizes) -> float:
        """Return the shortest time of the piece; of a served one, once the engines are up."""
        return self.estimate_s if self.least is None else self.least(sizes)

    def takes_s(self, sizes: Sizes) -> float:
        """Return the expected time of the piece in a process of its own."""
        started_s = 0.0 if self.least is None else sizes.serving.start_s
        return started_s + self.least_s(sizes)

    def told(self, sizes: Sizes) -> dict[str, Any]:
        """Return the sizes that this piece depends on, as its record holds them."""
        return sizes.told(serving=self.served)

    def missing(self) -> str:
        """Return the reason why it cannot run in this environment, empty when it can."""
        missing = absent(self.modules)
        return f"needs {', '.join(missing)}, which this Python does not have" if missing else ""


GIB = 1 << 30
TORCH = ("numpy", "torch")
KERNELS = (*TORCH, "triton")
_WORK, _SERVE = "bench.gpu.work", "bench.gpu.serve"


def _kernel_bytes(sizes: Sizes) -> int:
    # Old, new, a copy and a target; while changes are drawn a float and a bit for each weight.
    return 9 * sizes.tensor_bytes + 2 * GIB


def _update_bytes(sizes: Sizes) -> int:
    # A place, an index and a value of each change, there and back; a float while they are drawn.
    shape = shape_of(sizes.model)
    changes = int(shape.weights * sizes.density)
    return 2 * shape.weights + 2 * 18 * changes + 12 * shape.vocabulary * shape.hidden + 2 * GIB


def _served(
    name: str,
    what: str,
    work: str,
    least: Callable[[ServingSizes], float],
    checks: Callable[[Mapping[str, Any]], list[Check]] = limits.served_checks,
    *,
    known_weights: bool = False,
) -> GpuPiece:
    """Return a piece that needs host and guests."""
    usual = ServingSizes()
    return GpuPiece(
        name, what, f"{_SERVE}.{work}", estimate_s=usual.start_s + least(usual),
        limit_s=MOST_S, memory=lambda sizes: memory_bytes(sizes.serving),
        modules=MODULES, served=True,
        known_weights=known_weights,
        least=lambda sizes: least(sizes.serving),
        checks=checks,
    )  # fmt: skip


PIECES = (
    GpuPiece(
        "tests", "the tests that want a device, on it", f"{_WORK}.device_tests:run",
        estimate_s=240, limit_s=570, memory=lambda sizes: 4 * GIB,
        modules=(*TORCH, "pytest", "hypothesis"),
    ),
    GpuPiece(
        "copy", "what the card's own copies move", f"{_WORK}.kernels:copy_speeds",
        estimate_s=20, limit_s=120, memory=lambda sizes: 2 * sizes.tensor_bytes + 4 * GIB,
        modules=TORCH,
    ),
    GpuPiece(
        "pages", "create, map, access and unmap a page; 1 GiB from guest to host",
        f"{_WORK}.pages:run", estimate_s=60, limit_s=300, memory=lambda sizes: 6 * GIB,
        modules=("cuda.bindings",), checks=limits.page_checks,
    ),
    GpuPiece(
        "kernels", "weight kernels against numpy, then against the copy", f"{_WORK}.kernels:run",
        estimate_s=180, limit_s=570, memory=_kernel_bytes,
        modules=KERNELS, checks=limits.kernel_checks,
    ),
    GpuPiece(
        "update", "a sparse update written over an 8B model's weights", f"{_WORK}.updating:run",
        estimate_s=120, limit_s=480, memory=_update_bytes,
        modules=KERNELS, checks=limits.update_checks,
    ),
    _served(
        "serve60", "host and guests in all arms, the host busy for 0.6", "loads:busy_60",
        steady_s,
    ),
    _served("bursts", "the same under bursts of the Azure trace", "loads:bursts", bursts_s),
    _served(
        "update-serving", "2% of the guest's weights anew while host and guest serve",
        "updating:updates", updates_s, limits.updating_checks, known_weights=True,
    ),
    _served("serve30", "as serve60, the host busy for 0.3", "loads:busy_30", steady_s),
    _served("serve90", "the same, the host busy for 0.9", "loads:busy_90", steady_s),
)  # fmt: skip


def pieces_of(names: tuple[str, ...]) -> tuple[GpuPiece, ...]:
    """Return the named pieces in the order in which they run, or all. Raises CardError."""
    known = {piece.name for piece in PIECES}
    for name in names:
        if name not in known:
            raise CardError(f"no piece {name!r}; --list shows {', '.join(sorted(known))}")
    return tuple(piece for piece in PIECES if not names or piece.name in names)
