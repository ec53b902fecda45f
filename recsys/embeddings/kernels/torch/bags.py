"""The input of a lookup on a device, and which row each of its values is.

Where bag i is known to be value i, lookups are rows of a (L, B) array, in lookup order. Otherwise
how many values a feature has is known to the device alone; then every value of the input is kept,
those of features not looked up too, and has no row. A value has one row, so lookups of a feature in
several tables are taken apart into layers, nearly always one.

Letters: B samples, F features, L lookups (a feature in a table), N values, D dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from recsys.embeddings.kernels.cpu.slots import NOWHERE
from recsys.embeddings.kernels.torch.errors import BAD_BOUND, BAD_WEIGHT, NO_ROW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.kernels.torch.row_space import RowNumbers
    from recsys.embeddings.rows.lookups import Lookups

__all__ = [
    "Layer",
    "Located",
    "TorchBags",
    "by_value",
    "layers_of",
    "lengths_of",
    "locate",
    "locate_one_hot",
    "note_bad_rows",
    "note_errors",
    "rows_of",
]

_MOST_KEPT = 64


class TorchBags(NamedTuple):
    """`Bags` of tensors.

    Attributes:
        values: (N,) int32 or int64, feature by feature.
        offsets: Where bags begin, (F * B + 1,), of the same dtype; None where bag i is value i.
        weights: One factor per value, (N,); None for 1.
        batch_size: B.
        is_mean: Whether a bag is averaged.
        padding: A row that counts for nothing wherever it is looked up; None for none.
    """

    values: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    batch_size: int
    is_mean: bool
    padding: int | None = None

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
        """As `Bags.from_tensors`; offsets are not read, so only a caller knows of one-hot bags."""
        return cls(
            values,
            None if is_one_hot else offsets,
            None if weights is None else weights.detach(),
            batch_size,
            is_mean and not is_one_hot,
            padding,
        )

    def copied(self) -> TorchBags:
        """The same in memory of its own: the caller may refill that of the input at any time."""
        return self._replace(
            values=self.values.clone(),
            offsets=None if self.offsets is None else self.offsets.clone(),
            weights=None if self.weights is None else self.weights.clone(),
        )

    def at_slots(self, slot_of_value: Tensor) -> TorchBags:
        """The same with slots in place of rows; none, which is below 0, counts for nothing."""
        padding = None if self.padding is None else NOWHERE
        return self._replace(values=slot_of_value, padding=padding)

    def values_of(self, feature: int) -> NDArray[Any]:
        """The rows of one feature, on the host, which waits for them."""
        begin, end = feature * self.batch_size, (feature + 1) * self.batch_size
        if self.offsets is not None:
            begin, end = self.bounds()[[begin, end]].tolist()
        values = self.values[begin:end]
        if self.padding is not None:
            values = values[values != self.padding]
        return values.cpu().numpy()

    @property
    def is_plain(self) -> bool:
        """Whether every bag is one row, as it is."""
        return self.offsets is None and self.weights is None and self.padding is None

    @property
    def num_features(self) -> int:
        """F."""
        num_bags = len(self.values) if self.offsets is None else len(self.offsets) - 1
        return num_bags // self.batch_size if self.batch_size else 0

    def bounds(self) -> Tensor:
        """Where bags begin, (F * B + 1,) int64; whatever the offsets are, inside of the values."""
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
        first_rows: Of the table, (L,), and of no lookup 0 behind.
        sizes: E of the table, (L,), and of no lookup 0 behind.
        columns: Which columns of the output are theirs, (L * D,); None where all are, in order.
        lookup_of_feature: (F + 1,); L for no lookup.
    """

    positions: Tensor
    first_rows: Tensor
    sizes: Tensor
    columns: Tensor | None
    lookup_of_feature: Tensor

    def of_columns(self, array_BW: Tensor, dim: int) -> Tensor:
        """The layer's columns of an array, (B * L, D): sample by sample, lookup by lookup."""
        if self.columns is not None:
            array_BW = array_BW.index_select(1, self.columns)
        return array_BW.reshape(-1, dim)


class Located(NamedTuple):
    """Which rows are looked up, and on whose behalf.

    Attributes:
        rows: (N,) int64; R for none.
        sources: Of which row of `Layer.of_columns` each is a part, (N,); 0 for none.
        scales: Factor of each, (N,); None for 1.
    """

    rows: Tensor
    sources: Tensor
    scales: Tensor | None


def layers_of(space: RowNumbers, lookups: Lookups, num_features: int) -> tuple[Layer, list[Layer]]:
    """All lookups as one layer, as one-hot bags need them, and in layers, as others do.

    Kept with the row space: making them takes a way to the device.
    """
    known, key = space.layers, (lookups, num_features)
    if key not in known:
        if len(known) > _MOST_KEPT:
            known.clear()
        whole = _make_layer(space, lookups, range(len(lookups.tables)), num_features)
        apart = _apart(lookups)
        known[key] = (
            whole,
            [whole]
            if len(apart) == 1
            else [_make_layer(space, lookups, numbers, num_features) for numbers in apart],
        )
    return known[key]


def locate_one_hot(space: RowNumbers, layer: Layer, bags: TorchBags) -> Tensor:
    """The row of every lookup, (L, B); R of a value that is no row of its table."""
    values_LB = bags.values.view(-1, bags.batch_size).index_select(0, layer.positions).long()
    is_row = (values_LB >= 0) & (values_LB < layer.sizes[:-1].unsqueeze(1))
    return torch.where(is_row, values_LB + layer.first_rows[:-1].unsqueeze(1), space.num_rows)


