"""A word to the processor about memory that a kernel will touch soon.

Rows of a large table lie far apart, and the next one is known long before it is needed: its number
stands in the input. A kernel that names the row eight lookups ahead waits for eight rows at once,
where without it the processor looks ahead as far as its own queue of instructions reaches.

What is said here changes no result, and no address that is told is ever read: one that lies outside
of all memory is passed over. Processors that know no such word get none.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["LINE_BYTES", "prefetch", "prefetch_to_write"]

# What one word fetches, on every processor that PyTorch is built for but Apple's (128).
LINE_BYTES = 64

_INTO_ALL_CACHES, _DATA = 3, 1


@intrinsic  # type: ignore[untyped-decorator]  # numba's
def prefetch(_context: Any, array: Any, index: Any) -> Any:
    """In a kernel: fetch the cache line of `array[index]`, which may lie outside of the array.

    Args:
        array: One-dimensional, contiguous.
        index: Unsigned: one below 0 is not counted from the end.
    """
    return _prefetching(array, index, is_write=0)


@intrinsic  # type: ignore[untyped-decorator]  # numba's
def prefetch_to_write(_context: Any, array: Any, index: Any) -> Any:
    """The same for a line that will be written: no other core keeps a copy of it."""
    return _prefetching(array, index, is_write=1)


def _prefetching(array: Any, index: Any, *, is_write: int) -> Any:
    """The types of a call, and what writes it in LLVM's language."""
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
