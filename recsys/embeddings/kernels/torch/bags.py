"""The input of a lookup on a device, and the row of each of its values.

If bag i is known to be value i, the rows form an (L, B) array in lookup order. Otherwise only the
device knows how many values each feature has. Then every value of the input has an entry; values of
features that are not looked up have no row. An entry holds one row. So if a feature is looked up in
several tables, its lookups go to different layers; nearly always, one layer holds all lookups.

Letters: B samples, F features, L lookups (a feature in a table), N values, D dim.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from recsys.embeddings.kernels.cpu.slot_arrays import NOWHERE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.kernels.torch.row_space import RowNumbers
    from recsys.embeddings.rows.lookups import Lookups

__all__ = [
    "Layer",
    "TorchBags",
    "by_value",
    "clear_if_full",
    "layers_of",
    "lengths_of",
    "locate_one_hot",
    "rows_of",
]

_MOST_KEPT = 64  # and one for each table: a model may look up each table alone


class TorchBags(NamedTuple):
    """`Bags` of tensors, which are contiguous.

    Attributes:
        values: (N,) int32 or int64, feature by feature.
        offsets: Where bags begin, (F * B + 1,), of the same dtype; None if bag i is value i.
        weights: One factor per value, (N,); None for 1.
        batch_size: B.
        is_mean: Whether a bag is averaged.
        padding: An id that adds nothing to its bag; None for none.
        given: The tensors that values and offsets were made from; empty for these themselves.
        is_whole: Whether the last bag is known to end with the last value.
        counts: How many values each feature has, if the host knows; empty if not.
    """

    values: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    batch_size: int
    is_mean: bool
    padding: int | None = None
    given: Sequence[Tensor] = ()
    is_whole: bool = False
    counts: Sequence[int] = ()

    @classmethod
    def from_tensors(
        cls,
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        batch_size: int,
        *,
        is_mean: bool,
        is_one_hot: bool | None = None,
        padding: int | None = None,
    ) -> TorchBags:
        """Like `Bags.from_tensors`, but never reads offsets: bags are one-hot only if told so.

        Tensors that are not contiguous, like a column of a matrix, are copied.
        """
        made_from = (values,) if is_one_hot else (values, offsets)
        return cls(
            values.contiguous(),
            None if is_one_hot else offsets.contiguous(),
            None if weights is None else weights.detach().contiguous(),
            batch_size,
            is_mean and not is_one_hot,
            padding,
            () if all(each.is_contiguous() for each in made_from) else made_from,
        )

    def copied(self) -> TorchBags:
        """A copy, since the caller may write to the memory of the input at any time."""
        return self._replace(
            values=self.values.clone(),
            offsets=None if self.offsets is None else self.offsets.clone(),
            weights=None if self.weights is None else self.weights.clone(),
            given=(),
        )

    def at_slots(self, slot_of_value: Tensor) -> TorchBags:
        """The same bags with slots in place of rows; a padding id has the slot `NOWHERE`."""
        padding = None if self.padding is None else NOWHERE
        return self._replace(values=slot_of_value, padding=padding, given=())

    def without_row(self, row: int, slot_of_value: Tensor | None = None) -> TorchBags:
        """As `Bags.without_row`; the values stay, and kernels skip them."""
        if slot_of_value is None:
            return self._replace(padding=row)
        values = slot_of_value.masked_fill(self.values == row, NOWHERE)
        return self._replace(values=values, padding=NOWHERE, given=())

    def values_of(self, feature: int) -> NDArray[Any]:
        """The rows of one feature, copied to the host; the host waits."""
        begin, end = feature * self.batch_size, (feature + 1) * self.batch_size
        if self.offsets is not None:
            begin, end = self.bounds()[[begin, end]].tolist()
        values = self.values[begin:end]
        if self.padding is not None:
            values = values[values != self.padding]
        return values.cpu().numpy()

    @property
    def is_plain(self) -> bool:
        """Whether every bag is one row, without weights or padding."""
        return self.offsets is None and self.weights is None and self.padding is None

    @property
    def num_features(self) -> int:
        """F."""
        # `len` of a tensor is Python.
        num_bags = self.values.numel() if self.offsets is None else self.offsets.numel() - 1
        return num_bags // self.batch_size if self.batch_size else 0

    def bounds(self) -> Tensor:
        """Where bags begin, (F * B + 1,) int64; invalid offsets are clamped to valid ones."""
        num_values = len(self.values)
        if self.offsets is None:
            return torch.arange(num_values + 1, device=self.values.device)
        bounds = self.offsets.long().clamp(0, num_values).cummax(0).values
        bounds[:1].zero_()
        return bounds


class Layer(NamedTuple):
    """Lookups of different features, as tensors.

    Attributes:
        positions: Number of the feature in the input, (L,).
        first_rows: First row of each lookup's table, then 0 for values without a lookup, (L + 1,).
        sizes: E of each lookup's table, then 0, (L + 1,).
        columns: Columns of the output that the lookups write, (L * D,); None for all, in order.
        lookup_of_feature: The lookup of each feature, or L for none, (F + 1,).
        multiple: Divides the first column of every lookup; 0 if all are 0.
    """

    positions: Tensor
    first_rows: Tensor
    sizes: Tensor
    columns: Tensor | None
    lookup_of_feature: Tensor
    multiple: int


def layers_of(space: RowNumbers, lookups: Lookups, num_features: int) -> tuple[Layer, list[Layer]]:
    """All lookups as one layer, for one-hot bags; and divided into layers, for other bags.

    The row space caches them, because making them copies arrays to the device.
    """
    known, key = space.layers, (lookups, num_features)
    if key not in known:
        clear_if_full(space, known)
        whole = _make_layer(space, lookups, num_features)
        known[key] = (
            whole,
            [
                whole if part is lookups else _make_layer(space, part, num_features)
                for part in lookups.layers()
            ],
        )
    return known[key]


def clear_if_full(space: RowNumbers, known: dict[Any, Any]) -> None:
    """Clear a cache of tensors by lookups, such as `space.layers`, if it has many."""
    if len(known) > _MOST_KEPT + len(space.sizes):
        if space.device.type == "cuda":
            torch.cuda.synchronize(space.device)  # kernels on several streams may read them
        known.clear()


def locate_one_hot(space: RowNumbers, layer: Layer, bags: TorchBags) -> Tensor:
    """The row of every lookup, (L, B); R for a value that is not a row of its table."""
    values_LB = bags.values.view(-1, bags.batch_size).index_select(0, layer.positions).long()
    is_row = (values_LB >= 0) & (values_LB < layer.sizes[:-1].unsqueeze(1))
    return torch.where(is_row, values_LB + layer.first_rows[:-1].unsqueeze(1), space.num_rows)


def lengths_of(bags: TorchBags) -> Tensor:
    """The length of each bag without padding ids, (F * B,) int64."""
    bounds = bags.bounds()
    if bags.padding is None:
        return bounds.diff()
    counting = (bags.values != bags.padding).cumsum(0)
    return torch.cat([counting.new_zeros(1), counting])[bounds].diff()


def rows_of(space: RowNumbers, layer: Layer, bags: TorchBags) -> tuple[Tensor, Tensor]:
    """The row of every value; and which values are looked up but out of range.

    Shape:
        results (N,) int64, R for no row, and (N,) bool.
    """
    places = torch.arange(len(bags.values), device=bags.values.device)
    bag_N = torch.searchsorted(bags.bounds(), places, right=True) - 1
    lookup_N = layer.lookup_of_feature[bag_N // max(bags.batch_size, 1)]
    is_wanted = lookup_N < len(layer.positions)
    if bags.padding is not None:
        is_wanted = is_wanted & (bags.values != bags.padding)
    # The entry for values without a lookup has size 0.
    is_row = is_wanted & (bags.values >= 0) & (bags.values < layer.sizes[lookup_N])
    rows_N = torch.where(is_row, bags.values.long() + layer.first_rows[lookup_N], space.num_rows)
    return rows_N, is_wanted & ~is_row


def by_value(
    bags: TorchBags, first_bag: int, of_bags: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    """The rows of one feature's bags and the gradient of each, for a sparse gradient.

    Unless every bag is one row, the host waits for the device to learn how many there are. An id
    out of range becomes row 0 with a zero gradient, so torch never writes out of bounds; a later
    call raises the error.

    Args:
        bags: The input.
        first_bag: Number of the feature's first bag.
        of_bags: Gradients of its bags, (B, D).
        num_rows: E.
    """
    end = first_bag + bags.batch_size
    if bags.is_plain:
        rows, gradients = bags.values[first_bag:end].long(), of_bags
    else:
        bounds, lengths = bags.bounds()[first_bag : end + 1], lengths_of(bags)[first_bag:end]
        begin, last = bounds[[0, -1]].tolist()
        rows, of_values = bags.values[begin:last].long(), of_bags
        if bags.is_mean:
            of_values = of_bags / lengths.clamp(min=1).unsqueeze(1)
        gradients = of_values.repeat_interleave(bounds.diff(), dim=0, output_size=last - begin)
        if bags.weights is not None:
            gradients = gradients * bags.weights[begin:last].unsqueeze(1)
        if bags.padding is not None:
            is_kept = rows != bags.padding
            rows, gradients = rows[is_kept], gradients[is_kept]
    is_row = (rows >= 0) & (rows < num_rows)
    return torch.where(is_row, rows, 0), torch.where(is_row.unsqueeze(1), gradients, 0)


def _make_layer(space: RowNumbers, lookups: Lookups, num_features: int) -> Layer:
    tables, positions = lookups.tables.tolist(), lookups.positions.tolist()
    starts = lookups.columns.tolist()
    columns = [start + d for start in starts for d in range(space.dim)]
    lookup_of_feature = np.full(num_features + 1, len(positions))
    lookup_of_feature[positions] = np.arange(len(positions))
    return Layer(
        space.numbers_of(positions),
        space.numbers_of([*(space.first_rows[table] for table in tables), 0]),
        space.numbers_of([*(space.sizes[table] for table in tables), 0]),
        None if columns == list(range(lookups.width)) else space.numbers_of(columns),
        space.numbers_of(lookup_of_feature.tolist()),
        gcd(*starts),
    )
