"""A floor for what a drop-in for `nn.EmbeddingBag`s does to train: each row is merely touched.

    forward   an `nn.Module` is called, copies one row for each lookup, is found by autograd
    update    each lookup's gradient is added to its row where the row lies, and to the row's state

Left out is what makes an update right: lookups of one row are not brought together, so it moves
once for each of them; no formula is computed; and rows are taken to be where they were, asked for
gradients, and free of others'. Where few rows get most lookups it is no bound: what brings lookups
together writes a row once that is written many times here, and may be faster.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import prange
from torch import nn

from recsys.bench.bare_kernels import BareKernels, bags_of
from recsys.embeddings.kernels.prefetch import LINE_BYTES, prefetch
from recsys.embeddings.kernels.turns import next_turn
from recsys.embeddings.optimizer import SGD, Adagrad, RowWiseAdagrad
from recsys.jit import ParallelKernel, num_parts, parallel_kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.batch import JaggedIds

__all__ = ["TouchedRows"]

_SGD, _ADAGRAD, _ROWWISE_ADAGRAD = range(3)
_KINDS = {SGD: _SGD, Adagrad: _ADAGRAD, RowWiseAdagrad: _ROWWISE_ADAGRAD}
_AHEAD = np.uint64(8)


class TouchedRows(nn.Module):
    """Looks up in float32 tables of one dim, and touches what was looked up.

    Args:
        kernels: Have the tables; of one lookup per table.
    """

    def __init__(self, kernels: BareKernels) -> None:
        super().__init__()
        self._kernels = kernels
        space, lookups = kernels.space, kernels.lookups
        (self._state, _), bases_3T = space.beside(kernels.states)
        self._bases_4L, self._state_bases_L = lookups.placed_in(space), bases_3T[1, lookups.tables]
        self._rate = np.float32(kernels.rates_T2[0, 0])
        self._kernel = _touch_kernel(_KINDS[type(kernels.formula)], space.dim)

    def forward(self, features: JaggedIds) -> Tensor:
        """Pooled rows, (B, W), whose gradient `update` will want."""
        return self._kernels.look_up(bags_of(features))

    def update(self) -> None:
        """Touch the row of every lookup, with the gradient that backward has brought."""
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
        """A part is a thread, which takes tables until none are left."""
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
