"""How a torch optimizer is read: its settings as a row optimizer, its state by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from recsys.embeddings.optimizer import RowOptimizer

__all__ = ["Translation"]


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
