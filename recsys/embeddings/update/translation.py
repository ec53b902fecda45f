"""How a torch optimizer is read: its settings as a row optimizer, its state by name."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from recsys.embeddings.optimizer import RowOptimizer


__all__ = ["Columns", "Settings", "Translation"]

# The shape of one row of each state array, () or (size,), by the optimizer's name for the array.
Columns = dict[str, tuple[int, ...]]


class Settings(NamedTuple):
    """The settings of a param group, translated.

    Attributes:
        formula: The update rule of the rows.
        columns: The state arrays.
        rate_and_eps: The formula's rate and eps at the first step.
    """

    formula: RowOptimizer
    columns: Columns
    rate_and_eps: tuple[float, float]

    @property
    def state_sizes(self) -> dict[str, int]:
        """Numbers per row of each state array."""
        return {name: prod(shape) for name, shape in self.columns.items()}


@dataclass(frozen=True, kw_only=True)
class Translation:
    """How to read an optimizer's `param_groups` and `state`.

    Attributes:
        formula: Maps a param group to the update rule of its rows.
        state_names: Maps the formula's state arrays to the optimizer's names. An array that is
            missing here has the same name in both.
        learning_rate: Maps a param group and a step, counted from 1, to the learning rate.
        counts_steps: Whether `state[table]["step"]` is kept. With stochastic rounding it always is.
        no_step: The value of "step" before the first step; a tensor if the optimizer keeps one.
        has_columns: Whether a state with one number per row is (E, 1) instead of (E,).
        is_for_sparse: Whether the optimizer has another update rule for dense gradients.
        rule: How updates differ from the optimizer's, and why; usually "".
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
        """Translate the settings of a param group, for rows of a dim."""
        formula = self.formula(settings)
        flat = () if self.has_columns else formula.row_states
        columns: Columns = {
            self.state_names.get(name, name): () if name in flat else (size,)
            for name, size in formula.state_sizes(dim).items()
        }
        rate, eps = formula.rate_and_eps(self.learning_rate(settings, 1), 1)
        return Settings(
            formula,
            columns,
            (float(rate), float(eps)),  # a tensor could be changed in place later
        )
