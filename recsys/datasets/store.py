"""The prepared store: one folder that holds a data set ready for training.

    STORE/meta.json       dtypes, sources, splits, features
          labels.bin      (N,)     int8
          dense.bin       (N, I)   int32, before the transform named in meta.json; float32 if the
                                   transform is "none"
          sparse.bin      (N, F1)  int32, rows of the features with exactly one row per sample
          ids.bin         (E,)     uint32, the raw id of every row, table after table (modulo
                                   max_ind_range if meta.json has it); missing if the store was
                                   made from rows that were numbered already

These exist only where meta.json names them among the dtypes:

          bag_values.bin  (V,)     int32, rows of the other features
          bag_ends.bin    (N, F2)  int64, where each bag ends in bag_values
          bag_weights.bin (V,)     float32, a weight for each of bag_values
          weights.bin     (N,)     float32, factor of each sample's loss
          groups.bin      (N,)     int32, the group of each sample, such as a user
          times.bin       (N,)     int64, seconds since 1970
          catalog.bin     (E, C)   int32, the rows of an item's further features, by the item's row

Bags of two features, as an example:

    bag_values = [4, 9, 9 | 2 | 7, 0]        sample by sample, in a sample feature by feature
    bag_ends   = [[2, 3], [3, 4], [6, 6]]    where each bag ends

              sample 0   sample 1   sample 2
    tags      [4, 9]     []         [7, 0]
    history   [9]        [2]        []

A bag begins where the one before it ends. `bag_weights`, if a store has them, are numbers for the
`bag_values`.

`features` in meta.json lists the features in the order of a batch. Without it, every table has one
feature with its name. Stores made from tables have a hash, `encoding`: where it is equal, features
were made in the same way. `vocabulary/` holds what each row stands for; a store opens without it.

The arrays are flat, little-endian and memory-mapped. A writer fills a folder beside the final name
and renames it after everything is written and flushed, so a store that can be opened is complete.
Dense features are kept as integers (the logarithm is taken when a batch is read), so other tools'
formats can be written from a store without loss.
"""

from __future__ import annotations

import hashlib
import json
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from recsys._support.jit import kernel
from recsys.batch import Batch, JaggedIds
from recsys.datasets.splits import SPLITS
from recsys.datasets.store_meta import features_of, histories_in, read_meta
from recsys.datasets.store_writer import StoreWriter
from recsys.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Store", "StoreWriter"]

_IDS_END = 2**32
# Entries of meta.json and arrays that only some stores have, and that decide what samples hold.
_DECIDING = ("features", "schema", "ranking", "encoding")
_DECIDING_ARRAYS = ("bag_values", "bag_weights", "weights", "groups", "times", "catalog")


