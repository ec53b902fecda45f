"""Launches of Triton kernels that take little of the host's time.

On every launch Triton binds the arguments by name, reads its settings from the environment, and
compares the constants of the module with those of the compilation. That takes the host about as
long as the rest of the launch. Here only the first launch with arguments of some kind goes through
Triton; later ones call the kernel that Triton compiled for it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor
from triton.runtime import driver

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

__all__ = ["Launched", "launched"]

_ALIGNMENT = 16  # what Triton asks of addresses and integers: bytes, or a divisor
_INT32 = 2**31  # what is at least as large takes 64 bits


def launched(kernel: Any) -> Any:
    """A decorator of kernels that the host launches, above that of Triton.

    Such a kernel takes its tensors and signed integers of 64 bits by position, then constants and
    options by name, the constants after all other parameters. Its grid has one dimension. Settings
    of Triton that change after a first launch have no effect on the next.

    The kernel itself in Triton's interpreter, and on ROCm, where Triton compiles another kernel for
    tensors of less than 2 GiB.
    """
    is_launched = isinstance(kernel, triton.JITFunction) and torch.version.hip is None
    return Launched(kernel) if is_launched else kernel


class Launched:
    """A kernel, and what Triton compiled of it; see `launched`.

    Attributes:
        kernel: As Triton has it.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        # By kind of arguments: the compiled kernel, and the constants in the order of parameters.
        self._known: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
        self._constants = [param.name for param in kernel.params if param.is_constexpr]

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return partial(self._launch, grid[0])

    def _launch(self, num_programs: int, *arguments: Tensor | int | None, **named: Any) -> None:
        device = driver.active.get_current_device()
        kind = device, *map(_kind_of, arguments), *named.items()
        known = self._known.get(kind)
        if known is not None:
            compiled, constants = known
            compiled[num_programs, 1, 1](*arguments, *constants)
            return
        compiled = self.kernel[num_programs,](*arguments, **named)
        if compiled is not None:  # a hook of Triton's may leave out the compilation
            self._known[kind] = compiled, tuple(named[name] for name in self._constants)


def _kind_of(argument: Tensor | int | None) -> Hashable:
    """What of an argument decides which kernel Triton compiles, or more than that."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % _ALIGNMENT == 0
    if argument is None:
        return None
    is_short = -_INT32 <= argument < _INT32
    return type(argument), argument == 1, argument % _ALIGNMENT == 0, is_short  # bool has one bit
