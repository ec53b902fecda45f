"""The next task, for kernels whose threads take tasks one by one.

Tasks shared out beforehand are done when the slowest thread is: the one that was given the rows
that no cache held, or that the system let wait. What is computed must not depend on who does it.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

__all__ = ["next_turn"]


@intrinsic  # type: ignore[untyped-decorator]  # numba's
def next_turn(_context: Any, turns: Any) -> Any:
    """In a kernel: the number that `turns[0]` held, raised by one before any other thread looks.

    Args:
        turns: (1,) int64, zero at first.
    """
    if not isinstance(turns, types.Array) or turns.dtype != types.int64:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        one = context.get_constant(types.int64, 1)
        return builder.atomic_rmw("add", data, one, "monotonic")

    return types.int64(turns), generate
