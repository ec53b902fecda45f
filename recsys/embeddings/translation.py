"""How an optimizer of torch's kind is read: its settings as a formula, its state by name."""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.optimizer import RowOptimizer

__all__ = ["Settings", "SettingsReader", "Translation"]


class Settings(NamedTuple):
    """What the settings of a param group say.

    Attributes:
        formula: How rows move.
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
        formula: From a param group to how its rows move.
        state_names: Under which name the optimizer keeps each of the formula's state arrays; what
            is not here has the formula's own name.
        learning_rate: Of a param group at a step, the first being 1.
        counts_steps: Whether `state[table]["step"]` is kept. Of rows that are rounded by chance it
            is in any case.
        no_step: What it is before the first step; a tensor where the optimizer keeps one.
        has_columns: Whether one number per row is (E, 1), not (E,).
        is_for_sparse: Whether the optimizer moves rows by another formula where their gradient is
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


class SettingsReader:
    """Reads the settings of a param group for the tables of one table group.

    Every step asks, so what was read is kept until a setting is another object.

    Args:
        translation: How settings are read.
        dim: D.
        num_tables: T.
    """

    def __init__(self, translation: Translation, dim: int, num_tables: int) -> None:
        self._translation, self._dim, self._num_tables = translation, dim, num_tables
        self._known: _Read | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles read anew."""
        return self.__dict__ | {"_known": None}

    def read(self, settings: Mapping[str, Any]) -> tuple[Settings, NDArray[np.float64]]:
        """What the settings say, and the rates of tables that count no steps, (T, 2).

        Args:
            settings: The param group.
        """
        known, names, values = self._known, list(settings), list(settings.values())
        if known is not None and known.names == names and all(map(is_, known.values, values)):
            return known.found, known.rates
        found = self._translation.read(settings, self._dim)
        rates_T2 = np.tile(found.rate_and_eps, (self._num_tables, 1))
        # What may be changed in place, as a tensor may, is the same object afterwards.
        are_fixed = all(_is_fixed(settings[name]) for name in names if name not in _OF_TABLES)
        self._known = _Read(names, values, found, rates_T2) if are_fixed else None
        return found, rates_T2


class _Read(NamedTuple):
    """Settings when they were last read, and what they said."""

    names: list[str]
    values: list[Any]
    found: Settings
    rates: NDArray[np.float64]  # not to be written to


_OF_TABLES = ("params", "param_names")  # in a param group, what says nothing of the formula


def _is_fixed(value: Any) -> bool:
    """Whether a setting has the same value as long as it is the same object."""
    values = value if isinstance(value, tuple) else (value,)
    return all(isinstance(each, int | float | str | None) for each in values)
