"""All pieces, in the order in which they run: what others are compared with comes early."""

from rose.bench.gpu import limits
from rose.bench.gpu.models import shape_of
from rose.bench.gpu.piece import Piece
from rose.bench.gpu.sizes import Sizes
from rose.bench.gpu.work import page_driver
from rose.nvml import CardError

GIB = 1 << 30
TORCH = ("numpy", "torch")
KERNELS = (*TORCH, "triton")
_WORK = "rose.bench.gpu.work"


def _kernel_bytes(sizes: Sizes) -> int:
    # Old, new, a copy and a target; while changes are drawn a float and a bit for each weight.
    return 9 * sizes.tensor_bytes + 2 * GIB


def _update_bytes(sizes: Sizes) -> int:
    # A place, an index and a value of each change, there and back; a float while they are drawn.
    shape = shape_of(sizes.model)
    changes = int(shape.weights * sizes.density)
    return 2 * shape.weights + 2 * 18 * changes + 12 * shape.vocabulary * shape.hidden + 2 * GIB


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
)  # fmt: skip


def pieces_of(names: tuple[str, ...]) -> tuple[Piece, ...]:
    """Those pieces in the order in which they run, all without a name. Raises CardError."""
    known = {piece.name for piece in PIECES}
    for name in names:
        if name not in known:
            raise CardError(f"no piece {name!r}; --list shows {', '.join(sorted(known))}")
    return tuple(piece for piece in PIECES if not names or piece.name in names)
