"""Gradients with nan or inf in them, which rows would keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from recsys.embeddings.kernels.finite import are_finite
from recsys.errors import NonFiniteGradient

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from recsys.embeddings.kernels.ledger import LedgerEntry

__all__ = ["require_finite"]


def require_finite(
    names: Sequence[str],
    dim: int,
    ledger: Iterable[LedgerEntry],
    gradients: Iterable[Tensor | None],
) -> None:
    """Refuse gradients, on the CPU, that have nan or inf in them.

    Args:
        names: Of the tables of a group.
        dim: D.
        ledger: What lookups have left.
        gradients: By table: what else was left at it, dense or sparse (E, D).

    Raises:
        NonFiniteGradient: there is one; the message names its table.
    """
    for table in _bad_tables(dim, ledger, gradients):
        raise NonFiniteGradient(
            f"table {names[table]!r}: the gradient of its rows has nan or inf in it, and no row "
            "was updated; find what computes it (a learning rate too high, log(0), float16 without "
            "GradScaler). zero_grad() forgets the gradient"
        )


def _bad_tables(
    dim: int, ledger: Iterable[LedgerEntry], gradients: Iterable[Tensor | None]
) -> Iterator[int]:
    for entry in ledger:
        weights, lookups = entry.bags.weights, entry.lookups
        if weights is not None and not np.isfinite(weights).all():
            yield lookups.distinct_tables[0]
        if not are_finite(entry.gradient):
            gradient = entry.gradient.flatten(1)
            for table, column in zip(
                lookups.tables.tolist(), lookups.columns.tolist(), strict=True
            ):
                if not are_finite(gradient[:, column : column + dim]):
                    yield table
    for table, left in enumerate(gradients):
        if left is not None and not are_finite(left._values() if left.is_sparse else left):
            yield table
