"""Prefetch instructions for memory that a kernel will read or write soon.

Rows of a large table lie far apart in memory, but the input tells early which rows come next. A
kernel that prefetches the row eight lookups ahead waits for eight rows at the same time. Without
prefetching, the processor looks ahead only as far as its instruction queue reaches.

A prefetch changes no result and never faults: the processor ignores invalid addresses. On
processors without such an instruction, nothing is emitted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from recsys._support.jit import inlined_part

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["LINE_BYTES", "prefetch", "prefetch_run", "prefetch_to_write"]

# The size of a cache line on every processor that PyTorch is built for, except Apple's (128).
LINE_BYTES = 64

_INTO_ALL_CACHES, _DATA = 3, 1


@intrinsic  # type: ignore[untyped-decorator]  # numba's
def prefetch(_context: Any, array: Any, index: Any) -> Any:
    """In a kernel: fetch the cache line of `array[index]`, which may lie outside of the array.

    Args:
        array: One-dimensional, contiguous.
        index: Unsigned, so no index is counted from the end.
    """
    return _prefetching(array, index, is_write=0)


@intrinsic  # type: ignore[untyped-decorator]  # numba's
def prefetch_to_write(_context: Any, array: Any, index: Any) -> Any:
    """Like `prefetch`, for a line that will be written: other cores drop their copies."""
    return _prefetching(array, index, is_write=1)


def _prefetching(array: Any, index: Any, *, is_write: int) -> Any:
    """The signature of a call, and the function that generates its LLVM code."""
    if (
        not isinstance(array, types.Array)
        or array.ndim != 1
        or not isinstance(index, types.Integer)
    ):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch",
            [address.type],
            ir.FunctionType(ir.VoidType(), [address.type, number, number, number]),
        )
        how = [ir.Constant(number, value) for value in (is_write, _INTO_ALL_CACHES, _DATA)]
        builder.call(function, [address, *how])
        return context.get_dummy_value()

    return types.void(array, types.uint64), generate


@inlined_part
def prefetch_run(array: NDArray[Any], begin: np.uint64, count: np.uint64, line: np.uint64) -> None:
    """In a kernel: fetch the cache lines of `array[begin : begin + count]`.

    Args:
        array: As for `prefetch`.
        begin: The first number.
        count: How many numbers.
        line: How many numbers a cache line holds.
    """
    index = np.uint64(0)
    while index < count:  # a range with a step that is no constant costs a division
        prefetch(array, begin + index)
        index += line
