"""Popularity: how often each row of every table is looked up.

A profile holds one count for each row of its tables, and nothing else that grows. It counts a store
or mini-batches, and measures which share of lookups a set of hot rows would serve:

    half = store.num_samples // 2
    profile = PopularityProfile.count(store, range(half))
    later = profile.coverage(10_000, store, range(half, store.num_samples))
    later.lookup_hit_rate

Rows are numbered consecutively over all tables: row v of table t is `bases[t] + v`.

Letters: E rows of one table, R rows of all tables, T tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

import numpy as np

from recsys.batch import feature_tables, features_by_table
from recsys.embeddings.kernels.cpu.counting import worst_levels
from recsys.embeddings.popularity.coverage import Coverage, coverages_by_level
from recsys.embeddings.popularity.lookup_blocks import (
    block_of,
    blocks_of_source,
    samples_of,
)
from recsys.embeddings.popularity.profile_file import read_profile, write_profile
from recsys.embeddings.popularity.row_counts import RowCounts, named_tables
from recsys.embeddings.table import TableConfig
from recsys.errors import ConfigError, ProfileError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from recsys.batch import Batch, Features, SampleSource
    from recsys.embeddings.popularity.lookup_blocks import LookupBlock

__all__ = ["PopularityProfile"]

_MAX_SETS = 254  # a row's level is a byte, and one level means "in no set"


@final
class PopularityProfile:
    """Counts of lookups per row. Not thread-safe.

    Counts are 32-bit integers. They become 64-bit integers before a count could exceed 2**32 - 1.

    Args:
        tables: Either the number of rows by table name, for tables whose one feature has the name
            of the table, or `TableConfig`s (TorchRec's `EmbeddingBagConfig`s, too).

    Attributes:
        num_samples: Samples counted.

    Raises:
        ConfigError: there is no table, a size is not positive, or a name occurs twice.
    """

    def __init__(self, tables: Mapping[str, int] | Sequence[TableConfig]) -> None:
        self.num_samples = 0
        self._rows = RowCounts(*named_tables(tables))

    @classmethod
    def count(cls, source: SampleSource, samples: range | None = None) -> PopularityProfile:
        """Count a source's lookups; tables and features have the source's names.

        Args:
            source: A `Store`, whose memory map is counted in place, or any other source.
            samples: A range of samples with step 1; all by default.

        Raises:
            ConfigError: the source has no such samples.
            IdOutOfRange: the source has an id that is not a row of its table.
        """
        features = features_by_table(source)
        tables = [
            TableConfig(
                name=name, num_embeddings=size, embedding_dim=1, feature_names=features[name]
            )
            for name, size in source.table_sizes.items()
        ]
        profile = cls(tables)
        part = samples_of(source, samples)
        for block in blocks_of_source(source, part):
            profile._add_block(block, part.start + profile.num_samples)
        return profile

    @property
    def table_sizes(self) -> dict[str, int]:
        """Rows by table."""
        return dict(self._rows.table_sizes)

    @property
    def features(self) -> dict[str, tuple[str, ...]]:
        """The features of each table."""
        return dict(self._rows.features)

    @property
    def bases(self) -> NDArray[np.int64]:
        """The number of the first row of each table, (T,) int64."""
        return self._rows.bases.copy()

    @property
    def num_lookups(self) -> int:
        """The sum of all counts, computed at each call."""
        return int(self._rows.values.sum(dtype=np.int64))

    @property
    def num_rows_seen(self) -> int:
        """Rows with a count above zero, computed at each call."""
        return int(np.count_nonzero(self._rows.values))

    def add(self, batch: Batch | Features) -> None:
        """Count a mini-batch. If this raises, nothing is counted.

        Every value of every bag is one lookup; weights and pooling are ignored.

        Args:
            batch: A `Batch`, `JaggedIds`, or a `KeyedJaggedTensor` with every feature of every
                table; other features are ignored. Tensors on other devices are copied to the CPU.

        Raises:
            ProfileError: it lacks a feature.
            IdOutOfRange: a value is not a row of its table.
            MalformedBags: its tensors do not form bags.
        """
        self._add_block(block_of(batch), 0)

    def counts(self, table: str | None = None) -> NDArray[Any]:
        """Lookups of each row of `table`, or of all R rows of all tables; a read-only view.

        Shape:
            (E,) or (R,) uint32 or int64.

        Raises:
            KeyError: there is no such table.
        """
        view = self._rows.values.view()
        view.flags.writeable = False
        if table is None:
            return view
        names = list(self._rows.table_sizes)
        if table not in names:
            raise KeyError(f"the profile has no table {table!r}; it has {names}")
        position = names.index(table)
        begin = self._rows.bases[position]
        return view[begin : begin + self._rows.sizes[position]]

    def ranked_rows(
        self, num_rows: int | None = None, weights: Mapping[str, float] | None = None
    ) -> NDArray[np.int64]:
        """Rows with a count above zero, as numbers over all tables, the most popular row first.

        Among equally popular rows the lower number comes first, so the order is the same on every
        machine.

        Args:
            num_rows: The most rows to return; all by default. A few take much less time than all.
            weights: The weight of a lookup in each table, 1 by default. (With one over the bytes of
                its rows, rows are ranked by lookups saved per byte.)

        Shape:
            result (num_rows,) or shorter, int64.

        Raises:
            ConfigError: `weights` does not have exactly the tables, or `num_rows` is negative.
        """
        if num_rows is not None and num_rows < 0:
            raise ConfigError(f"profile: num_rows must be at least 0, got {num_rows}")
        rows = np.flatnonzero(self._rows.values)
        keys: NDArray[Any] = self._rows.values[rows]
        if weights is not None:
            names = list(self._rows.table_sizes)
            if set(weights) != set(names):
                raise ConfigError(
                    f"profile: weights must have the tables {names}, got {list(weights)}"
                )
            ends = np.searchsorted(rows, self._rows.bases + self._rows.sizes)
            keys = keys * np.repeat(
                [float(weights[name]) for name in names], np.diff(ends, prepend=0)
            )
        if num_rows is not None and num_rows < len(rows):
            chosen = _largest(keys, num_rows)
            rows, keys = rows[chosen], keys[chosen]
        if not len(rows):
            return rows
        return rows[np.argsort(keys.max() - keys, kind="stable")]

    def coverage(
        self,
        num_rows: int,
        on: SampleSource | Iterable[Batch | Features] | PopularityProfile | None = None,
        samples: range | None = None,
    ) -> Coverage:
        """The share of lookups that the most popular rows would serve if they were hot.

        Args:
            num_rows: How many rows of all tables together, by `ranked_rows`. Rows with a count of
                zero are not included, so there may be fewer.
            on: The lookups to measure: a source, mini-batches, or another profile of the same
                tables (which has no samples). By default the lookups of this profile.
            samples: A range of samples if `on` is a source; all by default.

        Raises:
            ConfigError: there are no lookups to measure or no such samples, or `num_rows` is
                negative.
            ProfileError: `on` has other tables.
            IdOutOfRange: `on` has an id that is not a row of its table.
        """
        return self.coverages([num_rows], on, samples)[0]

    def coverages(
        self,
        nums_rows: Sequence[int],
        on: SampleSource | Iterable[Batch | Features] | PopularityProfile | None = None,
        samples: range | None = None,
    ) -> list[Coverage]:
        """`coverage` for each of `nums_rows`; it reads the lookups, `on` and `samples`, once.

        Raises:
            ConfigError: see `coverage`; or there are no numbers of rows, or more than 254.
            ProfileError, IdOutOfRange: see `coverage`.
        """
        sizes = sorted(set(nums_rows))
        if not 1 <= len(sizes) <= _MAX_SETS or sizes[0] < 0:
            raise ConfigError(
                f"coverage: there must be 1 to {_MAX_SETS} numbers of rows, none negative, got "
                f"{len(sizes)}, the least {sizes[:1]}; measure fewer at a time"
            )
        ranked = self.ranked_rows(sizes[-1])
        levels = np.full(len(self._rows.values), len(sizes), np.uint8)
        for level in range(len(sizes) - 1, -1, -1):
            levels[ranked[: sizes[level]]] = level
        found = self.coverages_of(levels, len(sizes), on, samples)
        return [found[sizes.index(num_rows)] for num_rows in nums_rows]

    def coverages_of(
        self,
        levels: NDArray[np.uint8],
        num_levels: int,
        on: SampleSource | Iterable[Batch | Features] | PopularityProfile | None = None,
        samples: range | None = None,
    ) -> list[Coverage]:
        """`coverage` for any nested sets of rows.

        Args:
            levels: The number of the smallest set that has the row, or `num_levels` if no set has
                it, (R,).
            num_levels: How many sets there are.
            on: See `coverage`.
            samples: See `coverage`.

        Raises:
            ConfigError, ProfileError, IdOutOfRange: see `coverage`.
        """
        is_source = hasattr(on, "read") and hasattr(on, "table_sizes")
        if samples is not None and not is_source:
            raise ConfigError("coverage: samples= needs a source as on=, got something else")
        if on is None or isinstance(on, PopularityProfile):
            counted = self._rows if on is None else on._rows
            self._rows.require_same_tables(counted)
            return coverages_by_level(levels, num_levels, counted.values, None)
        first = 0
        if is_source:
            source = cast("SampleSource", on)
            self._require_columns(source)
            part = samples_of(source, samples)
            first, blocks = part.start, blocks_of_source(source, part)
        else:
            blocks = map(block_of, cast("Iterable[Batch | Features]", on))
        measured = RowCounts(self._rows.table_sizes, self._rows.features)
        num_samples = np.zeros(num_levels + 1, np.int64)
        for block in blocks:
            measured.add(block, first.__add__)
            worst = worst_levels(
                levels, measured.segments(block), block.values, block.offsets, block.num_samples
            )
            num_samples += np.bincount(worst, minlength=num_levels + 1)
            first += block.num_samples
        return coverages_by_level(levels, num_levels, measured.values, num_samples)

    def for_tables(self, tables: Sequence[TableConfig]) -> PopularityProfile:
        """A profile for the `tables` of a model, with the counts of this one.

        A table takes the counts of the profile's table of the same name. If there is none, it takes
        the sum over tables of the profile that count exactly its features, each once (for a store,
        each column is such a table).

        Raises:
            ProfileError: a table has no counts here, or has another number of rows.
        """
        found = PopularityProfile(tables)
        own_sizes = self._rows.table_sizes
        for position, (name, size) in enumerate(found._rows.table_sizes.items()):
            features = set(found._rows.features[name])
            counted = [name] if name in own_sizes else self._rows.tables_of(features)
            if not counted:
                raise ProfileError(
                    f"table {name!r} (features {sorted(features)}) is not in the profile, which "
                    f"has tables {list(own_sizes)}; profile the data of this model"
                )
            for other in counted:
                if own_sizes[other] != size:
                    raise ProfileError(
                        f"table {name!r} has {size} rows, but the profile's {other!r} has "
                        f"{own_sizes[other]}; profile the data of this model"
                    )
                begin = int(found._rows.bases[position])
                found._rows.add_rows(slice(begin, begin + size), self.counts(other))
        found.num_samples = self.num_samples
        return found

    def of_rows(self, rows: Mapping[str, tuple[int, int]]) -> PopularityProfile:
        """The counts of some rows of some tables.

        Args:
            rows: By table: the first row, and the number of rows. Rows that this profile does not
                have get a count of zero.
        """
        tables = [
            TableConfig(
                name=name,
                num_embeddings=num_rows,
                embedding_dim=1,
                feature_names=self._rows.features[name],
            )
            for name, (_, num_rows) in rows.items()
        ]
        found = PopularityProfile(tables)
        for base, (name, (first, num_rows)) in zip(
            found._rows.bases.tolist(), rows.items(), strict=True
        ):
            counts = self.counts(name)[first : first + num_rows]
            found._rows.add_rows(slice(base, base + len(counts)), counts)
        found.num_samples = self.num_samples
        return found

    def about(self) -> dict[str, Any]:
        """Everything except the counts, in JSON types; see `from_about`."""
        return {
            "tables": self.table_sizes,
            "features": self.features,
            "num_samples": self.num_samples,
        }

    @classmethod
    def from_about(cls, about: Mapping[str, Any], counts: NDArray[Any]) -> PopularityProfile:
        """Rebuild a profile from its `about()` and its `counts`, (R,), which are not copied."""
        profile = cls(about["tables"])
        features = {name: tuple(own) for name, own in about["features"].items()}
        profile._rows = RowCounts(about["tables"], features)
        profile._rows.replace(counts)
        profile.num_samples = about["num_samples"]
        return profile

    def save(self, file: str | Path) -> None:
        """Write an .npz archive without pickles to `file`, which appears when it is complete."""
        write_profile(Path(file), self.about(), self._rows.values)

    @classmethod
    def load(cls, file: str | Path) -> PopularityProfile:
        """Read a `file` written by `save`.

        Raises:
            FileNotFoundError: there is no such file.
            ProfileError: it is damaged, not a profile, or of a version that this library cannot
                read.
        """
        return cls.from_about(*read_profile(Path(file)))

    def __repr__(self) -> str:
        return (
            f"PopularityProfile(num_tables={len(self._rows.sizes)}, "
            f"num_rows={len(self._rows.values)}, num_rows_seen={self.num_rows_seen}, "
            f"num_lookups={self.num_lookups}, num_samples={self.num_samples})"
        )

    def _add_block(self, block: LookupBlock, first_sample: int) -> None:
        """Count a block, whose samples are numbered from `first_sample` in errors."""
        self._rows.add(block, first_sample.__add__)
        self.num_samples += block.num_samples

    def _require_columns(self, source: SampleSource) -> None:
        """Check the sizes of the source's columns. Missing columns raise when they are counted."""
        tables = feature_tables(source)
        sizes = {feature: source.table_sizes[table] for feature, table in tables.items()}
        for name, size in self._rows.table_sizes.items():
            for feature in self._rows.features[name]:
                if sizes.get(feature, size) != size:
                    raise ProfileError(
                        f"table {name!r} has {size} rows, but its feature {feature!r} has "
                        f"{sizes[feature]} in the data; profile this data"
                    )


def _largest(keys: NDArray[Any], num: int) -> NDArray[np.int64]:
    """Positions of the `num` largest keys, ascending; among equal keys the first ones."""
    if not num:
        return np.empty(0, np.int64)
    least = np.partition(keys, len(keys) - num)[len(keys) - num]
    above = np.flatnonzero(keys > least)
    ties = np.flatnonzero(keys == least)[: num - len(above)]
    return np.sort(np.concatenate([above, ties]))
