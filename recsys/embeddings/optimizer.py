"""How rows move, given the sum of their gradients.

    SGD              w <- w - lr g
    Adagrad          s <- s + g * g               w <- w - lr g / (sqrt(s) + eps)
    RowWiseAdagrad   s <- s + mean over d of g*g  w <- w - lr g / (sqrt(s) + eps)

`s` starts at zero and is a number per column for Adagrad, one per row for RowWiseAdagrad. Only rows
that were looked up move: a row looked up several times in a step moves once, by the sum.

References:
    Duchi et al. (2011), Adaptive Subgradient Methods for Online Learning and Stochastic
    Optimization; `torch.optim.SGD` and `torch.optim.Adagrad` for sparse gradients; TorchRec's
    `RowWiseAdagrad`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SGD", "Adagrad", "RowOptimizer", "RowWiseAdagrad", "update_reference"]


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Stochastic gradient descent; no state.

    Raises:
        ValueError: `lr` is negative or not finite.
    """

    lr: float

    def __post_init__(self) -> None:
        _require_finite("lr", self.lr)

    def state_size(self, dim: int) -> int:
        """Numbers a row's state has."""
        return 0


@dataclass(frozen=True, kw_only=True)
class Adagrad:
    """A step per column, smaller the more the column has moved.

    Attributes:
        lr: Learning rate.
        eps: Added to the denominator; torch's default, where FBGEMM's is 1e-8.

    Raises:
        ValueError: `lr` or `eps` is negative or not finite.
    """

    lr: float
    eps: float = 1e-10

    def __post_init__(self) -> None:
        _require_finite("lr", self.lr)
        _require_finite("eps", self.eps)

    def state_size(self, dim: int) -> int:
        """Numbers a row's state has."""
        return dim


@dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad:
    """Adagrad with one step for the whole row: a dim-th of the state.

    Attributes:
        lr: Learning rate.
        eps: Added to the denominator.

    Raises:
        ValueError: `lr` or `eps` is negative or not finite.
    """

    lr: float
    eps: float = 1e-10

    def __post_init__(self) -> None:
        _require_finite("lr", self.lr)
        _require_finite("eps", self.eps)

    def state_size(self, dim: int) -> int:
        """Numbers a row's state has."""
        return 1


RowOptimizer = SGD | Adagrad | RowWiseAdagrad


def update_reference(
    optimizer: RowOptimizer, weight: Tensor, state: Tensor, rows: Tensor, gradients: Tensor
) -> None:
    """Move rows in place, in plain PyTorch.

    Args:
        optimizer: The formula.
        weight: The table.
        state: Its state, zeros at first.
        rows: The row each gradient belongs to; a row may occur several times.
        gradients: In lookup order.

    Shape:
        weight (E, D); state (E, state_size(D)); rows (N,) int64; gradients (N, D).
    """
    distinct, inverse = torch.unique(rows, return_inverse=True)
    summed = gradients.new_zeros(len(distinct), weight.shape[1]).index_add_(0, inverse, gradients)
    if isinstance(optimizer, SGD):
        weight[distinct] -= optimizer.lr * summed
        return
    squares = summed * summed
    state[distinct] += squares if isinstance(optimizer, Adagrad) else squares.mean(1, keepdim=True)
    weight[distinct] -= optimizer.lr * summed / (state[distinct].sqrt() + optimizer.eps)


def _require_finite(name: str, value: float) -> None:
    if not (isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be finite and at least 0, got {value}")
