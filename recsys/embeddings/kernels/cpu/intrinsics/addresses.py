"""Passes a tensor to a kernel by its address.

For tensors that are new at every step: making a numpy array of one takes long compared with a small
kernel, while its address is available at once. The caller must keep the tensor alive until the
kernel returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from recsys._support.jit import kernel_part

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


@kernel_part
def array_at(address: int, length: int, like: NDArray[Any]) -> Any:
    """In a kernel: the memory at an address as an array, (length,).

    Args:
        address: From `Tensor.data_ptr`.
        length: Number of elements.
        like: An array of the elements' dtype.
    """
    return carray(_pointer(address), (length,), like.dtype)
