"""Memory of a tensor, told to a kernel by its address.

For what is new at every step: a numpy array of it, or a flat view of rows that lie apart, takes
long to make beside a small kernel, and its address is there at once. Whoever passes one keeps the
tensor until the kernel is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from recsys._support.jit import kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["array_at"]


@intrinsic  # type: ignore[untyped-decorator]  # numba's
def _pointer(_context: Any, address: Any) -> Any:
    if not isinstance(address, types.Integer):
        return None

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(address), generate


@kernel
def array_at(address: int, length: int, like: NDArray[Any]) -> Any:
    """In a kernel: the numbers from an address on, as an array, (length,).

    Args:
        address: What `Tensor.data_ptr` says.
        length: How many numbers there are.
        like: Has their dtype.
    """
    return carray(_pointer(address), (length,), like.dtype)