def locate(space: RowNumbers, layer: Layer, bags: TorchBags) -> Located:
    """The row of every value, and its factor."""
    bag_N, lookup_N, is_row = _rows_of_values(layer, bags)
    num_lookups, sample_N = len(layer.positions), bag_N % max(bags.batch_size, 1)
    rows_N = bags.values.long() + layer.first_rows[lookup_N]
    scales = None if bags.weights is None else bags.weights.to(space.compute_dtype)
    if bags.is_mean:
        lengths = lengths_of(bags).to(space.compute_dtype)
        shares = 1 if scales is None else scales
        scales = shares / torch.cat([lengths, lengths.new_ones(1)])[bag_N]
    return Located(
        torch.where(is_row, rows_N, space.num_rows),
        torch.where(lookup_N < num_lookups, sample_N * num_lookups + lookup_N, 0),
        scales,
    )


def lengths_of(bags: TorchBags) -> Tensor:
    """How many values of each bag count, (F * B,) int64."""
    bounds = bags.bounds()
    if bags.padding is None:
        return bounds.diff()
    counting = (bags.values != bags.padding).cumsum(0)
    return torch.cat([counting.new_zeros(1), counting])[bounds].diff()


def note_bad_rows(space: RowNumbers, layer: Layer, bags: TorchBags, rows_LB: Tensor) -> None:
    """Note which values of one-hot bags are no rows; `locate_one_hot` has found them."""
    samples = torch.arange(bags.batch_size, device=rows_LB.device)
    places = layer.positions.unsqueeze(1) * bags.batch_size + samples
    space.errors.note(NO_ROW, rows_LB == space.num_rows, places)


def note_errors(space: RowNumbers, layer: Layer, bags: TorchBags) -> None:
    """Find values that are no rows, offsets that make no bags, weights that are no numbers."""
    errors = space.errors
    if bags.offsets is not None:
        errors.note(BAD_BOUND, bags.bounds() != bags.offsets)
    if bags.weights is not None:
        errors.note(BAD_WEIGHT, bags.weights.isnan())
    errors.note(NO_ROW, rows_of(space, layer, bags)[1])


def rows_of(space: RowNumbers, layer: Layer, bags: TorchBags) -> tuple[Tensor, Tensor]:
    """The row of every value; and which values are looked up, and are no rows.

    Shape:
        results (N,) int64, R for none, and (N,) bool.
    """
    _, lookup_N, is_row = _rows_of_values(layer, bags)
    rows_N = torch.where(is_row, bags.values.long() + layer.first_rows[lookup_N], space.num_rows)
    return rows_N, _is_wanted(layer, bags, lookup_N) & ~is_row


def by_value(
    bags: TorchBags, first_bag: int, of_bags: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    """The rows of one feature's bags and the gradient of each, for a sparse gradient.

    How many there are the host has to ask the device, unless every bag is one row. A value that is
    no row comes as row 0 and without gradient: a later call says so, and torch would write there.

    Args:
        bags: The input.
        first_bag: Of the feature.
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


def _rows_of_values(layer: Layer, bags: TorchBags) -> tuple[Tensor, Tensor, Tensor]:
    """Of each value: its bag, or F * B; its lookup, or L; whether it is a row that counts."""
    places = torch.arange(len(bags.values), device=bags.values.device)
    bag_N = torch.searchsorted(bags.bounds(), places, right=True) - 1
    lookup_N = layer.lookup_of_feature[bag_N // max(bags.batch_size, 1)]
    is_row = (bags.values >= 0) & (bags.values < layer.sizes[lookup_N])
    if bags.padding is not None:
        is_row = is_row & (bags.values != bags.padding)
    return bag_N, lookup_N, is_row


def _is_wanted(layer: Layer, bags: TorchBags, lookup_N: Tensor) -> Tensor:
    """Of which values there must be a row."""
    is_wanted = lookup_N < len(layer.positions)
    if bags.padding is not None:
        is_wanted = is_wanted & (bags.values != bags.padding)
    return is_wanted


def _apart(lookups: Lookups) -> list[list[int]]:
    """Numbers of lookups such that no feature comes twice; all of a table stay together."""
    features_of: dict[int, set[int]] = {}
    for table, position in zip(lookups.tables.tolist(), lookups.positions.tolist(), strict=True):
        features_of.setdefault(table, set()).add(position)
    layers: list[tuple[set[int], set[int]]] = []  # tables and their features
    for table, features in features_of.items():
        fitting = next((layer for layer in layers if not layer[1] & features), None)
        if fitting is None:
            fitting = (set(), set())
            layers.append(fitting)
        fitting[0].add(table)
        fitting[1].update(features)
    of_lookups = lookups.tables.tolist()
    return [
        [number for number, table in enumerate(of_lookups) if table in tables]
        for tables, _ in layers
    ]


def _make_layer(
    space: RowNumbers, lookups: Lookups, numbers: Sequence[int], num_features: int
) -> Layer:
    tables = [int(lookups.tables[number]) for number in numbers]
    positions = [int(lookups.positions[number]) for number in numbers]
    starts = [int(lookups.columns[number]) for number in numbers]
    columns = [start + d for start in starts for d in range(space.dim)]
    lookup_of_feature = np.full(num_features + 1, len(positions))
    lookup_of_feature[positions] = np.arange(len(positions))
    return Layer(
        space.numbers_of(positions),
        space.numbers_of([*(space.first_rows[table] for table in tables), 0]),
        space.numbers_of([*(space.sizes[table] for table in tables), 0]),
        None if columns == list(range(lookups.width)) else space.numbers_of(columns),
        space.numbers_of(lookup_of_feature.tolist()),
    )
