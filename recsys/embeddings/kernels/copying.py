"""Copying a run of numbers inside a kernel, in the processor's widest moves.

numba turns a loop that copies into a loop that first asks whether the two arrays overlap, and then
goes on by vectors and remainders; of rows of 64 bytes the asking takes longer than the moving.
Where the length is known when the kernel is compiled, what is said here becomes one move for every
64 bytes (AVX-512) and nothing else.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["copy_run"]


@intrinsic  # type: ignore[untyped-decorator]  # numba's
def copy_run(_context: Any, target: Any, to: Any, source: Any, begin: Any, count: Any) -> Any:
    """In a kernel: `target[to : to + count] = source[begin : begin + count]`, unchecked.

    Args:
        target: One-dimensional, contiguous.
        to: Unsigned.
        source: As `target`, of the same dtype, elsewhere in memory.
        begin: Unsigned.
        count: Unsigned.
    """
    arrays = (target, source)
    if any(not isinstance(array, types.Array) or array.layout != "C" for array in arrays):
        return None
    if target.dtype != source.dtype or not all(
        isinstance(number, types.Integer) for number in (to, begin, count)
    ):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def address(array: int) -> Any:
            kind, value = signature.args[array], arguments[array]
            data = context.make_array(kind)(context, builder, value).data
            return builder.bitcast(
                builder.gep(data, [arguments[array + 1]]), ir.IntType(8).as_pointer()
            )

        itemsize = context.get_abi_sizeof(context.get_data_type(target.dtype))
        num_bytes = builder.mul(arguments[4], ir.Constant(ir.IntType(64), itemsize))
        bytes_type, flag = ir.IntType(8).as_pointer(), ir.IntType(1)
        function = builder.module.declare_intrinsic(
            "llvm.memcpy",
            [bytes_type, bytes_type, ir.IntType(64)],
            ir.FunctionType(ir.VoidType(), [bytes_type, bytes_type, ir.IntType(64), flag]),
        )
        builder.call(function, [address(0), address(2), num_bytes, ir.Constant(flag, 0)])
        return context.get_dummy_value()

    return types.void(target, types.uint64, source, types.uint64, types.uint64), generate
