"""How rows move, given the sum of their gradients.

    SGD                 w <- w - lr g
    Adagrad             s <- s + g * g                  w <- w - lr g / (sqrt(s) + eps)
    RowWiseAdagrad      s <- s + mean over d of g * g   w <- w - lr g / (sqrt(s) + eps)
    Adam                m <- m + (1 - beta1) (g - m)
                        v <- v + (1 - beta2) (g * g - v)
                        w <- w - lr c m / (sqrt(v) + eps)
    PartialRowWiseAdam  m as above
                        v <- v + (1 - beta2) (mean over d of g * g - v)
                        w <- w - lr c m / (sqrt(v) + eps sqrt(1 - beta2^t))

    c = sqrt(1 - beta2^t) / (1 - beta1^t)   in the t-th step, counted from 1

`s`, `m` and `v` start at zero; `m` and the state of Adagrad and Adam are a number per column, the
others one per row. Only rows that were looked up move, and only their state changes: a row looked
up several times in a step moves once, by the sum; one that was not rests, under Adam too ("lazy").

The two Adams differ in what `eps` is added to, each as its model has it: `torch.optim.SparseAdam`
adds it to sqrt(v) before the correction `c`, FBGEMM behind it.

References:
    Duchi et al. (2011), Adaptive Subgradient Methods for Online Learning and Stochastic
    Optimization; Kingma and Ba (2015), Adam: A Method for Stochastic Optimization, Algorithm 1;
    `torch.optim.SGD`, `Adagrad` and `SparseAdam` for sparse gradients; TorchRec's `RowWiseAdagrad`
    and `PartialRowWiseAdam`, as FBGEMM has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, sqrt
from typing import TYPE_CHECKING, ClassVar

import torch

from recsys.embeddings.kernels.rounding import fold, round_reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "PartialRowWiseAdam",
    "RowOptimizer",
    "RowWiseAdagrad",
    "row_steps",
    "update_reference",
]


class AbstractRowOptimizer:
    """What every formula tells of itself; its fields are its settings."""

    _PER_COLUMN: ClassVar[tuple[str, ...]] = ()
    _PER_ROW: ClassVar[tuple[str, ...]] = ()

    def state_sizes(self, dim: int) -> dict[str, int]:
        """Numbers per row of every state array, by TorchRec's name of it."""
        return dict.fromkeys(self._PER_COLUMN, dim) | dict.fromkeys(self._PER_ROW, 1)

    @property
    def row_states(self) -> tuple[str, ...]:
        """Names of state arrays that are one-dimensional, (E,); others are (E, D)."""
        return self._PER_ROW

    def rate_and_eps(self, lr: float, step: int) -> tuple[float, float]:
        """What `row_update` takes for a table: the factor of its step, and its eps.

        Args:
            lr: Of the table's param group, which may have changed since the formula was made.
            step: Number of the table's update, from 1.
        """
        return lr, getattr(self, "eps", 0.0)


@dataclass(frozen=True, kw_only=True)
class SGD(AbstractRowOptimizer):
    """Stochastic gradient descent; no state.

    Raises:
        ValueError: `lr` is negative or not finite.
    """

    lr: float

    def __post_init__(self) -> None:
        _require_finite("lr", self.lr)


@dataclass(frozen=True, kw_only=True)
class Adagrad(AbstractRowOptimizer):
    """A step per column, smaller the more the column has moved.

    Attributes:
        lr: Learning rate.
        eps: Added to the denominator; torch's default, where FBGEMM's is 1e-8.

    Raises:
        ValueError: `lr` or `eps` is negative or not finite.
    """

    lr: float
    eps: float = 1e-10

    _PER_COLUMN = ("momentum1",)

    def __post_init__(self) -> None:
        _require_finite("lr", self.lr)
        _require_finite("eps", self.eps)


@dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad(AbstractRowOptimizer):
    """Adagrad with one step for the whole row: a dim-th of the state.

    Attributes:
        lr: Learning rate.
        eps: Added to the denominator.

    Raises:
        ValueError: `lr` or `eps` is negative or not finite.
    """

    lr: float
    eps: float = 1e-10

    _PER_ROW = ("momentum1",)

    def __post_init__(self) -> None:
        _require_finite("lr", self.lr)
        _require_finite("eps", self.eps)


