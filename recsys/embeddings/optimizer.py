"""The formulas that update rows, given the sum g of a row's gradients.

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

`s`, `m` and `v` start at zero. `m` and the state of Adagrad and Adam have one number per column;
the others have one per row. Only rows that were looked up are updated, with their state. A row that
is looked up several times in a step is updated once, by the sum. Other rows do not change, with
Adam neither ("lazy" Adam).

The two Adams add `eps` at different places, like their models: `torch.optim.SparseAdam` adds it to
sqrt(v) before the correction `c`, FBGEMM after it.

References:
    Duchi et al. (2011), Adaptive Subgradient Methods for Online Learning and Stochastic
    Optimization; Kingma and Ba (2015), Adam: A Method for Stochastic Optimization, Algorithm 1;
    `torch.optim.SGD`, `Adagrad` and `SparseAdam` for sparse gradients; TorchRec's `RowWiseAdagrad`
    and `PartialRowWiseAdam`, as FBGEMM has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, sqrt
from typing import ClassVar

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "PartialRowWiseAdam",
    "RowOptimizer",
    "RowWiseAdagrad",
    "require_formula",
    "shown_optimizer",
]


class AbstractRowOptimizer:
    """Base of the formulas; their dataclass fields are their settings."""

    _PER_COLUMN: ClassVar[tuple[str, ...]] = ()
    _PER_ROW: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name in ("lr", "eps"):
            value = getattr(self, name, 0.0)
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and at least 0, got {value}")
        betas = getattr(self, "betas", (0.0, 0.0))
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")

    def state_sizes(self, dim: int) -> dict[str, int]:
        """Numbers per row in each state array, by TorchRec's name of the array.

        Args:
            dim: D, columns of the table.
        """
        return dict.fromkeys(self._PER_COLUMN, dim) | dict.fromkeys(self._PER_ROW, 1)

    @property
    def row_states(self) -> tuple[str, ...]:
        """Names of state arrays that are one-dimensional, (E,); others are (E, D)."""
        return self._PER_ROW

    def rate_and_eps(self, lr: float, step: int) -> tuple[float, float]:
        """The two numbers that `row_update` needs for a table: the factor of the step, and eps.

        Args:
            lr: Current learning rate of the table's param group.
            step: Number of the table's update, from 1.
        """
        return lr, getattr(self, "eps", 0.0)


@dataclass(frozen=True, kw_only=True)
class SGD(AbstractRowOptimizer):
    """Stochastic gradient descent; no state.

    Attributes:
        lr: Learning rate.

    Raises:
        ValueError: `lr` is negative or not finite.
    """

    lr: float


@dataclass(frozen=True, kw_only=True)
class Adagrad(AbstractRowOptimizer):
    """A step size per column, which falls with the sum of the column's squared gradients.

    Attributes:
        lr: Learning rate.
        eps: Added to the denominator. The default is torch's; FBGEMM's is 1e-8.

    Raises:
        ValueError: `lr` or `eps` is negative or not finite.
    """

    lr: float
    eps: float = 1e-10

    _PER_COLUMN = ("momentum1",)


@dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad(AbstractRowOptimizer):
    """Adagrad with one step size per row: its state is 1/D of Adagrad's.

    Attributes:
        lr: Learning rate.
        eps: Added to the denominator.

    Raises:
        ValueError: `lr` or `eps` is negative or not finite.
    """

    lr: float
    eps: float = 1e-10

    _PER_ROW = ("momentum1",)


@dataclass(frozen=True, kw_only=True)
class Adam(AbstractRowOptimizer):
    """Adam for rows that are looked up; other rows do not change ("lazy" Adam).

    Attributes:
        lr: Learning rate.
        betas: Decay rates of the averages of `g` and of `g * g`.
        eps: Added to the denominator before the averages are corrected for their start at zero.

    Raises:
        ValueError: `lr` or `eps` is negative or not finite, or a beta is not in [0, 1).
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    _PER_COLUMN = ("momentum1", "exp_avg_sq")

    def rate_and_eps(self, lr: float, step: int) -> tuple[float, float]:
        """The factor includes the correction `c`; eps is added before it.

        Args:
            lr: As in `AbstractRowOptimizer`.
            step: As in `AbstractRowOptimizer`.
        """
        return lr * _correction(self.betas, step), self.eps


@dataclass(frozen=True, kw_only=True)
class PartialRowWiseAdam(AbstractRowOptimizer):
    """Adam with one average of squares per row: about half of Adam's state.

    Attributes:
        lr: Learning rate.
        betas: Decay rates of the averages of `g` and of `g * g`.
        eps: Added to the denominator after the averages are corrected for their start at zero.

    Raises:
        ValueError: `lr` or `eps` is negative or not finite, or a beta is not in [0, 1).
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    _PER_COLUMN, _PER_ROW = ("momentum1",), ("exp_avg_sq",)

    def rate_and_eps(self, lr: float, step: int) -> tuple[float, float]:
        """The factor includes the correction `c`; eps is scaled as if it were added after it.

        Args:
            lr: As in `AbstractRowOptimizer`.
            step: As in `AbstractRowOptimizer`.
        """
        return lr * _correction(self.betas, step), self.eps * sqrt(1 - self.betas[1] ** step)


RowOptimizer = SGD | Adagrad | RowWiseAdagrad | Adam | PartialRowWiseAdam


def require_formula(optimizer: object) -> None:
    """Check that the `optimizer=` of a module is a formula or None.

    Raises:
        TypeError: it is something else, such as a name, a class or a torch optimizer.
    """
    if optimizer is not None and not isinstance(optimizer, RowOptimizer):
        raise TypeError(
            "optimizer must be a formula, such as recsys.embeddings.SGD(lr=0.1), or None, got "
            f"{shown_optimizer(optimizer)}; torch optimizers go to recsys.accelerate(model, "
            "optimizer=...)"
        )


def shown_optimizer(value: object) -> str:
    """What was given in place of an optimizer, for errors."""
    if isinstance(value, type):
        return f"the class {value.__name__} instead of an object of it"
    return repr(value) if isinstance(value, str) else f"an object of type {type(value).__name__}"


def _correction(betas: tuple[float, float], step: int) -> float:
    """The correction `c` for averages that start at zero."""
    return sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step)
