"""One update of a table group, between the moment nothing can refuse it and the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from recsys.embeddings.kernels.ledger import LedgerEntry
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.row_space import RowSpace

__all__ = ["Update"]


class Update(NamedTuple):
    """What one update takes: see `row_update`.

    Attributes:
        ledger: What was collected.
        moved: Numbers of the tables that it is for.
        space: The tables.
        states: Their state.
        formula: How rows are updated.
        rates: Of every table, (T, 2).
        keys: Of every table, for rounding by chance.
        by_table: The optimizer's state of every table, if there is some.
        steps: Of each table in `moved`, where steps are counted; to be noted.
        new: Tables whose state is to be noted for the first time.
    """

    ledger: Sequence[LedgerEntry]
    moved: Sequence[int]
    space: RowSpace
    states: Sequence[RowSpace]
    formula: RowOptimizer
    rates: NDArray[np.float64]
    keys: NDArray[Any]
    by_table: Sequence[dict[str, Any]] = ()
    steps: Sequence[Any] = ()
    new: Sequence[int] = ()
