"""One call of a bag: a copy of its input, and the ledger entry that backward makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recsys._support.torch_compat import version_of
from recsys.embeddings.lookup.fused_lookup import with_dense_rows
from recsys.embeddings.rows.bag_input import are_bounds
from recsys.embeddings.rows.ledger import LedgerEntry
from recsys.embeddings.rows.lookups import Bags, counts_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from recsys.embeddings.rows.lookups import Lookups
    from recsys.embeddings.tiers.ticket import Ticket

__all__ = ["Call", "KeptInput", "copy_input"]


class KeptInput(NamedTuple):
    """A copy of the input of a call; `kept` as for `pool_one_table`."""

    kept: NDArray[Any]
    num_bags: int
    is_one_hot: bool
    is_mean: bool
    padding_idx: int | None

    def bags(self) -> Bags:
        """The input without `padding_idx`."""
        ids, bounds = self.kept[: -self.num_bags - 1], self.kept[-self.num_bags - 1 :]
        if self.padding_idx is not None:
            is_kept = ids != self.padding_idx
            bounds = np.zeros_like(bounds)
            np.cumsum(is_kept, out=bounds[1:])
            return Bags(ids[is_kept], bounds, None, self.num_bags, is_mean=False)
        if self.is_one_hot:
            return Bags(ids, None, None, self.num_bags, is_mean=False)
        return Bags(ids, bounds, None, self.num_bags, self.is_mean)


class Call(NamedTuple):
    """What backward needs of one call."""

    lookups: Lookups
    input: KeptInput | Bags
    ticket: Ticket | None  # with rows in two tiers; then `input` is `Bags`
    ids: Tensor
    ids_version: int
    offsets: Tensor
    offsets_version: int
    table: nn.Parameter
    rows: Sequence[Tensor]  # views of the memory of all tables of the group
    tables: Sequence[nn.Parameter]  # all tables of the group
    number: int

    def entry(self, gradient: Tensor) -> LedgerEntry:
        """The ledger entry of the call."""
        gradient = with_dense_rows(gradient.detach() if gradient.requires_grad else gradient)
        version, lookups, ticket = version_of(gradient), self.lookups, self.ticket
        bags = self.input.bags() if isinstance(self.input, KeptInput) else self.input
        if ticket is None:
            return LedgerEntry(lookups, bags, gradient, version, self.rows, number=self.number)
        return LedgerEntry(
            lookups,
            ticket.bags,
            gradient,
            version,
            self.rows,
            bags,
            ticket,
            lookups,
            number=self.number,
        )

    def require_unchanged(self) -> None:
        """Refuse ids that were changed in place after the call, as torch's bag does."""
        if (
            version_of(self.ids) != self.ids_version
            or version_of(self.offsets) != self.offsets_version
        ):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: the ids or offsets of a lookup in a table; give it a clone of "
                "them"
            )


def copy_input(ids: Tensor, offsets: Tensor | None, num_bags: int, *, is_mean: bool) -> Bags | None:
    """A copy of the input of a call; arguments as for `pool_one_table`.

    Returns:
        None if offsets do not ascend from 0 to N.
    """
    values = ids.numpy().flatten()
    if offsets is None:
        if len(values) == num_bags:
            return Bags(values, None, None, num_bags, is_mean=False)
        length = len(values) // num_bags
        bounds = np.arange(0, len(values) + 1, length, dtype=values.dtype)
        return Bags(values, bounds, None, num_bags, is_mean)
    bounds = np.full(num_bags + 1, len(values), values.dtype)
    bounds[: len(offsets)] = offsets.numpy()
    if not are_bounds(bounds, len(values)):
        return None
    if len(values) == num_bags and counts_up(bounds):
        return Bags(values, None, None, num_bags, is_mean=False)
    return Bags(values, bounds, None, num_bags, is_mean)
