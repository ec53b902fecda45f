"""The two kernels of our embeddings, with nothing around them but autograd.

No module, no check, no ledger, no optimizer: what is between this and our embeddings is Python of
ours, and what takes too long here is not saved by leaving Python out. An autograd function there
must be, for a gradient comes to a lookup in no other way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from recsys.embeddings.fused_lookup import empty_result, with_dense_rows
from recsys.embeddings.kernels.ledger import LedgerEntry
from recsys.embeddings.kernels.pooled_lookup import Bags, pooled_lookup
from recsys.embeddings.kernels.row_update import row_update
from recsys.embeddings.row_space import RowSpace

if TYPE_CHECKING:
    from torch import Tensor

    from recsys.batch import JaggedIds
    from recsys.embeddings.collection import HotColdEmbeddingBagCollection

__all__ = ["BareKernels", "bags_of"]


class BareKernels:
    """Looks up in the tables of a collection and moves them, by its optimizer's formula.

    Args:
        embeddings: All tables of one dim, on the CPU, without tiers; of a formula that counts no
            steps. It has moved every table once, so that its optimizer has their state.
        features: One-hot; which feature stands where in all to come.

    Attributes:
        space: The tables.
        states: Their state.
        formula: How they move.
        rates_T2: What it makes of the learning rate, for each table.
        lookups: Of one mini-batch.
    """

    def __init__(self, embeddings: HotColdEmbeddingBagCollection, features: JaggedIds) -> None:
        [layout] = embeddings._layouts
        optimizer = embeddings.row_optimizer
        assert optimizer is not None
        formula = optimizer._formula_of(optimizer.param_groups[0])
        self.space, self.formula = layout.group.space(), formula
        self.states = [
            RowSpace([optimizer.state[table][name] for table in layout.group.tables])
            for name in formula.state_sizes(self.space.dim)
        ]
        rate_and_eps = formula.rate_and_eps(formula.lr, 1)
        self.rates_T2 = np.tile(rate_and_eps, (len(self.space.sizes), 1))
        layout.place(embeddings._positions(features))
        self.lookups = layout.lookups
        self._asks = torch.empty(0, requires_grad=True)
        self._entry: LedgerEntry | None = None

    def look_up(self, bags: Bags) -> Tensor:
        """Pooled rows, (B, W), whose gradient `update` will want."""
        return cast("Tensor", _BareLookup.apply(self, bags, self._asks))  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """Move the rows looked up last, by the gradient that backward has brought."""
        row_update(self.space, self.states, self.formula, self.rates_T2, [self.take_entry()])

    def take_entry(self) -> LedgerEntry:
        """What was looked up last, with its gradient; once."""
        entry, self._entry = self._entry, None
        assert entry is not None
        return entry


class _BareLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: BareKernels, bags: Bags, asks: Tensor) -> Tensor:
        table = kernels.space.tables[0]
        result = empty_result(table.dtype, table.device, bags, kernels.lookups)
        pooled_lookup(kernels.space, kernels.lookups, bags, result)
        ctx.kernels, ctx.bags = kernels, bags
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        kernels: BareKernels = ctx.kernels
        kernels._entry = LedgerEntry(kernels.lookups, ctx.bags, with_dense_rows(gradient))
        return None, None, None


def bags_of(features: JaggedIds) -> Bags:
    """One-hot features as the kernels take them."""
    return Bags.from_tensors(
        features.values(),
        features.offsets(),
        None,
        features.stride(),
        is_mean=False,
        is_one_hot=True,
    )
