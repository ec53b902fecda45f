"""How an optimizer of torch's kind is read: its settings as a formula, its state by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from recsys.embeddings.optimizer import RowOptimizer

__all__ = ["Settings", "Translation"]


class Settings(NamedTuple):
    """What the settings of a param group say.

    Attributes:
        formula: How rows are updated.
        state_sizes: Numbers per row of every state array, by the optimizer's name of it.
        row_states: Of those: which are one-dimensional, (E,).
        rate_and_eps: What the formula makes of the learning rate at the first step.
    """

    formula: RowOptimizer
    state_sizes: dict[str, int]
    row_states: frozenset[str]
    rate_and_eps: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Translation:
    """How an optimizer's `param_groups` and `state` are read.

    Attributes:
        formula: From a param group to how its rows are updated.
        state_names: Under which name the optimizer keeps each of the formula's state arrays; what
            is not here has the formula's own name.
        learning_rate: Of a param group at a step, the first being 1.
        counts_steps: Whether `state[table]["step"]` is kept. Of rows that are rounded by chance it
            is in any case.
        no_step: What it is before the first step; a tensor where the optimizer keeps one.
        has_columns: Whether one number per row is (E, 1), not (E,).
        is_for_sparse: Whether the optimizer updates rows by another formula where their gradient is
            dense.
        rule: What is done differently from the optimizer, and why; mostly "".
    """

    formula: Callable[[Mapping[str, Any]], RowOptimizer]
    state_names: Mapping[str, str]
    learning_rate: Callable[[Mapping[str, Any], int], float]
    counts_steps: bool
    no_step: int | Tensor = 0
    has_columns: bool = False
    is_for_sparse: bool = False
    rule: str = ""

    def read(self, settings: Mapping[str, Any], dim: int) -> Settings:
        """What the settings of a param group say of rows of a dim."""
        formula = self.formula(settings)
        sizes = formula.state_sizes(dim)
        rows = () if self.has_columns else formula.row_states
        rate, eps = formula.rate_and_eps(self.learning_rate(settings, 1), 1)
        return Settings(
            formula,
            {self.state_names.get(name, name): size for name, size in sizes.items()},
            frozenset(self.state_names.get(name, name) for name in rows),
            (float(rate), float(eps)),  # where they were tensors, which may be changed, no more
        )
