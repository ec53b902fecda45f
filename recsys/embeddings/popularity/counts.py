"""Popularity: how often each row of every table is looked up, and what hot rows would serve.

A profile holds one count for each row of its tables, and nothing else that grows. It counts a store
or mini-batches, and measures which share of lookups a set of hot rows would serve:

    half = store.num_samples // 2
    profile = PopularityProfile.count(store, range(half))
    later = profile.coverage(10_000, store, range(half, store.num_samples))
    later.lookup_hit_rate

Rows are numbered consecutively over all tables: row v of table t is `bases[t] + v`. Nested sets of
rows are measured in one pass. The level of a row is the number of the smallest set that has it, or
the number of sets if none has it. The level of a sample is the highest level of its rows.

Letters: B samples, E rows of one table, F features, N lookups, R rows of all tables, T tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast, final

import numpy as np
import torch

from recsys.batch import feature_tables, features_by_table, require_one_batch_size
from recsys.embeddings.kernels.cpu.counting import Segments, count_rows, worst_levels
from recsys.embeddings.popularity.files import read_profile, write_profile
from recsys.embeddings.table import TableConfig
from recsys.errors import ConfigError, IdOutOfRange, MalformedBags, ProfileError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from recsys.batch import Batch, Features, SampleSource

__all__ = [
    "Coverage",
    "LookupBlock",
    "PopularityProfile",
    "blocks_of_source",
    "format_coverages",
    "samples_of",
    "text_table",
]

# Samples per block of a store that is read in place. Threads wait for each other after every block,
# on a busy machine for some milliseconds: blocks of an eighth were counted a quarter slower.
_BLOCK_SAMPLES = 1 << 21
_READ_SAMPLES = 1 << 16  # per call of a source's `read`
_MAX_NARROW = 2**32 - 1
_MAX_SETS = 254  # a row's level is a byte, and one level means "in no set"


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The share of lookups, rows and samples that hot rows serve.

    Attributes:
        num_rows: Hot rows.
        num_lookups: Measured lookups.
        lookup_hit_rate: Share of the lookups that go to hot rows.
        num_distinct_rows: Distinct rows that are looked up.
        num_distinct_hot_rows: How many of these are hot.
        num_samples: Measured samples; None if only counts per row were known.
        hot_sample_share: Share of samples all of whose lookups go to hot rows; None if there are no
            samples or only counts per row were known.
    """

    num_rows: int
    num_lookups: int
    lookup_hit_rate: float
    num_distinct_rows: int
    num_distinct_hot_rows: int
    num_samples: int | None
    hot_sample_share: float | None


class LookupBlock(NamedTuple):
    """The lookups of B samples.

    Attributes:
        features: F names.
        values: Rows, (N,) int32 or int64, contiguous.
        first: Position of each feature's first value.
        num: How many values each has.
        stride: From one value of a feature to its next.
        offsets: Where bags begin, feature by feature, (F * B + 1,); None where every bag has one
            value.
        num_samples: B.
    """

    features: Sequence[str]
    values: NDArray[Any]
    first: NDArray[np.int64]
    num: NDArray[np.int64]
    stride: int
    offsets: NDArray[Any] | None
    num_samples: int