class Bags(NamedTuple):
    """The bags of a store.

    Attributes:
        values: Rows, (V,) int32.
        ends: Where each bag ends, (N, F2) int64.
        weights: A weight for each value, (V,) float32; None for 1.
    """

    values: NDArray[np.int32]
    ends: NDArray[np.int64]
    weights: NDArray[np.float32] | None = None

    def gather(
        self, samples: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """The bags of some samples, feature by feature; None if one does not lie in the values.

        Shape:
            samples (B,) in [0, N); results: rows (v,) and where each bag begins, (F2 * B + 1,).
        """
        ends = self.ends.reshape(-1)
        offsets = np.zeros(self.ends.shape[1] * len(samples) + 1, np.int64)
        if not _lengths_kernel(ends, len(self.values), samples, self.ends.shape[1], offsets):
            return None
        np.cumsum(offsets, out=offsets)
        rows = np.empty(offsets[-1], np.int64)
        _rows_kernel(self.values, ends, samples, self.ends.shape[1], offsets, rows)
        return rows, offsets

    def gather_weights(
        self, samples: NDArray[np.int64], offsets: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """The weights of the rows that `gather` found.

        Args:
            samples: As for `gather`.
            offsets: Where each bag begins, from `gather`.
        """
        assert self.weights is not None
        # From the place of a bag in the result to its place in the file.
        moves = self.ends[samples].T.reshape(-1) - offsets[1:]
        places = np.arange(offsets[-1]) + np.repeat(moves, np.diff(offsets))
        weights: NDArray[np.float32] = self.weights[places]
        return weights


class Store:
    """A prepared store, opened for reading: a `SampleSource`.

    Args:
        path: A folder that `recsys prepare` made.

    Attributes:
        table_sizes: Rows of each table.
        features: The features, in the order of a batch.
        labels, dense, sparse: The arrays, as on disk: (N,), (N, I) and (N, F1), with a column for
            each feature of kind "one".
        bags: The bags of all other features; None if there are none.
        ids: The raw id of every row, table after table; None if the store has no raw ids.
        weights: Factor of each sample's loss, (N,); None for 1.
        groups: The group of each sample, (N,) int32; None if samples have no group.
        times: Seconds since 1970, (N,) int64; None if samples have no time.
        catalog: The rows of `meta["ranking"]["item_features"]` by the row of the item, (E, C);
            None if items have no further features.

    Raises:
        StoreError: `path` is not a complete store of a version that this library reads.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._folder = self.path.absolute()  # wherever the process goes
        self.meta = read_meta(self.path)
        self.num_samples: int = self.meta["num_samples"]
        self.table_sizes: dict[str, int] = self.meta["num_embeddings"]
        self.splits = {name: range(*self.meta["splits"][name]) for name in SPLITS}
        self.num_dense = len(self.meta["dense_names"])
        self.features = features_of(self.meta)
        self._names = [each.name for each in self.features]
        num_bags = sum(each.is_bag for each in self.features)
        num_rows = sum(self.table_sizes.values())
        self.labels = self._map("labels", (self.num_samples,))
        self.dense = self._map("dense", (self.num_samples, self.num_dense))
        self.sparse = self._map("sparse", (self.num_samples, len(self.features) - num_bags))
        self.ids = self._map_optional("ids", (num_rows,))
        self.weights = self._map_optional("weights", (self.num_samples,))
        self.groups = self._map_optional("groups", (self.num_samples,))
        self.times = self._map_optional("times", (self.num_samples,))
        self.bags = self._map_bags(num_bags)
        self.catalog = self._map_catalog()

    def read(self, samples: NDArray[np.int64]) -> Batch:
        """The given samples, in the given order; see `SampleSource.read`.

        Args:
            samples: Numbers of samples, (B,) in [0, num_samples).

        Raises:
            IndexError: a sample number is out of range.
            StoreError: a bag does not lie within the store's values. Other values are not
                checked: a row that is not one of its table is an error of the lookup.
        """
        if len(samples) and not 0 <= samples.min() <= samples.max() < self.num_samples:
            raise IndexError(
                f"store {self.path}: sample numbers must lie in [0, {self.num_samples}), "
                f"got {samples.min()} to {samples.max()}"
            )
        labels_B = np.empty(len(samples), np.float32)
        dense_BI = np.empty((len(samples), self.num_dense), np.float32)
        rows_FB = np.empty((self.sparse.shape[1], len(samples)), np.int64)
        _gather_kernel(self.labels, self.dense, self.sparse, samples, labels_B, dense_BI, rows_FB)
        if self.meta["dense_transform"] == "log(x+1)":
            dense_BI += 1
            with np.errstate(invalid="ignore", divide="ignore"):  # negative if damaged
                np.log(dense_BI, out=dense_BI)
        return Batch(
            torch.from_numpy(dense_BI),
            self._ids(samples, rows_FB),
            torch.from_numpy(labels_B),
            None if self.weights is None else torch.from_numpy(self.weights[samples]),
        )

    @property
    def feature_tables(self) -> dict[str, str]:
        """The table that each feature looks up, in the order of a batch."""
        return {each.name: each.table for each in self.features}

    @property
    def histories(self) -> dict[str, str]:
        """For each sequence that shares its table: the first feature of kind one that does so."""
        return histories_in(self.features)

    @property
    def fingerprint(self) -> str:
        """Equal for stores with equal samples: same raw bytes, convention, tables and splits."""
        hashes = [source["sha256"] for source in self.meta["sources"]]
        bound = self.meta.get("max_ind_range")
        # A bound above all ids changes no id.
        bounds = [] if bound is None or bound >= _IDS_END else [f"max_ind_range={bound}"]
        tables = ",".join(f"{name}:{size}" for name, size in self.table_sizes.items())
        splits = ",".join(f"{name}:{part.start}-{part.stop}" for name, part in self.splits.items())
        head = [self.meta["convention"], *bounds, str(self.num_samples), tables, splits]
        about = {key: self.meta[key] for key in _DECIDING if key in self.meta}
        arrays = [name for name in self.meta["dtypes"] if name in _DECIDING_ARRAYS]
        if about or arrays:
            text = json.dumps([about, arrays], sort_keys=True)
            head.append(f"schema:{hashlib.sha256(text.encode()).hexdigest()}")
        return " ".join([*head, *hashes])

    def describe(self) -> dict[str, Any]:
        """The entry for this data in a run record."""
        keys = (
            "convention",
            "max_ind_range",
            "sources",
            "num_samples",
            "splits",
            "encoding",
            "dense_names",
            "unknown",
        )
        kept = {key: self.meta[key] for key in keys if key in self.meta}
        found = {"name": str(self.path), **kept, "table_sizes": self.table_sizes}
        if "features" in self.meta:
            found["features"] = [each.as_dict() for each in self.features]
        return found

    def _ids(self, samples: NDArray[np.int64], rows_FB: NDArray[np.int64]) -> JaggedIds:
        """The rows of all features, given those with one row for each sample."""
        if self.bags is None:
            return JaggedIds.from_one_hot(self._names, torch.from_numpy(rows_FB))
        found = self.bags.gather(samples)
        if found is None:
            raise StoreError(
                f"{self.path / 'bag_ends.bin'}: a bag of samples {samples.min()} to "
                f"{samples.max()} must end at or after its begin, both in [0, "
                f"{len(self.bags.values)}]: the store is damaged; prepare it again"
            )
        are_bags = [each.is_bag for each in self.features]
        values, offsets = join_features(rows_FB, *found, are_bags)
        weights: torch.Tensor | None = None
        if self.bags.weights is not None:
            of_bags = self.bags.gather_weights(samples, found[1])
            ones_FB = np.ones(rows_FB.shape, np.float32)
            weights = torch.from_numpy(join_features(ones_FB, of_bags, found[1], are_bags)[0])
        return JaggedIds(self._names, torch.from_numpy(values), torch.from_numpy(offsets), weights)

    def _map_bags(self, num_bags: int) -> Bags | None:
        if not num_bags:
            return None
        ends = self._map("bag_ends", (self.num_samples, num_bags))
        num_values = int(ends[-1, -1]) if len(ends) else 0
        if num_values < 0:
            raise StoreError(
                f"{self.path / 'bag_ends.bin'}: the last bag must end at 0 or after it, got "
                f"{num_values}: the store is damaged; prepare it again"
            )
        return Bags(
            self._map("bag_values", (num_values,)),
            ends,
            self._map_optional("bag_weights", (num_values,)),
        )

    def _map_catalog(self) -> NDArray[np.int32] | None:
        if "catalog" not in self.meta["dtypes"]:
            return None
        ranking, tables = self.meta["ranking"], self.feature_tables
        num_items = self.table_sizes[tables[ranking["item"]]]
        catalog = self._map("catalog", (num_items, len(ranking["item_features"])))
        for column, name in enumerate(ranking["item_features"]):
            size = self.table_sizes[tables[name]]
            if not 0 <= catalog[:, column].min() <= catalog[:, column].max() < size:
                raise StoreError(
                    f"{self.path / 'catalog.bin'}: feature {name!r} has a row outside of "
                    f"[0, {size}): the store is damaged; prepare it again"
                )
        return catalog

    def _map_optional(self, name: str, shape: tuple[int, ...]) -> NDArray[Any] | None:
        return self._map(name, shape) if name in self.meta["dtypes"] else None

    def _map(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        file = self.path / f"{name}.bin"
        dtype = np.dtype(self.meta["dtypes"][name])
        expected = dtype.itemsize * prod(shape)
        found = file.stat().st_size if file.is_file() else 0
        if found != expected:
            raise StoreError(
                f"{file} must have {expected} bytes, has {found}: the store is damaged; "
                "prepare it again"
            )
        if not expected:
            return np.empty(shape, dtype)
        return np.memmap(file, dtype, mode="r", shape=shape).view(np.ndarray)

    def __reduce__(self) -> tuple[type[Store], tuple[Path], dict[str, Any]]:
        """Pickle and copy a store by its path: the copy opens the same folder."""
        return type(self), (self._folder,), {"splits": self.splits}

    def __repr__(self) -> str:
        return (
            f"Store({str(self.path)!r}, num_samples={self.num_samples}, "
            f"num_tables={len(self.table_sizes)}, num_rows={sum(self.table_sizes.values())})"
        )


def join_features(
    rows_FB: NDArray[Any],
    bag_rows: NDArray[Any],
    bag_offsets: NDArray[np.int64],
    are_bags: Sequence[bool],
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Values and offsets of all features, in their order.

    Args:
        rows_FB: Rows, or their weights, of the features with one row for each sample.
        bag_rows: The same of the features with bags, feature by feature.
        bag_offsets: Where these bags begin.
        are_bags: For each feature, whether it has bags.

    Shape:
        rows_FB (F1, B); bag_rows (v,); bag_offsets (F2 * B + 1,); are_bags (F,); results: values
        (F1 * B + v,) and offsets (F * B + 1,).
    """
    num_samples = rows_FB.shape[1]
    lengths_FB = np.ones((len(are_bags), num_samples), np.int64)
    lengths_FB[np.array(are_bags)] = np.diff(bag_offsets).reshape(sum(are_bags), num_samples)
    offsets = np.zeros(lengths_FB.size + 1, np.int64)
    np.cumsum(lengths_FB.reshape(-1), out=offsets[1:])
    parts, one, bag = [], 0, 0
    for is_bag in are_bags:
        if is_bag:
            begin, end = bag_offsets[bag * num_samples], bag_offsets[(bag + 1) * num_samples]
            parts.append(bag_rows[begin:end])
            bag += 1
        else:
            parts.append(rows_FB[one])
            one += 1
    return np.concatenate(parts), offsets


@kernel
def _gather_kernel(
    labels: NDArray[np.int8],
    dense: NDArray[np.int32] | NDArray[np.float32],
    sparse: NDArray[np.int32],
    samples: NDArray[np.int64],
    labels_B: NDArray[np.float32],
    dense_BI: NDArray[np.float32],
    rows_FB: NDArray[np.int64],
) -> None:
    """Gather samples, on one thread: the other cores are busy with training."""
    for position, sample in enumerate(samples):
        labels_B[position] = labels[sample]
        for column in range(dense.shape[1]):
            dense_BI[position, column] = dense[sample, column]
        for column in range(sparse.shape[1]):
            rows_FB[column, position] = sparse[sample, column]


@kernel
def _lengths_kernel(
    ends: NDArray[np.int64],
    num_values: int,
    samples: NDArray[np.int64],
    num_features: int,
    offsets: NDArray[np.int64],
) -> bool:
    """Write the length of bag i to offsets[i + 1]; returns whether all bags lie in the values."""
    is_good = True
    for position, sample in enumerate(samples):
        for feature in range(num_features):
            place = sample * num_features + feature
            begin = ends[place - 1] if place else np.int64(0)
            is_good &= 0 <= begin <= ends[place] <= num_values
            offsets[feature * len(samples) + position + 1] = ends[place] - begin
    return is_good


@kernel
def _rows_kernel(
    values: NDArray[np.int32],
    ends: NDArray[np.int64],
    samples: NDArray[np.int64],
    num_features: int,
    offsets: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> None:
    for position, sample in enumerate(samples):
        for feature in range(num_features):
            end = ends[sample * num_features + feature]
            begin = offsets[feature * len(samples) + position]
            length = offsets[feature * len(samples) + position + 1] - begin
            for number in range(length):
                rows[begin + number] = values[end - length + number]
