"""All pieces, in the order in which they run: what others are compared with comes early."""

from collections.abc import Callable, Mapping
from typing import Any

from rose.bench.gpu import limits
from rose.bench.gpu.models import shape_of
from rose.bench.gpu.piece import MOST_S, Piece
from rose.bench.gpu.serve import needs
from rose.bench.gpu.serve.sizes import ServingSizes
from rose.bench.gpu.sizes import Sizes
from rose.bench.gpu.work import page_driver
from rose.nvml import CardError

GIB = 1 << 30
TORCH = ("numpy", "torch")
KERNELS = (*TORCH, "triton")
_WORK, _SERVE = "rose.bench.gpu.work", "rose.bench.gpu.serve"


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
    checks: Callable[[Mapping[str, Any]], list[limits.Check]] = limits.served_checks,
    *,
    known_weights: bool = False,
) -> Piece:
    """A piece of the group that starts host and guests once."""
    usual = ServingSizes()
    return Piece(
        name, what, f"{_SERVE}.{work}", estimate_s=usual.start_s + least(usual),
        limit_s=MOST_S, memory=lambda sizes: needs.memory_bytes(sizes.serving),
        modules=needs.MODULES, group=f"{_SERVE}.group:measure_all",
        known_weights=known_weights,
        least=lambda sizes: least(sizes.serving),
        checks=checks,
    )  # fmt: skip


PIECES = (
    Piece(
        "tests", "the tests that want a device, on it", f"{_WORK}.device_tests:run",
        estimate_s=240, limit_s=570, memory=lambda sizes: 4 * GIB,
        modules=(*TORCH, "pytest", "hypothesis"),
    ),
    Piece(
        "copy", "what the card's own copies move", f"{_WORK}.copying:run",
        estimate_s=20, limit_s=120, memory=lambda sizes: 2 * sizes.tensor_bytes + 4 * GIB,
        modules=TORCH,
    ),
    Piece(
        "pages", "create, map, access and unmap a page; 1 GiB from guest to host",
        f"{_WORK}.pages:run", estimate_s=60, limit_s=300, memory=lambda sizes: 6 * GIB,
        modules=("cuda.bindings",), lacking=page_driver.lacking, checks=limits.page_checks,
    ),
    Piece(
        "kernels", "weight kernels against numpy, then against the copy", f"{_WORK}.kernels:run",
        estimate_s=180, limit_s=570, memory=_kernel_bytes,
        modules=KERNELS, checks=limits.kernel_checks,
    ),
    Piece(
        "update", "a sparse update written over an 8B model's weights", f"{_WORK}.updating:run",
        estimate_s=120, limit_s=480, memory=_update_bytes,
        modules=KERNELS, checks=limits.update_checks,
    ),
    _served(
        "serve60", "host and guests in all arms, the host busy for 0.6", "loads:busy_60",
        needs.steady_s,
    ),
    _served("bursts", "the same under bursts of the Azure trace", "loads:bursts", needs.bursts_s),
    _served(
        "update-serving", "2% of the guest's weights anew while host and guest serve",
        "updating:updates", needs.updates_s, limits.updating_checks, known_weights=True,
    ),
    _served("serve30", "as serve60, the host busy for 0.3", "loads:busy_30", needs.steady_s),
    _served("serve90", "the same, the host busy for 0.9", "loads:busy_90", needs.steady_s),
)  # fmt: skip


def pieces_of(names: tuple[str, ...]) -> tuple[Piece, ...]:
    """Those pieces in the order in which they run, all without a name. Raises CardError."""
    known = {piece.name for piece in PIECES}
    for name in names:
        if name not in known:
            raise CardError(f"no piece {name!r}; --list shows {', '.join(sorted(known))}")
    return tuple(piece for piece in PIECES if not names or piece.name in names)
