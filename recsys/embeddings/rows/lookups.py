"""The arguments of a lookup: which features are looked up in which tables, and their bags of ids.

The kernels of all devices take these types.

Letters: B samples, F features, L lookups (pairs of feature and table), N values, W columns of the
output.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recsys._support.jit import kernel
from recsys._support.torch_compat import are_functorch_transforms_active, tracing_state

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from recsys.embeddings.rows.row_space import RowSpace

__all__ = [
    "NO_OFFSETS",
    "Bags",
    "Lookups",
    "counts_up",
    "num_distinct_rows",
    "require_no_transform",
]

# Stands in for offsets in calls of kernels, if bag i is value i. It has one dtype, because numba
# compiles a kernel for each combination of dtypes.
NO_OFFSETS: NDArray[np.int64] = np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Lookups:
    """Which feature is looked up in which table, and the columns of the results.

    Attributes:
        tables: Number of the table in the row space, (L,) uint64.
        positions: Number of the feature in the input, (L,) uint64.
        columns: First column of the output, (L,) uint64.
        width: W.
        distinct_tables: The distinct numbers in `tables`, ascending.
        num_in_tables: The number of lookups in each of these.

    Do not write to the arrays.
    """

    tables: NDArray[np.uint64]
    positions: NDArray[np.uint64]
    columns: NDArray[np.uint64]
    width: int
    distinct_tables: Sequence[int] = field(init=False)
    num_in_tables: Sequence[int] = field(init=False, repr=False)
    _parts: dict[tuple[int, ...], Lookups] = field(default_factory=dict, init=False, repr=False)
    _placed: tuple[NDArray[np.uint64], NDArray[np.uint64]] | None = field(
        default=None, init=False, repr=False
    )
    _layers: list[Lookups] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        counts = Counter(self.tables.tolist())
        object.__setattr__(self, "distinct_tables", sorted(counts))
        object.__setattr__(self, "num_in_tables", [counts[table] for table in sorted(counts)])

    @classmethod
    def nothing(cls) -> Lookups:
        """An object without lookups."""
        none = np.empty(0, np.uint64)
        return cls(tables=none, positions=none, columns=none, width=0)

    @classmethod
    def one(cls, table: int, dim: int) -> Lookups:
        """One lookup, in a table of dim `dim`."""
        first = np.zeros(1, np.uint64)
        tables = np.array([table], np.uint64)
        return cls(tables=tables, positions=first, columns=first, width=dim)

    def of_tables(self, tables: Container[int]) -> Lookups:
        """The lookups in the given tables, in the same order; the same object in each call."""
        kept = tuple(table for table in self.distinct_tables if table in tables)
        if len(kept) == len(self.distinct_tables):
            return self
        if kept not in self._parts:
            is_kept = [table in kept for table in self.tables.tolist()]
            self._parts[kept] = Lookups(
                tables=self.tables[is_kept],
                positions=self.positions[is_kept],
                columns=self.columns[is_kept],
                width=self.width,
            )
        return self._parts[kept]

    def layers(self) -> list[Lookups]:
        """The lookups in groups without a repeated feature, so that a value has one row and slot.

        All lookups of a table are in one group, in their order. Each call has the same objects.
        """
        if not self.distinct_tables:
            return []
        if self._layers is None:
            layers = [self.of_tables(tables) for tables in self._tables_of_layers()]
            # A cache in a frozen class. An object that is one layer must not refer to itself.
            object.__setattr__(self, "_layers", [] if layers == [self] else layers)
        return self._layers or [self]

    def _tables_of_layers(self) -> list[set[int]]:
        """The tables of each group of `layers`."""
        features_of: dict[int, set[int]] = {}
        for table, position in zip(self.tables.tolist(), self.positions.tolist(), strict=True):
            features_of.setdefault(table, set()).add(position)
        found: list[tuple[set[int], set[int]]] = []  # tables and their features
        for table, features in features_of.items():
            fitting = next((each for each in found if not each[1] & features), None)
            if fitting is None:
                fitting = set(), set()
                found.append(fitting)
            fitting[0].add(table)
            fitting[1].update(features)
        return [tables for tables, _ in found]

    def placed_in(self, space: RowSpace) -> NDArray[np.uint64]:
        """The kernels' arguments for each lookup, (4, L): base, number of rows, position, column.

        Cached for the last row space, because making the array takes longer than a small lookup.
        """
        if self._placed is None or self._placed[0] is not space.bases:
            found = np.stack(
                [
                    space.bases[self.tables],
                    space.sizes[self.tables],
                    self.positions,
                    self.columns,
                ]
            )
            object.__setattr__(self, "_placed", (space.bases, found))  # a cache in a frozen class
            return found
        return self._placed[1]


class Bags(NamedTuple):
    """The input of one lookup: F features of B samples.

    Attributes:
        values: Rows, (N,) int32 or int64, feature by feature.
        offsets: Where bags begin, (F * B + 1,), of the same dtype; None if bag i is value i.
        weights: One factor per value, (N,), in the dtype of the computation; None for 1.
        batch_size: B.
        is_mean: Whether a bag is averaged.
    """

    values: NDArray[Any]
    offsets: NDArray[Any] | None
    weights: NDArray[Any] | None
    batch_size: int
    is_mean: bool

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
    ) -> Bags:
        """Make views of tensors.

        Args:
            values: Rows, (N,) int32 or int64, feature by feature.
            offsets: Where bags begin, (F * B + 1,), of the same dtype.
            weights: One factor per value, (N,); None for 1.
            batch_size: B.
            is_mean: Whether a bag is averaged.
            is_one_hot: Whether bag i is value i; None to find out from the offsets.
        """
        values_N = values.numpy()
        bounds = None if is_one_hot else offsets.numpy()
        if is_one_hot is None and bounds is not None:
            is_one_hot = len(values_N) == len(bounds) - 1 and counts_up(bounds)
        return cls(
            values_N,
            None if is_one_hot else bounds,
            None if weights is None else weights.detach().contiguous().numpy(),
            batch_size,
            is_mean and not is_one_hot,
        )

    def at_slots(self, slot_of_value: NDArray[np.int32]) -> Bags:
        """The same bags with slots in place of rows."""
        return Bags(slot_of_value, self.offsets, self.weights, self.batch_size, self.is_mean)

    def without_row(self, row: int, slot_of_value: NDArray[np.int32] | None = None) -> Bags:
        """The same bags without the lookups of one row.

        Args:
            row: The row.
            slot_of_value: Slots to put in place of rows; None to keep rows.
        """
        is_kept = self.values != row
        found = self if slot_of_value is None else self.at_slots(slot_of_value)
        if is_kept.all():
            return found
        values, bounds, weights, batch_size, is_mean = found
        num_before = np.zeros(len(is_kept) + 1, self.values.dtype)
        np.cumsum(is_kept, out=num_before[1:])
        return Bags(
            values[is_kept],
            num_before if bounds is None else num_before[bounds],
            None if weights is None else weights[is_kept],
            batch_size,
            is_mean,
        )

    def values_of(self, feature: int) -> NDArray[Any]:
        """The rows of one feature."""
        begin, end = feature * self.batch_size, (feature + 1) * self.batch_size
        if self.offsets is not None:
            begin, end = int(self.offsets[begin]), int(self.offsets[end])
        return self.values[begin:end]

    def copied(self) -> Bags:
        """A copy, since the caller may write to the memory of the input at any time."""
        values, offsets, weights, batch_size, is_mean = self
        return Bags(
            values.copy(),
            None if offsets is None else offsets.copy(),
            None if weights is None else weights.copy(),
            batch_size,
            is_mean,
        )


@kernel
def counts_up(offsets: NDArray[Any]) -> bool:
    """Whether offsets are 0, 1, 2, ...; checked in runs, whose loops are vectorised."""
    run = np.uint64(1024)
    end = np.uint64(len(offsets))
    for begin in range(np.uint64(0), end, run):
        differing = np.uint64(0)
        for number in range(begin, min(begin + run, end)):
            differing |= np.uint64(offsets[number]) ^ number
        if differing:
            return False
    return True


def num_distinct_rows(looked_up: Iterable[tuple[Lookups, Any]]) -> int:
    """How many rows these lookups need; the host waits for a device.

    Args:
        looked_up: Lookups, and their input by rows: `Bags`, or the like of another device.
    """
    of_tables: dict[int, list[NDArray[Any]]] = {}
    for lookups, bags in looked_up:
        for table, position in zip(
            lookups.tables.tolist(), lookups.positions.tolist(), strict=True
        ):
            of_tables.setdefault(table, []).append(bags.values_of(position))
    return sum(len(np.unique(np.concatenate(runs))) for runs in of_tables.values())


def require_no_transform() -> None:
    """Check that no transform of `torch.func` is active, nor `torch.jit.trace`.

    Raises:
        RuntimeError: one is.
    """
    if are_functorch_transforms_active() or tracing_state() is not None:
        raise RuntimeError(
            "torch.jit.trace and the transforms of torch.func, such as vmap and grad, do not go "
            "through lookups of recsys; look rows up outside of them, and give them the result, "
            "or call recsys.restore on an accelerated model first"
        )
