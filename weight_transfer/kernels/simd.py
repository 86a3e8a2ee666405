"""SIMD helpers for CPU kernels: numba's compiler settings, bit counts, comparisons, byte planes.

Kernels are compiled on first use, kept on disk, and run without the GIL. LLVM turns each helper
into whatever instruction the machine has; none is tied to one kind of processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from weight_transfer.errors import WeightError


class NoCompiler:
    """Stand-in for numba and llvmlite where they are left out: kernels are defined, and raise
    when they are called.
    """

    def __getattr__(self, _name: str) -> NoCompiler:
        return self

    def __call__(self, *_args: object, **_options: object) -> NoCompiler:
        return self


try:
    import llvmlite.binding.ffi
    import numba
    from llvmlite import ir
    from numba.core import cgutils, types
    from numba.extending import intrinsic
except ImportError:
    # The control plane's image has neither: they are a third of its size, and nothing in it
    # computes with weights.
    numba = ir = cgutils = types = intrinsic = NoCompiler()

Kernel = TypeVar("Kernel", bound=Callable[..., Any])
AHEAD = 64
"""Distance, in changes, between the prefetch of a weight's cache line and its use."""
COMPARED = 32
"""Number of weights that one call of `differing` compares."""
MATCHED = 64
"""Number of bytes that one call of `matching` compares."""
_I8, _I32, _I64 = (ir.IntType(bits) for bits in (8, 32, 64))
_UNDEFINED_FOR_ZERO = ir.Constant(ir.IntType(1), 1)


def compiled(kernel: Kernel) -> Kernel:
    """Return `kernel` compiled by numba, without the GIL, anew for each combination of argument
    types.

    Machine code is kept on disk; where no folder is writable each process compiles it
    (NUMBA_CACHE_DIR names a folder). Without numba the kernel raises WeightError.
    """
    if isinstance(numba, NoCompiler):

        def missing(*_args: object) -> None:
            raise WeightError("numba is missing, which computes with weights: pip install numba")

        return cast("Kernel", missing)
    try:
        return cast("Kernel", numba.njit(nogil=True, cache=True)(kernel))
    except RuntimeError:
        # Neither the package's folder nor the user's home is writable.
        return cast("Kernel", numba.njit(nogil=True)(kernel))


def _mend_llvmlite() -> None:
    """Make llvmlite's library handle raise AttributeError for names such as `__dict__`.

    It answers for every name with a function of the library, `__dict__` included (0.47). vLLM looks
    into all objects of all modules when a CPU worker starts (0.32), and would fail on it.
    """
    handle = type(llvmlite.binding.ffi.lib)
    find = handle.__getattr__

    def named(self: object, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return find(self, name)

    handle.__getattr__ = named


if not isinstance(numba, NoCompiler):
    _mend_llvmlite()


def _counting(count: Callable[[Any, Any], Any]) -> Any:  # noqa: ANN401 -- numba's own types
    """Return a numba function u64 → i64 that is one of LLVM's bit-counting instructions."""

    @intrinsic
    def counted(_typing: Any, _word: Any) -> Any:  # noqa: ANN401
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401
            return count(builder, args[0])

        return types.int64(types.uint64), generate

    return counted


trailing_zeros = _counting(lambda builder, word: builder.cttz(word, _UNDEFINED_FOR_ZERO))
"""Function that returns the number of the lowest set bit of a word that is not 0."""
leading_zeros = _counting(lambda builder, word: builder.ctlz(word, _UNDEFINED_FOR_ZERO))
"""Function that returns how many bits lie above the highest set bit of a word that is not 0."""
ones = _counting(lambda builder, word: builder.ctpop(word))
"""Function that returns the number of set bits of a word."""


@intrinsic
def prefetch(_typing: Any, array: Any, index: Any) -> Any:  # noqa: ANN401 -- numba's own types
    """Prefetch the cache line of `array[index]` (int64 index) into the processor's caches.

    Changed weights lie too far from each other for the processor to foresee where the next is.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401
        pointer = _I8.as_pointer()
        item = _item(context, builder, signature.args[0], args[0], args[1])
        form = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, form, "llvm.prefetch.p0")
        read, all_caches, data = (ir.Constant(_I32, n) for n in (0, 3, 1))
        builder.call(function, [builder.bitcast(item, pointer), read, all_caches, data])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic
def differing(_typing: Any, old: Any, new: Any, at: Any) -> Any:  # noqa: ANN401
    """Return a u64 whose bit k is 1 if old[at + k] and new[at + k] differ, for COMPARED weights."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401
        pair = [
            _vector(context, builder, kind, array, args[2], COMPARED)
            for kind, array in zip(signature.args[:2], args[:2], strict=True)
        ]
        marks = builder.icmp_unsigned("!=", *pair)
        return builder.zext(builder.bitcast(marks, ir.IntType(COMPARED)), _I64)

    return types.uint64(old, new, types.int64), generate


@intrinsic
def matching(_typing: Any, array: Any, at: Any, byte: Any) -> Any:  # noqa: ANN401
    """Return a u64 whose bit k is 1 if array[at + k] equals `byte`, for MATCHED bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ANN401
        vector = _vector(context, builder, signature.args[0], args[0], args[1], MATCHED)
        one = builder.insert_element(
            ir.Constant(vector.type, ir.Undefined), args[2], ir.Constant(_I32, 0)
        )
        nowhere = ir.Constant(ir.VectorType(_I32, MATCHED), None)
        everywhere = builder.shuffle_vector(one, one, nowhere)
        return builder.bitcast(builder.icmp_unsigned("==", vector, everywhere), _I64)

    return types.uint64(array, types.int64, types.uint8), generate


def _item(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:  # noqa: ANN401
    struct = context.make_array(kind)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, kind, struct, [at])


def _vector(
    context: Any,  # noqa: ANN401
    builder: Any,  # noqa: ANN401
    kind: Any,  # noqa: ANN401
    array: Any,  # noqa: ANN401
    at: Any,  # noqa: ANN401
    size: int,
) -> Any:  # noqa: ANN401
    """Return LLVM's vector of `size` items of a contiguous array from index `at` on."""
    item = _item(context, builder, kind, array, at)
    vector = ir.VectorType(context.get_value_type(kind.dtype), size)
    return builder.load(builder.bitcast(item, vector.as_pointer()), align=kind.dtype.bitwidth // 8)


@compiled
def split_plane(
    values: NDArray[np.unsignedinteger[Any]], plane: int, out: NDArray[np.uint8]
) -> None:
    """Write byte `plane` of each value (0: least significant) to `out`, which is as long."""
    shift = np.uint64(8 * plane)
    for k in range(values.size):
        out[k] = np.uint64(values[k]) >> shift


@compiled
def join_plane(plane: int, raw: NDArray[np.uint8], out: NDArray[np.unsignedinteger[Any]]) -> None:
    """Set byte `plane` of each value of `out`, zero until then, to the bytes in `raw`."""
    shift = np.uint64(8 * plane)
    for k in range(raw.size):
        out[k] |= np.uint64(raw[k]) << shift


@compiled
def all_equal(values: NDArray[np.unsignedinteger[Any]], plane: int) -> int:
    """Return the byte that all values have at `plane`, -1 when they differ or there are none."""
    if not values.size:
        return -1
    shift = np.uint64(8 * plane)
    first = np.uint8(np.uint64(values[0]) >> shift)
    differing = 0
    for k in range(values.size):
        differing |= np.int64(np.uint8(np.uint64(values[k]) >> shift) != first)
    return -1 if differing else np.int64(first)
