"""How a torch optimizer is read: its settings as a row optimizer, its state by name."""

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
    """The settings of a param group, translated.

    Attributes:
        formula: The update rule of the rows.
        state_sizes: Numbers per row of each state array, by the optimizer's name for the array.
        row_states: The state arrays that are one-dimensional, (E,).
        rate_and_eps: The formula's rate and eps at the first step.
    """

    formula: RowOptimizer
    state_sizes: dict[str, int]
    row_states: frozenset[str]
    rate_and_eps: tuple[float, float]


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
        sizes = formula.state_sizes(dim)
        rows = () if self.has_columns else formula.row_states
        rate, eps = formula.rate_and_eps(self.learning_rate(settings, 1), 1)
        return Settings(
            formula,
            {self.state_names.get(name, name): size for name, size in sizes.items()},
            frozenset(self.state_names.get(name, name) for name in rows),
            (float(rate), float(eps)),  # a tensor could be changed in place later
        )


class SettingsReader:
    """Reads the settings of a param group for the tables of one table group.

    Every step reads them, so the result is cached until a setting is a different object.

    Args:
        translation: How settings are read.
        dim: D.
        num_tables: T.
    """

    def __init__(self, translation: Translation, dim: int, num_tables: int) -> None:
        self._translation, self._dim, self._num_tables = translation, dim, num_tables
        self._known: _Read | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the cache out of copies and pickles."""
        return self.__dict__ | {"_known": None}

    def read(self, settings: Mapping[str, Any]) -> tuple[Settings, NDArray[np.float64]]:
        """The settings, and rate and eps of every table that counts no steps, (T, 2).

        Args:
            settings: The param group.
        """
        known, names, values = self._known, list(settings), list(settings.values())
        if known is not None and known.names == names and all(map(is_, known.values, values)):
            return known.found, known.rates
        found = self._translation.read(settings, self._dim)
        rates_T2 = np.tile(found.rate_and_eps, (self._num_tables, 1))
        # A tensor may be changed in place and stay the same object, so it is never cached.
        can_cache = all(_is_immutable(settings[name]) for name in names if name not in _IGNORED)
        self._known = _Read(names, values, found, rates_T2) if can_cache else None
        return found, rates_T2


class _Read(NamedTuple):
    """The settings when they were last read, and the result."""

    names: list[str]
    values: list[Any]
    found: Settings
    rates: NDArray[np.float64]  # shared with the caller, who must not write to it


_IGNORED = ("params", "param_names")  # keys of a param group that do not affect the formula


def _is_immutable(value: Any) -> bool:
    """Whether a setting has the same value as long as it is the same object."""
    values = value if isinstance(value, tuple) else (value,)
    return all(isinstance(each, int | float | str | None) for each in values)
