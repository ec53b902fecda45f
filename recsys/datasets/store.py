"""The prepared store: one folder that holds a data set ready for training.

    STORE/meta.json       dtypes, sources, splits, features, labels
          labels.bin      (N,)     int8; (N, K) if meta.json has the names of K labels
          dense.bin       (N, I)   int32, before the transform named in meta.json; float32 if the
                                   transform is "none"
          sparse.bin      (N, F1)  int32, rows of the features with exactly one row per sample
          ids.bin         (E,)     uint32, the raw id of every row, table after table (modulo
                                   max_ind_range if meta.json has it); missing if the store was
                                   made from rows that were numbered already

These exist only where meta.json names them among the dtypes:

          bag_values.bin  (V,)     int32, rows of the other features
          bag_ends.bin    (N, F2)  int64, where each bag ends in bag_values
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

A bag begins where the one before it ends.

`features` in meta.json lists the features in the order of a batch. Without it, every table has one
feature with its name. Stores made from tables have a hash, `encoding`: where it is equal, features
were made in the same way. `vocabulary/` holds what each row stands for, and `groups.arrow` the
value of each group; a store opens without them.

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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recsys._support.jit import kernel
from recsys.batch import Batch, JaggedIds
from recsys.datasets.store_writer import SPLITS, features_of, read_meta
from recsys.errors import StoreError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GROUPS", "Store"]

GROUPS = "groups.arrow"
_CHECKED_AT_ONCE = 1 << 20
_DESCRIBED = (
    "convention",
    "max_ind_range",
    "sources",
    "num_samples",
    "splits",
    "encoding",
    "labels",
    "dense_names",
    "features",
    "unknown",
    "findings",
)


class Store:
    """A prepared store, opened for reading: a `SampleSource`.

    Args:
        path: A folder that `recsys prepare` made.

    Attributes:
        table_sizes: Rows of each table.
        features: The features, in the order of a batch.
        label_names: The names of K labels; empty if samples have one label.
        labels, dense, sparse: The arrays, as on disk: (N,) or (N, K), (N, I), and (N, F1) with a
            column for each feature of kind "one".
        bag_values, bag_ends: The bags of all other features, as on disk: (V,) and (N, F2); None if
            there are none.
        ids: The raw id of every row, table after table; None if the store has no raw ids.
        weights: Factor of each sample's loss, (N,); None for 1.
        groups: The group of each sample, (N,) int32; None if samples have no group.
        times: Seconds since 1970, (N,) int64; None if samples have no time.
        catalog: The rows of `meta["ranking"]["item_features"]` by the row of the item, (E, C);
            None if items have no further features.

    Raises:
        StoreError: `path` is not a complete store of a version that this library reads. Files must
            have their sizes, bags must lie in their values, and the catalog in its tables. Other
            values are not checked: a row that is not one of its table is an error of the lookup.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._folder = self.path.absolute()  # wherever the process goes
        self.meta = meta = read_meta(self.path)
        self.num_samples: int = meta["num_samples"]
        self.table_sizes: dict[str, int] = meta["num_embeddings"]
        self.splits = {name: range(*meta["splits"][name]) for name in SPLITS}
        self.num_dense = len(meta["dense_names"])
        self.features = features_of(meta)
        self.label_names = tuple(meta.get("labels", ()))
        bags = [feature.is_bag for feature in self.features]
        # For each feature: its column in sparse, or -1 - its column in bag_ends.
        self._columns_F = np.where(bags, -np.cumsum(bags), np.cumsum(np.logical_not(bags)) - 1)
        samples = (self.num_samples,)
        num_labels = (len(self.label_names),) if self.label_names else ()
        self.labels: NDArray[np.int8] = self._map("labels", samples + num_labels)
        self.dense: NDArray[Any] = self._map("dense", (*samples, self.num_dense))
        self.sparse: NDArray[np.int32] = self._map("sparse", (*samples, len(bags) - sum(bags)))
        self.ids: NDArray[np.uint32] | None = self._map("ids", (sum(self.table_sizes.values()),))
        self.weights: NDArray[np.float32] | None = self._map("weights", samples)
        self.groups: NDArray[np.int32] | None = self._map("groups", samples)
        self.times: NDArray[np.int64] | None = self._map("times", samples)
        self.bag_ends: NDArray[np.int64] | None = self._map("bag_ends", (*samples, sum(bags)))
        values = (0 if self.bag_ends is None else self._num_bag_values(self.bag_ends.reshape(-1)),)
        self.bag_values: NDArray[np.int32] | None = self._map("bag_values", values)
        self.catalog = self._map_catalog() if "catalog" in meta["dtypes"] else None

    def read(self, samples: NDArray[np.int64]) -> Batch:
        """The given samples, in the given order; see `SampleSource.read`.

        Args:
            samples: Numbers of samples, (B,) in [0, num_samples).

        Returns:
            The mini-batch; its labels are (B, K) if the store has `label_names`, else (B,).

        Raises:
            IndexError: a sample number is out of range.
        """
        if len(samples) and not 0 <= samples.min() <= samples.max() < self.num_samples:
            raise IndexError(
                f"store {self.path}: sample numbers must lie in [0, {self.num_samples}), "
                f"got {samples.min()} to {samples.max()}"
            )
        num_labels = max(1, len(self.label_names))
        labels_NK = self.labels.reshape(self.num_samples, num_labels)
        labels_BK = np.empty((len(samples), num_labels), np.float32)
        dense_BI = np.empty((len(samples), self.num_dense), np.float32)
        rows_FB = np.empty(
            (len(self.features) if self.bag_ends is None else 0, len(samples)), np.int64
        )
        _gather_kernel(labels_NK, self.dense, self.sparse, samples, labels_BK, dense_BI, rows_FB)
        if self.meta["dense_transform"] == "log(x+1)":
            dense_BI += 1
            with np.errstate(invalid="ignore", divide="ignore"):  # negative if damaged
                np.log(dense_BI, out=dense_BI)
        return Batch(
            torch.from_numpy(dense_BI),
            self._read_ids(samples, rows_FB),
            torch.from_numpy(labels_BK if self.label_names else labels_BK[:, 0]),
            None if self.weights is None else torch.from_numpy(self.weights[samples]),
        )

    @property
    def feature_tables(self) -> dict[str, str]:
        """The table that each feature looks up, in the order of a batch."""
        return {feature.name: feature.table for feature in self.features}

    @property
    def histories(self) -> dict[str, str]:
        """For each sequence that shares its table: the first feature of kind one that does so."""
        ones = {one.table: one.name for one in reversed(self.features) if not one.is_bag}
        return {
            feature.name: ones[feature.table]
            for feature in self.features
            if feature.kind == "sequence" and feature.table in ones
        }

    def item_counts(self) -> NDArray[np.int64]:
        """How often each row of the item of `meta["ranking"]` is in a positive training sample.

        Shape:
            result (E,).
        """
        item, samples = self.meta["ranking"]["item"], self.splits["train"]
        column = self._columns_F[list(self.feature_tables).index(item)]
        counts = np.zeros(self.table_sizes[self.feature_tables[item]], np.int64)
        for begin in range(samples.start, samples.stop, _CHECKED_AT_ONCE):
            block = slice(begin, min(begin + _CHECKED_AT_ONCE, samples.stop))
            rows = self.sparse[block, column][self.labels[block] == 1]
            counts += np.bincount(rows, minlength=len(counts))
        return counts

    @property
    def fingerprint(self) -> str:
        """Equal for stores with equal samples: same raw bytes, convention, tables and splits."""
        excluded = {"sources", "unknown", "findings"}
        about = {key: value for key, value in self.meta.items() if key not in excluded}
        hashes = [source["sha256"] for source in self.meta["sources"]]
        return hashlib.sha256(json.dumps([about, hashes]).encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """The entry for this data in a run record."""
        kept = {key: self.meta[key] for key in _DESCRIBED if key in self.meta}
        return {"name": str(self.path), **kept, "table_sizes": self.table_sizes}

    def _read_ids(self, samples: NDArray[np.int64], rows_FB: NDArray[np.int64]) -> JaggedIds:
        """The rows that samples look up, feature by feature; those given if there are no bags."""
        names = [feature.name for feature in self.features]
        if self.bag_values is None or self.bag_ends is None:
            return JaggedIds.from_one_hot(names, torch.from_numpy(rows_FB))
        offsets = np.zeros(len(names) * len(samples) + 1, np.int64)
        _lengths_kernel(self.bag_ends, samples, self._columns_F, offsets[1:])
        np.cumsum(offsets, out=offsets)
        rows = np.empty(offsets[-1], np.int64)
        bags = self.bag_ends, self.bag_values
        _bags_kernel(self.sparse, *bags, samples, self._columns_F, offsets, rows)
        return JaggedIds(names, torch.from_numpy(rows), torch.from_numpy(offsets))

    def _num_bag_values(self, ends: NDArray[np.int64]) -> int:
        """The end of the last bag; all bags must end at or after their begin."""
        for begin in range(0, len(ends), _CHECKED_AT_ONCE):
            block = ends[max(0, begin - 1) : begin + _CHECKED_AT_ONCE]
            if block[0] < 0 or (block[1:] < block[:-1]).any():
                raise StoreError(
                    f"{self.path / 'bag_ends.bin'}: each bag must end at or after its begin, and "
                    "one does not: the store is damaged; prepare it again"
                )
        return int(ends[-1]) if len(ends) else 0

    def _map_catalog(self) -> NDArray[np.int32]:
        ranking, tables = self.meta["ranking"], self.feature_tables
        num_items = self.table_sizes[tables[ranking["item"]]]
        catalog: NDArray[np.int32] = self._map(
            "catalog", (num_items, len(ranking["item_features"]))
        )
        for column, name in enumerate(ranking["item_features"]):
            size = self.table_sizes[tables[name]]
            if not 0 <= catalog[:, column].min() <= catalog[:, column].max() < size:
                raise StoreError(
                    f"{self.path / 'catalog.bin'}: feature {name!r} has a row outside of "
                    f"[0, {size}): the store is damaged; prepare it again"
                )
        return catalog

    def _map(self, name: str, shape: tuple[int, ...]) -> Any:
        """An array of the store; None if the store does not have it."""
        if name not in self.meta["dtypes"]:
            return None
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


@kernel
def _gather_kernel(
    labels: NDArray[np.int8],
    dense: NDArray[np.int32] | NDArray[np.float32],
    sparse: NDArray[np.int32],
    samples: NDArray[np.int64],
    labels_BK: NDArray[np.float32],
    dense_BI: NDArray[np.float32],
    rows_FB: NDArray[np.int64],
) -> None:
    """Gather samples, on one thread: the other cores are busy with training."""
    for position, sample in enumerate(samples):
        for column in range(labels.shape[1]):
            labels_BK[position, column] = labels[sample, column]
        for column in range(dense.shape[1]):
            dense_BI[position, column] = dense[sample, column]
        for column in range(len(rows_FB)):
            rows_FB[column, position] = sparse[sample, column]


@kernel
def _lengths_kernel(
    ends: NDArray[np.int64],
    samples: NDArray[np.int64],
    columns_F: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> None:
    """Write the number of lookups of each feature and sample, (F * B,)."""
    flat = ends.reshape(-1)
    for feature, column in enumerate(columns_F):
        for position, sample in enumerate(samples):
            length = np.int64(1)
            if column < 0:
                index = sample * ends.shape[1] - 1 - column
                length = flat[index] - (flat[index - 1] if index else np.int64(0))
            lengths[feature * len(samples) + position] = length


@kernel
def _bags_kernel(
    sparse: NDArray[np.int32],
    ends: NDArray[np.int64],
    bag_values: NDArray[np.int32],
    samples: NDArray[np.int64],
    columns_F: NDArray[np.int64],
    offsets: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> None:
    """Write the rows of each feature and sample."""
    for feature, column in enumerate(columns_F):
        for position, sample in enumerate(samples):
            bag = feature * len(samples) + position
            begin, end = offsets[bag], offsets[bag + 1]
            if column >= 0:
                rows[begin] = sparse[sample, column]
                continue
            moved = ends[sample, -1 - column] - end
            for index in range(begin, end):
                rows[index] = bag_values[index + moved]
