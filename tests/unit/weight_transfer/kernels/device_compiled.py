"""Compile every kernel of a device for NVIDIA GPUs, which takes none; print what each became.

The interpreter takes Python that Triton's compiler refuses: this is the other half of the proof.
Run by `test_weight_device`, in a process of its own.
"""

import json
import sys

from triton import compile as compiled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from weight_transfer.kernels import device
from weight_transfer.kernels import triton_kernels as kernels

WIDTHS = {1: "*i8", 2: "*i16", 4: "*i32", 8: "*i64"}
ARGUMENTS = {
    "bitmap": "*u8",
    "before": "*i32",
    "counts": "*i32",
    "gaps": "*i32",
    "ranks": "*i32",
    "slots": "*i32",
    "indices": "*i64",
    "places": "*i32",
    "starts": "*i64",
    "odd": "*i64",
    "sums": "*i64",
    "bits": "weights",
    "codes": "weights",
    "new": "weights",
    "old": "weights",
    "target": "weights",
    "values": "weights",
    "first": "i64",
    "size": "i64",
    "count": "i32",
    "mask": "i32",
    "shift": "i32",
}
CONSTANTS = {"tile_size": 1024, "tiles": 8, "block_size": 4096, "slot_count": 32}
KERNELS = (
    kernels.sum_tiles,
    kernels.mark,
    kernels.list_marked,
    kernels.describe,
    kernels.count_classes,
    kernels.rank_changed,
    kernels.exchange,
    kernels.read_back,
)


def size_of(kernel: object, width: int, capability: int) -> int:
    """Bytes of machine code."""
    names = kernel.arg_names  # type: ignore[attr-defined]
    constants = {name: CONSTANTS[name] for name in names if name in CONSTANTS}
    if kernel is kernels.rank_changed:
        constants["tile_size"] = device.RANKED
    if "width_bits" in names:
        constants["width_bits"] = 8 * width
    types = {n: ARGUMENTS[n] for n in names if n not in constants}
    types = {n: WIDTHS[width] if t == "weights" else t for n, t in types.items()}
    signature = {n: types.get(n, "constexpr") for n in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return len(compiled(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"])


if __name__ == "__main__":
    # Each argument is a capability and a width: 90:2.
    targets = [tuple(map(int, argument.split(":"))) for argument in sys.argv[1:]]
    found = {
        f"{kernel.fn.__name__}/{capability}:{width}": size_of(kernel, width, capability)  # type: ignore[attr-defined]
        for kernel in KERNELS
        for capability, width in targets
    }
    sys.stdout.write(json.dumps(found))
