"""A lower bound for the time of a drop-in for `nn.EmbeddingBag`: each row is only touched.

    forward   calls an `nn.Module`, which copies one row for each lookup under autograd
    update    adds each lookup's gradient to its row in place, and to the row's state

It leaves out everything that makes an update correct. It does not sum the gradients of equal rows,
so a row is updated once for each lookup. It computes no formula, and it does not check the tables.
It is not a lower bound if few rows get most lookups: a correct update then sums their gradients and
writes each of these rows once, which may be faster.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import prange
from torch import nn

from recsys._support.jit import ParallelKernel, num_parts, parallel_kernel
from recsys.bench.parts.bare_kernels import BareKernels, bags_of
from recsys.embeddings.kernels.cpu.intrinsics.prefetch import LINE_BYTES, prefetch
from recsys.embeddings.kernels.cpu.intrinsics.turns import next_turn
from recsys.embeddings.optimizer import SGD, Adagrad, RowWiseAdagrad

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.batch import JaggedIds

__all__ = ["TouchedRows"]

_SGD, _ADAGRAD, _ROWWISE_ADAGRAD = range(3)
_KINDS = {SGD: _SGD, Adagrad: _ADAGRAD, RowWiseAdagrad: _ROWWISE_ADAGRAD}
_AHEAD = np.uint64(8)


class TouchedRows(nn.Module):
    """Looks up in float32 tables of one dim, and touches the rows that were looked up.

    Args:
        kernels: Bare kernels on these tables, with one lookup per table.
    """

    def __init__(self, kernels: BareKernels) -> None:
        super().__init__()
        self._kernels = kernels
        space, lookups = kernels.space, kernels.lookups
        _, (self._state, _), bases_3T = space.join_states(kernels.states)
        self._bases_4L, self._state_bases_L = lookups.placed_in(space), bases_3T[1, lookups.tables]
        self._rate = np.float32(kernels.rates_T2[0, 0])
        self._kernel = _touch_kernel(_KINDS[type(kernels.formula)], space.dim)

    def forward(self, features: JaggedIds) -> Tensor:
        """Pooled rows, (B, W); `update` needs their gradient."""
        return self._kernels.look_up(bags_of(features))

    def update(self) -> None:
        """Add the gradient from backward to the row of every lookup."""
        entry = self._kernels.take_entry()
        self._kernel(
            self._kernels.space.flat,
            self._state,
            self._state_bases_L,
            self._bases_4L,
            entry.bags.values,
            entry.gradient.numpy().reshape(-1),
            self._rate,
            entry.bags.batch_size,
            entry.lookups.width,
            num_parts(),
        )


@cache
def _touch_kernel(kind: int, compiled_dim: int) -> ParallelKernel[..., None]:
    line = np.uint64(LINE_BYTES // np.dtype(np.float32).itemsize)

    @parallel_kernel
    def touch(
        flat: NDArray[Any],
        state: NDArray[Any],
        state_bases_L: NDArray[np.uint64],
        lookups_4L: NDArray[np.uint64],
        values_N: NDArray[Any],
        gradient: NDArray[Any],
        rate: float,
        num_samples: int,
        width: int,
        num_parts: int,
    ) -> None:
        """Each part is one thread, which takes tables until none is left."""
        turns = np.zeros(1, np.int64)
        for _ in prange(num_parts):
            dim = np.uint64(compiled_dim)
            while True:
                lookup = next_turn(turns)
                if lookup >= lookups_4L.shape[1]:
                    break
                base, _size, position, source = lookups_4L[:, lookup]
                of_state = state_bases_L[lookup]
                place = position * np.uint64(num_samples)
                end = place + np.uint64(num_samples)
                while place < end:
                    if place + _AHEAD < end:
                        ahead = np.uint64(values_N[place + _AHEAD])
                        for d in range(np.uint64(0), dim, line):
                            prefetch(flat, base + ahead * dim + d)
                            if kind == _ADAGRAD:
                                prefetch(state, of_state + ahead * dim + d)
                        if kind == _ROWWISE_ADAGRAD:
                            prefetch(state, of_state + ahead)
                    row = np.uint64(values_N[place])
                    first = base + row * dim
                    for d in range(dim):
                        flat[first + d] -= rate * gradient[source + d]
                    if kind == _ADAGRAD:
                        for d in range(dim):
                            state[of_state + row * dim + d] += gradient[source + d]
                    if kind == _ROWWISE_ADAGRAD:
                        state[of_state + row] += gradient[source]
                    source += np.uint64(width)
                    place += np.uint64(1)

    return touch
