"""The lookup kernel and the update kernel of recsys, with only an autograd function around them.

There is no module, check, ledger or optimizer. So the difference to the whole embeddings is the
time of their Python code, and time spent here cannot be saved by removing Python code. The autograd
function is needed, because there is no other way to get the gradient of a lookup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from recsys.embeddings.kernels.cpu.pooled_lookup import pooled_lookup
from recsys.embeddings.kernels.cpu.row_update import row_update
from recsys.embeddings.lookup.fused_lookup import with_dense_rows
from recsys.embeddings.lookup.result_memory import empty_result
from recsys.embeddings.rows.ledger import LedgerEntry
from recsys.embeddings.rows.lookups import Bags
from recsys.embeddings.rows.row_space import RowSpace

if TYPE_CHECKING:
    from torch import Tensor

    from recsys.batch import JaggedIds
    from recsys.embeddings.collection import HotColdEmbeddingBagCollection

__all__ = ["BareKernels", "bags_of"]


class BareKernels:
    """Looks up in the tables of a collection and updates them by its optimizer's formula.

    Args:
        embeddings: A collection with tables of one dim on the CPU, without tiers. The formula of
            its optimizer counts no steps. Every table was updated once, so its state exists.
        features: One-hot features, in the order that all later features have.

    Attributes:
        space: The tables.
        states: The state of the rows.
        formula: The update rule.
        rates_T2: Rate and eps of each table.
        lookups: The lookups of a mini-batch.
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
        self._requires_grad = torch.empty(0, requires_grad=True)
        self._entry: LedgerEntry | None = None

    def look_up(self, bags: Bags) -> Tensor:
        """Pooled rows, (B, W); `update` needs their gradient."""
        return cast("Tensor", _BareLookup.apply(self, bags, self._requires_grad))  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """Update the rows that were looked up last, by the gradient from backward."""
        row_update(self.space, self.states, self.formula, self.rates_T2, [self.take_entry()])

    def take_entry(self) -> LedgerEntry:
        """Return the last lookup with its gradient, and forget it."""
        entry, self._entry = self._entry, None
        assert entry is not None
        return entry


class _BareLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: BareKernels, bags: Bags, requires_grad: Tensor) -> Tensor:
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
    """One-hot features in the form that the kernels take."""
    return Bags.from_tensors(
        features.values(),
        features.offsets(),
        None,
        features.stride(),
        is_mean=False,
        is_one_hot=True,
    )
