"""Gradients with nan or inf in them, which rows would keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from recsys.embeddings.kernels.finite import are_finite

if TYPE_CHECKING:
    from collections.abc import Iterable

    from recsys.embeddings.kernels.ledger import LedgerEntry

__all__ = ["first_non_finite"]


def first_non_finite(dim: int, ledger: Iterable[LedgerEntry]) -> int | None:
    """The number of a table whose rows' gradient, on the CPU, has nan or inf in it; None of none.

    The gradient of an empty bag is no row's, and may be anything: that of a norm is nan.

    Args:
        dim: D.
        ledger: The gradients.
    """
    for entry in ledger:
        lookups, bags = entry.lookups, entry.bags
        if bags.weights is not None and not np.isfinite(bags.weights).all():
            return lookups.distinct_tables[0]
        if are_finite(entry.gradient):
            continue
        gradient = entry.gradient.flatten(1)
        places = lookups.tables, lookups.positions, lookups.columns
        for table, position, column in zip(*(each.tolist() for each in places), strict=True):
            of_lookup = gradient[:, column : column + dim]
            if bags.offsets is not None:
                first = position * bags.batch_size
                lengths = np.diff(bags.offsets[first : first + bags.batch_size + 1])
                of_lookup = of_lookup[torch.from_numpy(lengths > 0)]
            if not are_finite(of_lookup):
                return int(table)
    return None
