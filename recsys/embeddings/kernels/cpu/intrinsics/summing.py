"""Adds the rows of a bag inside a kernel, with the sums in vector registers.

A loop that adds row after row to memory stores each sum, and loads it again for the next row. Here
the sums of up to 32 columns stay in registers while a run of rows is added to them. Each column is
added up in the order of the rows, so results are those of the loop to the last bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from recsys._support.jit import inlined_part
from recsys.embeddings.kernels.cpu.intrinsics.prefetch import prefetch_run

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["add_bag"]

# A row is prefetched this many lookups before it is read, and rows are added in runs of so many.
_AHEAD, _RUN = np.uint64(16), np.uint64(16)
_8, _16, _32 = np.uint64(8), np.uint64(16), np.uint64(32)


def _adding(num_columns: int) -> Any:
    """The intrinsic that adds so many columns of rows."""

    @intrinsic  # type: ignore[untyped-decorator]  # numba's
    def add_columns(
        _context: Any,
        sums: Any,
        to: Any,
        flat: Any,
        column: Any,
        stride: Any,
        ids: Any,
        factors: Any,
        first: Any,
        end: Any,
    ) -> Any:
        """In a kernel: add columns of the rows `ids[first:end]` to `sums[to:]`, unchecked.

        Args:
            sums: One-dimensional, contiguous, floating point, like all arrays here.
            to: Unsigned, like all numbers here.
            flat: The rows, in the dtype of `sums`; must not overlap it.
            column: The first column, as its position in row 0.
            stride: How far the rows of two ids that follow each other are apart.
            ids: Integers of any kind.
            factors: A factor for each id, in the dtype of `sums`; None for 1. Each product is
                rounded before it is added.
            first: The first id.
            end: The end of the ids.
        """
        has_factors = not isinstance(factors, types.NoneType)
        arrays = [sums, flat, ids, *([factors] if has_factors else [])]
        if not all(
            isinstance(array_type, types.Array) and array_type.layout == "C"
            for array_type in arrays
        ):
            return None
        if any(array_type.dtype != sums.dtype for array_type in arrays if array_type is not ids):
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def pointer_to(array: int, index: Any) -> Any:
                kind = context.make_array(signature.args[array])
                return builder.gep(kind(context, builder, arguments[array]).data, [index])

            number = context.get_data_type(sums.dtype)
            vector, itemsize = ir.VectorType(number, num_columns), context.get_abi_sizeof(number)

            def vector_at(pointer: Any) -> Any:  # aligned like a single number
                return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=itemsize)

            sums_at, row_0 = pointer_to(0, arguments[1]), pointer_to(2, arguments[3])
            total = cgutils.alloca_once_value(builder, vector_at(sums_at))  # becomes registers
            one = ir.Constant(ir.IntType(64), 1)
            with cgutils.for_range_slice(builder, arguments[7], arguments[8], one, inc=True) as (
                position,
                _,
            ):
                row = builder.load(pointer_to(5, position))
                row = context.cast(builder, row, ids.dtype, types.uint64)
                added = vector_at(builder.gep(row_0, [builder.mul(row, arguments[4])]))
                if has_factors:
                    factor = builder.load(pointer_to(6, position))
                    added = builder.fmul(_repeated(builder, factor, vector), added)
                builder.store(builder.fadd(builder.load(total), added), total)
            sums_at = builder.bitcast(sums_at, vector.as_pointer())
            builder.store(builder.load(total), sums_at, align=itemsize)
            return context.get_dummy_value()

        size = types.uint64
        return types.void(sums, size, flat, size, size, ids, factors, size, size), generate

    return add_columns


def _repeated(builder: Any, number: Any, vector: Any) -> Any:
    """A vector of one number."""
    index_type = ir.IntType(32)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), number, index_type(0))
    zeros = ir.Constant(ir.VectorType(index_type, vector.count), None)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


_add_8, _add_16, _add_32 = map(_adding, (8, 16, 32))


@inlined_part
def add_bag(
    sums: NDArray[Any],
    to: np.uint64,
    flat: NDArray[Any],
    base: np.uint64,
    dim: np.uint64,
    stride: np.uint64,
    line: np.uint64,
    ids: NDArray[Any],
    factors: Any,
    first: np.uint64,
    end: np.uint64,
    last: np.uint64,
) -> None:
    """In a kernel: add the rows `ids[first:end]` of a table to `sums[to : to + dim]`.

    Args:
        sums: Contiguous, like all arrays here, and of a floating dtype.
        to: Where the sums begin.
        flat: The rows of all tables, of the dtype of `sums`.
        base: Where the table begins in it.
        dim: D.
        stride: D if ids are rows; 1 if they are the positions in `flat` where rows begin.
        line: How many numbers a cache line holds.
        ids: Rows of the table; all are valid.
        factors: A factor for each id, of the dtype of `sums`; None for 1.
        first: The first id.
        end: The end of the ids.
        last: The end of the ids of which rows may be prefetched.
    """
    while first < end:
        until = min(first + _RUN, end)
        for position in range(first, until):
            if position + _AHEAD < last:
                prefetch_run(flat, base + np.uint64(ids[position + _AHEAD]) * stride, dim, line)
        column = np.uint64(0)
        while column + _32 <= dim:
            _add_32(sums, to + column, flat, base + column, stride, ids, factors, first, until)
            column += _32
        if column + _16 <= dim:
            _add_16(sums, to + column, flat, base + column, stride, ids, factors, first, until)
            column += _16
        if column + _8 <= dim:
            _add_8(sums, to + column, flat, base + column, stride, ids, factors, first, until)
            column += _8
        if column < dim:
            for position in range(first, until):
                source = base + np.uint64(ids[position]) * stride
                for d in range(column, dim):
                    if factors is None:
                        sums[to + d] += flat[source + d]
                    else:
                        sums[to + d] += factors[position] * flat[source + d]
        first = until