@final
class PopularityProfile:
    """Counts of lookups per row. Not thread-safe.

    Counts are 32-bit integers. They become 64-bit integers before a count could exceed 2**32 - 1.

    Args:
        tables: Either the number of rows by table name, for tables whose one feature has the name
            of the table, or `TableConfig`s (TorchRec's `EmbeddingBagConfig`s, too).

    Attributes:
        num_samples: Samples counted.
        table_sizes: Rows by table.
        features: The features of each table.
        bases: The number of the first row of each table, (T,) int64.

    Raises:
        ConfigError: there is no table, a size is not positive, or a name occurs twice.
    """

    def __init__(self, tables: Mapping[str, int] | Sequence[TableConfig]) -> None:
        self.num_samples = 0
        self.table_sizes, self.features = _named_tables(tables)
        self._sizes = np.array(list(self.table_sizes.values()), np.int64)
        self.bases: NDArray[np.int64] = np.cumsum(self._sizes) - self._sizes
        self._counts: NDArray[Any] = np.zeros(int(self._sizes.sum()), np.uint32)
        self._most = 0  # an upper bound of all counts

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
        profile = cls(source.table_sizes)
        profile.features = features_by_table(source)
        part = samples_of(source, samples)
        first = part.start
        for block in blocks_of_source(source, part):
            profile._add_block(block, first)
            first += block.num_samples
        return profile

    @property
    def num_lookups(self) -> int:
        """The sum of all counts, computed at each call."""
        return int(self._counts.sum(dtype=np.int64))

    @property
    def num_rows_seen(self) -> int:
        """Rows with a count above zero, computed at each call."""
        return int(np.count_nonzero(self._counts))

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
        self._add_block(_block_of(batch), 0)

    def counts(self, table: str | None = None) -> NDArray[Any]:
        """Lookups of each row of `table`, or of all R rows of all tables; a read-only view.

        Shape:
            (E,) or (R,) uint32 or int64.

        Raises:
            KeyError: there is no such table.
        """
        view = self._counts.view()
        view.flags.writeable = False
        if table is None:
            return view
        if table not in self.table_sizes:
            raise KeyError(f"the profile has no table {table!r}; it has {list(self.table_sizes)}")
        begin = self.bases[list(self.table_sizes).index(table)]
        return view[begin : begin + self.table_sizes[table]]

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
        rows = np.flatnonzero(self._counts)
        keys: NDArray[Any] = self._counts[rows]
        if weights is not None:
            names = list(self.table_sizes)
            if set(weights) != set(names):
                raise ConfigError(
                    f"profile: weights must have the tables {names}, got {list(weights)}"
                )
            ends = np.searchsorted(rows, self.bases + self._sizes)
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
        on: SampleSource | Iterable[Batch | Features] | None = None,
        samples: range | None = None,
    ) -> Coverage:
        """The share of lookups that the most popular rows would serve if they were hot.

        Args:
            num_rows: How many rows of all tables together, by `ranked_rows`. Rows with a count of
                zero are not included, so there may be fewer.
            on: The lookups to measure: a source, or mini-batches. By default those of this profile,
                which has no samples.
            samples: A range of samples if `on` is a source; all by default.

        Raises:
            ConfigError: there are no lookups to measure or no such samples, or `num_rows` is
                negative.
            ProfileError: `on` lacks a feature.
            IdOutOfRange: `on` has an id that is not a row of its table.
        """
        return self.coverages([num_rows], on, samples)[0]

    def coverages(
        self,
        nums_rows: Sequence[int],
        on: SampleSource | Iterable[Batch | Features] | None = None,
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
        levels = np.full(len(self._counts), len(sizes), np.uint8)
        for level in range(len(sizes) - 1, -1, -1):
            levels[ranked[: sizes[level]]] = level
        found = self.coverages_of(levels, len(sizes), on, samples)
        return [found[sizes.index(num_rows)] for num_rows in nums_rows]

    def coverages_of(
        self,
        levels: NDArray[np.uint8],
        num_levels: int,
        on: SampleSource | Iterable[Batch | Features] | None,
        samples: range | None,
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
        if on is None:
            return _coverages(levels, num_levels, self._counts, None)
        first = 0
        if is_source:
            source = cast("SampleSource", on)
            part = samples_of(source, samples)
            first, blocks = part.start, blocks_of_source(source, part)
        else:
            blocks = map(_block_of, cast("Iterable[Batch | Features]", on))
        measured = self._without_counts()
        num_samples = np.zeros(num_levels + 1, np.int64)
        for worst in measured._count_levels(blocks, first, levels):
            num_samples += np.bincount(worst, minlength=num_levels + 1)
        return _coverages(levels, num_levels, measured._counts, num_samples)

    def levels_of_samples(
        self, levels: NDArray[np.uint8], source: SampleSource, samples: range
    ) -> Iterator[NDArray[np.uint8]]:
        """The levels of a source's samples, block by block.

        Args:
            levels: See `coverages_of`.
            source: Is read; its features look up the tables.
            samples: A range of samples with step 1.

        Shape:
            levels (R,); each result (samples of a block,), the worst level of what each looks up.

        Raises:
            ConfigError, ProfileError, IdOutOfRange: see `coverage`.
        """
        part = samples_of(source, samples)
        return self._without_counts()._count_levels(
            blocks_of_source(source, part), part.start, levels
        )

    def for_tables(self, tables: Sequence[TableConfig]) -> PopularityProfile:
        """A profile for the `tables` of a model, with the counts of this one.

        A table takes the counts of the profile's table of the same name. If there is none, it takes
        the sum over tables of the profile that count exactly its features, each once (for a store,
        each column is such a table).

        Raises:
            ProfileError: a table has no counts here, or has another number of rows.
        """
        found = PopularityProfile(tables)
        for position, (name, size) in enumerate(found.table_sizes.items()):
            features = set(found.features[name])
            counted = [name] if name in self.table_sizes else self._tables_of(features)
            if not counted:
                raise ProfileError(
                    f"table {name!r} (features {sorted(features)}) is not in the profile, which "
                    f"has tables {list(self.table_sizes)}; profile the data of this model"
                )
            for other in counted:
                if self.table_sizes[other] != size:
                    raise ProfileError(
                        f"table {name!r} has {size} rows, but the profile's {other!r} has "
                        f"{self.table_sizes[other]}; profile the data of this model"
                    )
                found._add_counts(int(found.bases[position]), self.counts(other))
        found.num_samples = self.num_samples
        return found

    def of_rows(self, rows: Mapping[str, tuple[int, int]]) -> PopularityProfile:
        """The counts of some rows of some tables.

        Args:
            rows: By table: the first row, and the number of rows. Rows that this profile does not
                have get a count of zero.
        """
        found = PopularityProfile({name: num_rows for name, (_, num_rows) in rows.items()})
        found.features = {name: self.features[name] for name in rows}
        for base, (name, (first, num_rows)) in zip(found.bases.tolist(), rows.items(), strict=True):
            found._add_counts(base, self.counts(name)[first : first + num_rows])
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
        profile.features = {name: tuple(own) for name, own in about["features"].items()}
        profile._counts, profile._most = counts, int(counts.max(initial=0))
        profile.num_samples = about["num_samples"]
        return profile

    def save(self, file: str | Path) -> None:
        """Write an .npz archive without pickles to `file`, which appears when it is complete."""
        write_profile(Path(file), self.about(), self._counts)

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
            f"PopularityProfile(num_tables={len(self.table_sizes)}, "
            f"num_rows={len(self._counts)}, num_rows_seen={self.num_rows_seen}, "
            f"num_lookups={self.num_lookups}, num_samples={self.num_samples})"
        )

    def _without_counts(self) -> PopularityProfile:
        """A profile of the same tables that has counted nothing."""
        return self.from_about(self.about() | {"num_samples": 0}, np.zeros_like(self._counts))

    def _count_levels(
        self, blocks: Iterable[LookupBlock], first: int, levels: NDArray[np.uint8]
    ) -> Iterator[NDArray[np.uint8]]:
        """Count blocks, whose samples are numbered from `first`; yields the levels of samples."""
        for block in blocks:
            self._add_block(block, first)  # raises if an id is not a row
            yield worst_levels(
                levels, self._segments(block), block.values, block.offsets, block.num_samples
            )
            first += block.num_samples

    def _add_block(self, block: LookupBlock, first: int) -> None:
        """Count a block, whose samples are numbered from `first`. If this raises, nothing counts.

        Raises:
            ProfileError: the block lacks a feature.
            IdOutOfRange: a value is not a row of its table.
        """
        segments = self._segments(block)
        self._reserve(int(np.bincount(segments.tables, segments.num).max(initial=0)))
        if count_rows(self._counts, segments, block.values) >= 0:
            count_rows(self._counts, segments, block.values, -1)
            raise _out_of_range(block, segments, first)
        self.num_samples += block.num_samples

    def _add_counts(self, base: int, counts: NDArray[Any]) -> None:
        """Add other counts to those of the rows from number `base` on."""
        self._reserve(int(counts.max(initial=0)))
        self._counts[base : base + len(counts)] += counts.astype(self._counts.dtype, copy=False)

    def _reserve(self, num_lookups: int) -> None:
        """Ensure that no count overflows if up to `num_lookups` are added to each row."""
        self._most += num_lookups
        if self._most > _MAX_NARROW and self._counts.dtype != np.int64:
            self._most = int(self._counts.max(initial=0)) + num_lookups
            if self._most > _MAX_NARROW:
                self._counts = self._counts.astype(np.int64)

    def _segments(self, block: LookupBlock) -> Segments:
        """The segments of a block: the lookups of each feature in each table."""
        positions, tables = [], []
        names = {name: position for position, name in enumerate(block.features)}
        for table, (name, features) in enumerate(self.features.items()):
            for feature in features:
                if feature not in names:
                    raise ProfileError(
                        f"table {name!r}: its feature {feature!r} is not in the data, which has "
                        f"{list(names)}; make the profile for tables of these features"
                    )
                positions.append(names[feature])
                tables.append(table)
        return Segments(
            np.array(tables, np.int64),
            self.bases[tables],
            self._sizes[tables],
            block.first[positions],
            block.num[positions],
            np.array(positions, np.int64) * block.num_samples,
            block.stride,
        )

    def _tables_of(self, features: set[str]) -> list[str]:
        """Tables that count each of some features once, and no others; empty without such."""
        tables: list[str] = []
        left = set(features)
        for name, own in sorted(self.features.items(), key=lambda item: -len(item[1])):
            if left.issuperset(own):  # or another table has counted one of them, too
                tables.append(name)
                left.difference_update(own)
        return [] if left else tables


def blocks_of_source(source: SampleSource, samples: range) -> Iterator[LookupBlock]:
    """A range of a source's samples, in blocks.

    The blocks are views of `source.sparse` if that array has all features (see `SampleSource`).

    Args:
        source: Is read.
        samples: The range.
    """
    features = list(feature_tables(source))
    rows: NDArray[np.int32] | None = getattr(source, "sparse", None)
    if rows is not None and rows.shape[1] != len(features):
        rows = None  # it lacks the features with bags
    size = _READ_SAMPLES if rows is None else _BLOCK_SAMPLES
    for begin in range(samples.start, samples.stop, size):
        end = min(begin + size, samples.stop)
        if rows is not None:
            yield LookupBlock(
                features,
                rows[begin:end].reshape(-1),
                np.arange(len(features), dtype=np.int64),
                np.full(len(features), end - begin),
                len(features),
                None,
                end - begin,
            )
        else:
            yield _block_of(source.read(np.arange(begin, end)))


def samples_of(source: SampleSource, samples: range | None) -> range:
    """The given range of samples, checked; by default all samples.

    Raises:
        ConfigError: it is not a range of the source's samples with step 1.
    """
    if samples is None:
        return range(source.num_samples)
    if samples.step != 1 or not 0 <= samples.start <= samples.stop <= source.num_samples:
        raise ConfigError(
            f"samples must be a range of step 1 within [0, {source.num_samples}), got {samples}; "
            "choose other samples, or more data"
        )
    return samples


def _coverages(
    levels: NDArray[np.uint8],
    num_levels: int,
    counts: NDArray[np.uint32] | NDArray[np.int64],
    samples: NDArray[np.int64] | None,
) -> list[Coverage]:
    """The coverage of every set of rows: level 0, levels 0 and 1, and so on.

    Args:
        levels: The level of each row; `num_levels` if no set has it.
        num_levels: How many sets there are.
        counts: Lookups of each row.
        samples: The number of samples of each level; None if not known.

    Shape:
        levels (R,); counts (R,); samples (num_levels + 1,); R rows of all tables.

    Raises:
        ConfigError: there are no lookups.
    """
    of_levels = [counts[levels == level] for level in range(num_levels + 1)]
    rows = [len(of_level) for of_level in of_levels]
    lookups = [int(of_level.sum(dtype=np.int64)) for of_level in of_levels]
    distinct = [int(np.count_nonzero(of_level)) for of_level in of_levels]
    num_lookups = sum(lookups)
    if not num_lookups:
        raise ConfigError("coverage: there must be lookups to measure, got none; use other samples")
    num_samples = None if samples is None else int(samples.sum())
    return [
        Coverage(
            num_rows=sum(rows[: level + 1]),
            num_lookups=num_lookups,
            lookup_hit_rate=sum(lookups[: level + 1]) / num_lookups,
            num_distinct_rows=sum(distinct),
            num_distinct_hot_rows=sum(distinct[: level + 1]),
            num_samples=num_samples,
            hot_sample_share=None
            if samples is None or not num_samples
            else int(samples[: level + 1].sum()) / num_samples,
        )
        for level in range(num_levels)
    ]


def format_coverages(coverages: Sequence[Coverage], num_rows_seen: int) -> str:
    """A text table with one line per set of hot rows.

    Args:
        coverages: Of the sets, measured on the same lookups.
        num_rows_seen: The number of rows that the sets were chosen from.
    """
    header = ("hot rows", "of rows seen", "lookups", "distinct rows", "whole samples")
    lines = [
        (
            f"{found.num_rows:,}",
            f"{found.num_rows / max(num_rows_seen, 1):.1%}",
            f"{found.lookup_hit_rate:.1%}",
            f"{found.num_distinct_hot_rows / found.num_distinct_rows:.1%}",
            "-" if found.hot_sample_share is None else f"{found.hot_sample_share:.1%}",
        )
        for found in coverages
    ]
    return text_table([header, *lines])


def text_table(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells, aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def _block_of(batch: Batch | Features) -> LookupBlock:
    """The lookups of a mini-batch; tensors on the CPU are not copied.

    Args:
        batch: A `Batch` (TorchRec's, too), `JaggedIds` or a `KeyedJaggedTensor`.

    Raises:
        MalformedBags: values are no integers, or the offsets do not fit the values.
        ValueError: features have different batch sizes.
    """
    features: Any = getattr(batch, "sparse_features", batch)
    require_one_batch_size(features)
    names, num_samples = list(features.keys()), int(features.stride())
    values, offsets = features.values().detach().cpu(), features.offsets().detach().cpu()
    if values.dtype not in (torch.int32, torch.int64) or values.dim() != 1:
        raise MalformedBags(
            "values must be (N,) int32 or int64 to be counted, got "
            f"{tuple(values.shape)} {values.dtype}; convert them"
        )
    values_N, bounds = values.contiguous().numpy(), offsets.numpy()
    firsts = np.arange(len(names), dtype=np.int64) * num_samples
    known = getattr(features, "is_known_one_hot", None)
    if known is not None and known():
        num = np.full(len(names), num_samples)
        return LookupBlock(names, values_N, firsts, num, 1, None, num_samples)
    # `KeyedJaggedTensor` does not check its offsets, and kernels index by them unchecked.
    num_bounds, rises = len(names) * num_samples + 1, (np.diff(bounds) >= 0).all()
    if len(bounds) != num_bounds or bounds[0] or not rises or bounds[-1] > len(values_N):
        raise MalformedBags(
            f"offsets must be {num_bounds} for {len(names)} features of {num_samples} samples, "
            f"begin at 0, never fall and end at the number of values, {len(values_N)}, got {bounds}"
        )
    ends = bounds[np.append(firsts, len(names) * num_samples)].astype(np.int64)
    return LookupBlock(names, values_N, ends[:-1], np.diff(ends), 1, bounds, num_samples)


def _out_of_range(block: LookupBlock, segments: Segments, first_sample: int) -> IdOutOfRange:
    """The error for the first value of a block that is not a row of its table."""
    for first, num, size, first_bag in zip(
        segments.first.tolist(),
        segments.num.tolist(),
        segments.sizes.tolist(),
        segments.first_bag.tolist(),
        strict=True,
    ):
        values = block.values[first:][: num * block.stride : block.stride]
        bad = np.flatnonzero((values < 0) | (values >= size))
        if len(bad):
            sample = int(bad[0])
            if block.offsets is not None:
                bounds = block.offsets[first_bag : first_bag + block.num_samples + 1]
                sample = int(np.searchsorted(bounds, first + sample, side="right")) - 1
            return IdOutOfRange(
                f"feature {block.features[first_bag // block.num_samples]!r}, sample "
                f"{first_sample + sample}: id {values[bad[0]]} is not in [0, {size}); raise "
                "num_embeddings or hash the ids"
            )
    raise AssertionError("every value is a row of every table it is looked up in")


def _named_tables(
    tables: Mapping[str, int] | Sequence[TableConfig],
) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """Sizes and features by table name.

    Raises:
        ConfigError: there is no table, a size is no positive integer, or a name occurs twice.
    """
    if isinstance(tables, Mapping):
        sized = tables.items()
        tables = [TableConfig(name=n, num_embeddings=size, embedding_dim=1) for n, size in sized]
    sizes = {table.name: int(table.num_embeddings) for table in tables}
    if not sizes or len(sizes) < len(tables):
        raise ConfigError(
            "profile: there must be at least one table, and names must be distinct, got "
            f"{[table.name for table in tables]}"
        )
    return sizes, {table.name: tuple(table.feature_names) or (table.name,) for table in tables}


def _largest(keys: NDArray[Any], num: int) -> NDArray[np.int64]:
    """Positions of the `num` largest keys, ascending; among equal keys the first ones."""
    if not num:
        return np.empty(0, np.int64)
    least = np.partition(keys, len(keys) - num)[len(keys) - num]
    above = np.flatnonzero(keys > least)
    ties = np.flatnonzero(keys == least)[: num - len(above)]
    return np.sort(np.concatenate([above, ties]))
