"""One call of a bag: a copy of its input, and the ledger entry that backward makes of it."""

from __future__ import annotations

from operator import ne
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from recsys._support.torch_compat import version_of
from recsys.embeddings.lookup.fused_lookup import own_if_one_sample, with_dense_rows
from recsys.embeddings.rows.bag_input import are_bounds
from recsys.embeddings.rows.ledger import LedgerEntry
from recsys.embeddings.rows.lookups import Bags, counts_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from recsys.embeddings.kernels.torch.bags import TorchBags
    from recsys.embeddings.rows.lookups import Lookups
    from recsys.embeddings.tiers.ticket import Ticket

__all__ = ["BagArguments", "Call", "KeptInput", "with_own_ids"]


class BagArguments(NamedTuple):
    """The arguments of a call.

    Attributes:
        ids: As for `pool_one_table`.
        offsets: As for `pool_one_table`.
        weights: A factor for each id, of the shape of the ids; None for 1.
        left_out: A row that bags leave out; None for none.
        num_bags: B.
        is_mean: Whether a bag is averaged.
    """

    ids: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    left_out: int | None
    num_bags: int
    is_mean: bool

    def copied(self) -> Bags | None:
        """A copy; None if offsets do not ascend from 0 to N, or a weight is nan."""
        values, num_bags = self.ids.numpy().flatten(), self.num_bags
        factors = None if self.weights is None else self.weights.detach().numpy().flatten()
        if factors is not None and np.isnan(factors).any():
            return None
        bounds: NDArray[Any] | None = None
        if self.offsets is not None:
            bounds = np.full(num_bags + 1, len(values), values.dtype)
            bounds[: len(self.offsets)] = self.offsets.numpy()
            if not are_bounds(bounds, len(values)):
                return None
            if len(values) == num_bags and counts_up(bounds):
                bounds = None
        elif len(values) != num_bags:
            bounds = np.arange(0, len(values) + 1, len(values) // num_bags, dtype=values.dtype)
        bags = Bags(values, bounds, factors, num_bags, self.is_mean and bounds is not None)
        return bags if self.left_out is None else bags.without_row(self.left_out)


class KeptInput(NamedTuple):
    """A copy of the input of a call; `kept` as for `pool_one_table`."""

    kept: NDArray[Any]
    num_bags: int
    is_one_hot: bool
    is_mean: bool

    def bags(self) -> Bags:
        """The input."""
        ids, bounds = self.kept[: -self.num_bags - 1], self.kept[-self.num_bags - 1 :]
        if self.is_one_hot:
            return Bags(ids, None, None, self.num_bags, is_mean=False)
        return Bags(ids, bounds, None, self.num_bags, self.is_mean)


class Call(NamedTuple):
    """What backward needs of one call."""

    lookups: Lookups
    input: KeptInput | Bags | TorchBags
    padding_idx: int | None  # of bags of one id: a row that gets no gradient
    ticket: Ticket | None  # with rows in two tiers; then `input` is `Bags`
    given: Sequence[Tensor]  # the arguments of the call
    versions: Sequence[int]
    table: nn.Parameter
    rows: Sequence[Tensor]  # views of the memory of all tables of the group
    tables: Sequence[nn.Parameter]  # all tables of the group
    number: int
    is_one_sample: bool  # see `own_if_one_sample`
    is_own: bool = True  # whether the caller cannot write to the memory of `input`

    def entry(self, gradient: Tensor) -> LedgerEntry:
        """The ledger entry of the call."""
        gradient = with_dense_rows(gradient.detach() if gradient.requires_grad else gradient)
        gradient = own_if_one_sample(gradient, is_one_sample=self.is_one_sample)
        version, lookups, ticket = version_of(gradient), self.lookups, self.ticket
        rows: Any = self.input.bags() if isinstance(self.input, KeptInput) else self.input
        bags = rows if ticket is None else ticket.bags
        if self.padding_idx is not None:
            slots = None if ticket is None else ticket.slot_of_value
            bags = rows.without_row(self.padding_idx, slots)
            rows = rows.without_row(self.padding_idx)
        return LedgerEntry(
            lookups,
            bags,
            gradient,
            version,
            self.rows,
            None if ticket is None else rows,
            ticket,
            lookups,
            is_cut=ticket is not None and self.padding_idx is not None,
            number=self.number,
        )

    def require_unchanged(self) -> None:
        """Refuse arguments that were changed in place after the call, as torch's bag does."""
        if any(map(ne, map(version_of, self.given), self.versions)):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: the ids, offsets or weights of a lookup in a table; give it a "
                "clone of them"
            )


def with_own_ids(taken: Sequence[tuple[Call, Tensor]]) -> Sequence[tuple[Call, Tensor]]:
    """Copy ids on a device, which the caller may overwrite; those of all calls in one launch.

    Args:
        taken: Calls, and the gradients of their outputs. Offsets are not the caller's.
    """
    if all(call.is_own for call, _ in taken):
        return taken
    inputs: list[Any] = [call.input for call, _ in taken]  # `TorchBags`
    sizes = [bags.values.numel() for bags in inputs]
    copies = torch.cat([bags.values for bags in inputs]).split_with_sizes(sizes)
    return [
        (call._replace(input=bags._replace(values=values, given=())), gradient)
        for (call, gradient), bags, values in zip(taken, inputs, copies, strict=True)
    ]