@dataclass(frozen=True, kw_only=True)
class Adam(AbstractRowOptimizer):
    """A step per column by moving averages of its gradients; rows not looked up rest.

    Attributes:
        lr: Learning rate.
        betas: How much of the averages of `g` and of `g * g` stays at each step.
        eps: Added to the denominator before the averages are corrected for their start at zero.

    Raises:
        ValueError: `lr` or `eps` is negative or not finite, or a beta is not in [0, 1).
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    _PER_COLUMN = ("momentum1", "exp_avg_sq")

    def __post_init__(self) -> None:
        _require_finite("lr", self.lr)
        _require_betas(self.betas)
        _require_finite("eps", self.eps)

    def rate_and_eps(self, lr: float, step: int) -> tuple[float, float]:
        """As above, with the correction of the step; eps is added before it."""
        return lr * _correction(self.betas, step), self.eps


@dataclass(frozen=True, kw_only=True)
class PartialRowWiseAdam(AbstractRowOptimizer):
    """Adam with one average of squares for the whole row: half of the state.

    Attributes:
        lr: Learning rate.
        betas: How much of the averages of `g` and of `g * g` stays at each step.
        eps: Added to the denominator after the averages are corrected for their start at zero.

    Raises:
        ValueError: `lr` or `eps` is negative or not finite, or a beta is not in [0, 1).
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    _PER_COLUMN, _PER_ROW = ("momentum1",), ("exp_avg_sq",)

    def __post_init__(self) -> None:
        _require_finite("lr", self.lr)
        _require_betas(self.betas)
        _require_finite("eps", self.eps)

    def rate_and_eps(self, lr: float, step: int) -> tuple[float, float]:
        """As above, with the correction of the step; eps is added behind it."""
        # Dividing sqrt(v) by a number before eps is added is multiplying eps by that number.
        return lr * _correction(self.betas, step), self.eps * sqrt(1 - self.betas[1] ** step)


RowOptimizer = SGD | Adagrad | RowWiseAdagrad | Adam | PartialRowWiseAdam


def update_reference(
    optimizer: RowOptimizer,
    weight: Tensor,
    states: Sequence[Tensor],
    rows: Tensor,
    gradients: Tensor,
    step: int = 1,
    key: int | None = None,
) -> None:
    """Move rows in place, in plain PyTorch.

    A table of 16 bits is computed in float32 and rounded.

    Args:
        optimizer: The formula.
        weight: The table.
        states: Its state, zeros at first, in the order of `state_sizes`.
        rows: The row each gradient belongs to; a row may occur several times.
        gradients: In lookup order.
        step: Number of the step, from 1.
        key: Of a table of 16 bits: its `table_key`, to round stochastically; None for to nearest.

    Shape:
        weight (E, D); states (E, size) each; rows (N,) int64; gradients (N, D), the states and
        they in the dtype that is computed in.
    """
    distinct, inverse = torch.unique(rows, return_inverse=True)
    summed = gradients.new_zeros(len(distinct), weight.shape[1]).index_add_(0, inverse, gradients)
    rate, eps = optimizer.rate_and_eps(optimizer.lr, step)
    change, moved = row_steps(optimizer, [state[distinct] for state in states], summed, rate, eps)
    for state, values in zip(states, moved, strict=True):
        state[distinct] = values
    weight[distinct] = _stored(
        weight[distinct].to(summed.dtype) - change,
        weight.dtype,
        None if key is None else [fold(key, row) for row in distinct.tolist()],
    )


def row_steps(
    optimizer: RowOptimizer,
    states: Sequence[Tensor],
    summed: Tensor,
    rate: float | Tensor,
    eps: float | Tensor,
) -> tuple[Tensor, list[Tensor]]:
    """The step of some rows by plain PyTorch: what is taken from each, and its state behind it.

    Args:
        optimizer: The formula.
        states: State of the rows, in the order of `state_sizes`.
        summed: The sum of each row's gradients.
        rate: Of `rate_and_eps`.
        eps: Likewise.

    Shape:
        states (U, size) each; summed (U, D); rate and eps numbers, or (U, 1); results as summed and
        states.
    """
    if isinstance(optimizer, SGD):
        return rate * summed, []
    squares = summed * summed
    if isinstance(optimizer, RowWiseAdagrad | PartialRowWiseAdam):
        squares = squares.mean(1, keepdim=True)
    if isinstance(optimizer, Adagrad | RowWiseAdagrad):
        direction = summed
        moved = [states[0] + squares]
    else:
        beta1, beta2 = optimizer.betas
        direction = states[0] + (1 - beta1) * (summed - states[0])
        moved = [direction, states[1] + (1 - beta2) * (squares - states[1])]
    divisor = moved[-1].sqrt() + eps
    # In the kernel's order, so that both give the same bits.
    if isinstance(optimizer, Adagrad):
        return rate * direction / divisor, moved
    if isinstance(optimizer, Adam):
        return rate * (direction / divisor), moved
    rates = rate if isinstance(rate, torch.Tensor) else torch.full_like(divisor, rate)
    return rates / divisor * direction, moved


def _stored(values: Tensor, dtype: torch.dtype, keys: Sequence[int] | None) -> Tensor:
    is_narrow = dtype in (torch.bfloat16, torch.float16)
    return round_reference(values, dtype, keys) if is_narrow else values


def _correction(betas: tuple[float, float], step: int) -> float:
    """The averages' start at zero, taken out of the step."""
    return sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step)


def _require_finite(name: str, value: float) -> None:
    if not (isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be finite and at least 0, got {value}")


def _require_betas(betas: Sequence[float]) -> None:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
