"""Copy and add runs of numbers inside a kernel with the widest vector instructions.

numba compiles a copying or adding loop to code that first checks whether the arrays overlap, and
then processes vectors and a remainder. For rows of 64 bytes this check takes longer than the copy.
If the length is a compile-time constant, these intrinsics become vector instructions alone: one
move per 64 bytes for copying (AVX-512), one addition per 8 numbers for adding.

A length is a compile-time constant if it is a literal or the length of a tuple, in the function
that calls the intrinsic and inside its `prange` loop, if any: numba passes values computed before
the loop to the loop's body as variables.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["RUN", "add_run", "copy_run", "is_run_finite"]

# How many numbers `add_run` adds at once: 8 float32 are a vector of AVX2, 8 float64 one of AVX-512.
# At D=16, the update of float32 rows was as fast with 16.
RUN = 8


@intrinsic  # type: ignore[untyped-decorator]  # numba's
def copy_run(_context: Any, target: Any, to: Any, source: Any, begin: Any, count: Any) -> Any:
    """In a kernel: `target[to : to + count] = source[begin : begin + count]`, unchecked.

    Args:
        target: One-dimensional, contiguous.
        to: Unsigned.
        source: Like `target`, of the same dtype; must not overlap it.
        begin: Unsigned.
        count: Unsigned.
    """
    if not _are_runs(target, to, source, begin, count):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        itemsize = context.get_abi_sizeof(context.get_data_type(target.dtype))
        num_bytes = builder.mul(arguments[4], ir.Constant(ir.IntType(64), itemsize))
        bytes_type, flag = ir.IntType(8).as_pointer(), ir.IntType(1)
        function = builder.module.declare_intrinsic(
            "llvm.memcpy",
            [bytes_type, bytes_type, ir.IntType(64)],
            ir.FunctionType(ir.VoidType(), [bytes_type, bytes_type, ir.IntType(64), flag]),
        )
        to_bytes, from_bytes = (
            builder.bitcast(_address(context, builder, signature, arguments, array), bytes_type)
            for array in (0, 2)
        )
        builder.call(function, [to_bytes, from_bytes, num_bytes, ir.Constant(flag, 0)])
        return context.get_dummy_value()

    return _signature(target, source), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba's
def add_run(_context: Any, target: Any, to: Any, source: Any, begin: Any, count: Any) -> Any:
    """In a kernel: `target[to : to + count] += source[begin : begin + count]`, unchecked.

    Args:
        target: One-dimensional, contiguous, floating point.
        to: Unsigned.
        source: Like `target`, of the same dtype; must not overlap it.
        begin: Unsigned.
        count: Unsigned, a multiple of `RUN`.
    """
    if not _are_runs(target, to, source, begin, count) or not isinstance(target.dtype, types.Float):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(context.get_data_type(target.dtype), RUN).as_pointer()
        itemsize = context.get_abi_sizeof(context.get_data_type(target.dtype))
        sums, more = (_address(context, builder, signature, arguments, array) for array in (0, 2))
        zero, run = (ir.Constant(ir.IntType(64), number) for number in (0, RUN))
        with cgutils.for_range_slice(builder, zero, arguments[4], run, inc=True) as (first, _):
            sum_at, more_at = (
                builder.bitcast(builder.gep(pointer, [first]), vector) for pointer in (sums, more)
            )
            # Vectors are aligned like single numbers.
            total = builder.fadd(
                builder.load(sum_at, align=itemsize), builder.load(more_at, align=itemsize)
            )
            builder.store(total, sum_at, align=itemsize)
        return context.get_dummy_value()

    return _signature(target, source), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba's
def is_run_finite(_context: Any, source: Any, begin: Any, count: Any) -> Any:
    """In a kernel: whether no number of `source[begin : begin + count]` is nan or inf.

    Args:
        source: One-dimensional, contiguous, of floating point.
        begin: Unsigned.
        count: Unsigned, a multiple of `RUN`.
    """
    if not isinstance(source, types.Array) or not isinstance(source.dtype, types.Float):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(context.get_data_type(source.dtype), RUN).as_pointer()
        itemsize = context.get_abi_sizeof(context.get_data_type(source.dtype))
        numbers = _address(context, builder, signature, arguments, 0)
        flags = ir.IntType(RUN)
        found = cgutils.alloca_once_value(builder, ir.Constant(flags, 0))
        zero, run = (ir.Constant(ir.IntType(64), number) for number in (0, RUN))
        with cgutils.for_range_slice(builder, zero, arguments[2], run, inc=True) as (first, _):
            run_at = builder.bitcast(builder.gep(numbers, [first]), vector)
            values = builder.load(run_at, align=itemsize)
            zeros = builder.fsub(values, values)  # nan where a value is nan or inf
            are_nan = builder.bitcast(builder.fcmp_unordered("uno", zeros, zeros), flags)
            builder.store(builder.or_(builder.load(found), are_nan), found)
        return builder.icmp_unsigned("==", builder.load(found), ir.Constant(flags, 0))

    return types.boolean(source, types.uint64, types.uint64), generate


def _are_runs(target: Any, to: Any, source: Any, begin: Any, count: Any) -> bool:
    """Whether the argument types are valid for the intrinsics here."""
    return (
        all(isinstance(array, types.Array) and array.layout == "C" for array in (target, source))
        and target.dtype == source.dtype
        and all(isinstance(number, types.Integer) for number in (to, begin, count))
    )


def _signature(target: Any, source: Any) -> Any:
    return types.void(target, types.uint64, source, types.uint64, types.uint64)


def _address(context: Any, builder: Any, signature: Any, arguments: Any, array: int) -> Any:
    """The address of the number whose index is the argument after the array."""
    kind, value = signature.args[array], arguments[array]
    data = context.make_array(kind)(context, builder, value).data
    return builder.gep(data, [arguments[array + 1]])
