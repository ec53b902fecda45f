"""Gradients with nan or inf in them, which rows would keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from recsys.embeddings.kernels.finite import are_finite
from recsys.errors import NonFiniteGradient

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from recsys.embeddings.kernels.ledger import LedgerEntry

__all__ = ["require_finite"]


def require_finite(names: Sequence[str], dim: int, ledger: Iterable[LedgerEntry]) -> None:
    """Refuse gradients, on the CPU, that have nan or inf in them.

    Args:
        names: Of the tables of a group.
        dim: D.
        ledger: The gradients.

    Raises:
        NonFiniteGradient: there is one; the message names its table.
    """
    for entry in ledger:
        table = _bad_table(entry, dim)
        if table is not None:
            raise NonFiniteGradient(
                f"table {names[table]!r}: the gradient of its rows has nan or inf in it, and no "
                "row was updated; find what computes it (a learning rate too high, log(0), float16 "
                "without GradScaler). zero_grad() forgets the gradient"
            )


def _bad_table(entry: LedgerEntry, dim: int) -> int | None:
    """The first table whose rows' gradient is not finite; weights of lookups are factors of it."""
    weights, lookups = entry.bags.weights, entry.lookups
    if weights is not None and not np.isfinite(weights).all():
        return lookups.distinct_tables[0]
    if are_finite(entry.gradient):
        return None
    gradient = entry.gradient.flatten(1)
    for table, column in zip(lookups.tables.tolist(), lookups.columns.tolist(), strict=True):
        if not are_finite(gradient[:, column : column + dim]):
            return int(table)
    return None
