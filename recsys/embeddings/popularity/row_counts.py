"""Counts of lookups for each row of several tables.

Rows are numbered consecutively over all tables: row v of table t is `bases[t] + v`.

Letters: R rows of all tables, T tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.arguments import is_whole
from recsys.embeddings.kernels.cpu.counting import Segments, count_rows
from recsys.errors import ConfigError, IdOutOfRange, ProfileError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from recsys.embeddings.popularity.lookup_blocks import LookupBlock
    from recsys.embeddings.table import TableConfig

__all__ = ["RowCounts", "named_tables"]

_MAX_NARROW = 2**32 - 1


class RowCounts:
    """Lookups per row: 32-bit counts until one could exceed 2**32 - 1, then 64-bit counts.

    Args:
        table_sizes: Rows by table.
        features: The features of each table.

    Attributes:
        table_sizes, features: As above.
        sizes: Rows of each table, (T,).
        bases: The number of each table's first row, (T,).
        values: The counts, (R,) uint32 or int64.
    """

    def __init__(
        self, table_sizes: Mapping[str, int], features: Mapping[str, tuple[str, ...]]
    ) -> None:
        self.table_sizes, self.features = dict(table_sizes), dict(features)
        self.sizes = np.array(list(self.table_sizes.values()), np.int64)
        self.bases: NDArray[np.int64] = np.cumsum(self.sizes) - self.sizes
        self.values: NDArray[Any] = np.zeros(int(self.sizes.sum()), np.uint32)
        self._most = 0  # an upper bound of all counts
        self._layouts: dict[tuple[str, ...], tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def require_same_tables(self, other: RowCounts) -> None:
        """Check that other counts are of the same tables, in the same order.

        Raises:
            ProfileError: they are not; the message calls these counts "this profile".
        """
        own, others = self.table_sizes, other.table_sizes
        if list(own.items()) == list(others.items()):
            return
        missing = [name for name in own if name not in others]
        added = [name for name in others if name not in own]
        rules = [
            *([f"{missing} are only in this profile"] if missing else []),
            *([f"{added} are not in this profile"] if added else []),
            *(
                f"{name!r} has {size} rows in this profile and {others[name]} in the other"
                for name, size in own.items()
                if others.get(name, size) != size
            ),
        ]
        raise ProfileError(
            f"both profiles must have the same tables: {'; '.join(rules) or 'their order differs'}"
            "; count the same tables for both"
        )

    def tables_of(self, features: set[str]) -> list[str]:
        """Tables that count each of some features once, and no others; empty without such."""
        tables: list[str] = []
        left = set(features)
        for name, own in sorted(self.features.items(), key=lambda each: -len(each[1])):
            if left.issuperset(own):  # or another table has counted one of them, too
                tables.append(name)
                left.difference_update(own)
        return [] if left else tables

    def replace(self, values: NDArray[Any]) -> None:
        """Use other counts of the same rows; `values` is not copied."""
        self.values, self._most = values, int(values.max(initial=0))

    def add(self, block: LookupBlock, number_of: Callable[[int], int]) -> None:
        """Count the lookups of a block. If this raises, nothing is counted.

        Args:
            block: The lookups.
            number_of: Maps a sample of the block to its number in messages.

        Raises:
            ProfileError: the block lacks a feature.
            IdOutOfRange: a value is not a row of its table.
        """
        segments = self.segments(block)
        self.reserve(int(np.bincount(segments.tables, segments.num).max(initial=0)))
        bad = count_rows(self.values, segments, block.values)
        if bad >= 0:
            count_rows(self.values, segments, block.values, -1)
            raise self._error(block, segments, bad, number_of)

    def add_rows(self, rows: slice, counts: NDArray[Any]) -> None:
        """Add other counts of a range of rows."""
        self.reserve(int(counts.max(initial=0)))
        self.values[rows] += counts.astype(self.values.dtype, copy=False)

    def reserve(self, num_lookups: int) -> None:
        """Ensure that no count overflows if up to `num_lookups` are added to each row."""
        self._most += num_lookups
        if self._most <= _MAX_NARROW or self.values.dtype == np.int64:
            return
        self._most = int(self.values.max(initial=0)) + num_lookups
        if self._most > _MAX_NARROW:
            self.values = self.values.astype(np.int64)

    def segments(self, block: LookupBlock) -> Segments:
        """The segments of a block: the lookups of each feature in each table.

        Raises:
            ProfileError: the block lacks a feature.
        """
        key = tuple(block.features)
        if key not in self._layouts:
            self._layouts[key] = self._layout(key)
        positions, tables = self._layouts[key]
        return Segments(
            tables,
            self.bases[tables],
            self.sizes[tables],
            block.first[positions],
            block.num[positions],
            positions * block.num_samples,
            block.stride,
        )

    def _layout(self, names: tuple[str, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For every pair of feature and table: the feature's position in `names`, and the table."""
        positions, tables = [], []
        for table, (name, features) in enumerate(self.features.items()):
            for feature in features:
                if feature not in names:
                    raise ProfileError(
                        f"table {name!r}: its feature {feature!r} is not in the data, which has "
                        f"{list(names)}; make the profile for tables of these features"
                    )
                positions.append(names.index(feature))
                tables.append(table)
        return np.array(positions, np.int64), np.array(tables, np.int64)

    def _error(
        self,
        block: LookupBlock,
        segments: Segments,
        place: int,
        number_of: Callable[[int], int],
    ) -> IdOutOfRange:
        """The error for the value at position `place`."""
        positions, _ = self._layouts[tuple(block.features)]
        value = int(block.values[place])
        for feature, first, num, size in zip(
            positions.tolist(), segments.first, segments.num, segments.sizes, strict=True
        ):
            steps, rest = divmod(place - int(first), block.stride)
            if 0 <= steps < num and not rest and not 0 <= value < size:
                return IdOutOfRange(
                    f"feature {block.features[feature]!r}, sample "
                    f"{number_of(block.sample_of(feature, place))}: id {value} is not in "
                    f"[0, {size}); raise num_embeddings or hash the ids"
                )
        raise AssertionError(f"value {value} at {place} is a row of every table it is looked up in")


def named_tables(
    tables: Mapping[str, int] | Sequence[TableConfig],
) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """Sizes and features by table name.

    Raises:
        ConfigError: there is no table, a size is no positive integer, or a name occurs twice.
    """
    named: list[tuple[str, int, tuple[str, ...]]]
    if isinstance(tables, Mapping):
        named = [(name, size, (name,)) for name, size in tables.items()]
    else:
        named = [
            (table.name, table.num_embeddings, tuple(table.feature_names) or (table.name,))
            for table in tables
        ]
    sizes = {name: size for name, size, _ in named}
    if not sizes or len(sizes) < len(named):
        raise ConfigError(
            "profile: there must be at least one table, and names must be distinct, got "
            f"{[name for name, _, _ in named]}"
        )
    for name, size in sizes.items():
        if not is_whole(size, 1):
            raise ConfigError(f"profile: table {name!r} must have at least one row, got {size!r}")
        sizes[name] = int(size)
    return sizes, {name: features for name, _, features in named}
