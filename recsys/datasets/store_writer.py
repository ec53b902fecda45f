"""The format of a prepared store, which `recsys.datasets.store` describes, and its writer.

A source is a fixed sequence of samples, and a split is a range of sample numbers.

A feature of kind "one" looks up exactly one row for each sample. A feature of kind "multi" or
"sequence" looks up a bag of any number of rows; the rows of a sequence are in the order of time.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from recsys._support.files import as_argument, flush_to_disk, require_free
from recsys._support.untrusted import parse_json
from recsys.errors import AlreadyExists, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

__all__ = [
    "SPLITS",
    "Feature",
    "StoreWriter",
    "classic_splits",
    "features_of",
    "is_store",
    "read_meta",
]

SPLITS = ("train", "test", "validation")
KINDS = ("one", "multi", "sequence")
# The dtype of dense.bin, by the transform that is applied when a batch is read.
_DENSE_DTYPES = {"log(x+1)": "<i4", "none": "<f4"}
_DTYPES = {
    "labels": "<i1",
    "dense": "<i4",
    "sparse": "<i4",
    "bag_values": "<i4",
    "bag_ends": "<i8",
    "weights": "<f4",
    "groups": "<i4",
    "times": "<i8",
    "catalog": "<i4",
    "ids": "<u4",
}


def classic_splits(num_samples: int, num_held_out: int | None = None) -> dict[str, range]:
    """Split samples as facebookresearch/dlrm does: the first part trains, the last is halved.

    The first half of the last part (rounded up) is the test part, the second half the validation
    part.

    Args:
        num_samples: Samples in all.
        num_held_out: Samples of the last part, such as the last day of several; by default a
            seventh, as of the Kaggle data.
    """
    train_end = num_samples - (num_samples // 7 if num_held_out is None else num_held_out)
    test_end = train_end + (num_samples - train_end + 1) // 2
    return {
        "train": range(train_end),
        "test": range(train_end, test_end),
        "validation": range(test_end, num_samples),
    }


class Feature(NamedTuple):
    """A feature.

    Attributes:
        name: Its name; distinct in a store.
        table: The table that it looks up, without a ".": the names of a model's parameters have
            one. Several features may share a table.
        kind: "one", "multi" or "sequence".
    """

    name: str
    table: str
    kind: str = "one"

    @property
    def is_bag(self) -> bool:
        """Whether a sample may look up any number of rows."""
        return self.kind != "one"


def features_of(meta: Mapping[str, Any]) -> tuple[Feature, ...]:
    """The features of a store, given its `meta.json`."""
    if "features" in meta:
        return tuple(Feature(**entry) for entry in meta["features"])
    return tuple(Feature(table, table) for table in meta["num_embeddings"])


def is_store(path: Path) -> bool:
    """Whether a folder looks like a store: a table's folder does not."""
    return (path / "meta.json").is_file()


def read_meta(path: Path) -> dict[str, Any]:
    """Read `meta.json` of the store at `path`.

    Raises:
        StoreError: it does not exist, is damaged, or is of a version that this library cannot read;
            or `path` is a file, such as a table that is not prepared yet.
    """
    file, name = path / "meta.json", as_argument(path)
    if path.is_file():
        raise StoreError(
            f"{path} is a file, and data must be a store, the folder that `recsys prepare` makes; "
            f"make it of a CSV, TSV or Parquet table by `recsys inspect {name} > schema.toml` and "
            f"`recsys prepare table {name} --schema schema.toml --out STORE`; for a model that is "
            f"trained, by `recsys prepare table {name} --like ITS_STORE --out STORE`; of raw "
            f"Criteo text by `recsys prepare criteo-kaggle {name} --out STORE`"
        )
    if not file.is_file():
        reason = "is not a store: it has no meta.json" if path.exists() else "does not exist"
        raise StoreError(
            f"{path} {reason}; prepare a store with "
            f"`recsys prepare table FILES --schema SCHEMA --out {name}`, or with "
            f"`recsys prepare criteo-kaggle RAW --out {name}`"
        )
    try:
        meta: dict[str, Any] = parse_json(file.read_bytes())
        found = meta["format"], meta["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{file} is damaged ({error}); prepare the store again") from error
    if found != ("recsys-store", 1):
        raise StoreError(
            f"{file}: format and version must be 'recsys-store' and 1 for this version of recsys, "
            f"got {found}; prepare the store again"
        )
    return meta


def _dtypes(dense_transform: str, features: Sequence[Feature], has: Collection[str]) -> Any:
    """The dtype of each array of a store, in the order of its files.

    Args:
        dense_transform: A key of `_DENSE_DTYPES`.
        features: The features.
        has: Names of the arrays that the store has for other reasons. Other names are ignored.
    """
    wanted = {"labels", "dense", "sparse", *has} - {"bag_values", "bag_ends"}
    if any(feature.is_bag for feature in features):
        wanted |= {"bag_values", "bag_ends"}
    kept = {name: dtype for name, dtype in _DTYPES.items() if name in wanted}
    return kept | {"dense": _DENSE_DTYPES[dense_transform]}


class StoreWriter:
    """Writes a new store; use it as a context manager.

    Nothing appears under `path` before `finish`. If the context ends without `finish`, the written
    files are removed. A killed process leaves them, and the next writer of the same store names the
    folder that is to be removed.

    Args:
        path: The store's folder, which must not exist.
        dense_transform: Applied when a batch is read: "log(x+1)" to integers, "none" to floats.
        label_names: The names of the K labels of each sample; without names it has one label.
        features: The features, in the order in which batches hold them. By default every table
            has one feature of kind "one", with the name of the table.
        has_weights: Whether each sample has a weight.
        has_groups: Whether each sample belongs to a group, such as a user.
        has_times: Whether each sample has a time.

    Attributes:
        folder: Holds the store until `finish`; the caller may add files and folders.
        num_samples: Samples appended so far.

    Raises:
        AlreadyExists: `path` exists, or another writer of the store is at work or was killed.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        dense_transform: str = "log(x+1)",
        label_names: Sequence[str] = (),
        features: Sequence[Feature] | None = None,
        has_weights: bool = False,
        has_groups: bool = False,
        has_times: bool = False,
    ) -> None:
        self.path = Path(path)
        self._dense_transform, self._label_names = dense_transform, list(label_names)
        self._features = features
        flags = {"weights": has_weights, "groups": has_groups, "times": has_times}
        has = [name for name, is_there in flags.items() if is_there]
        self._dtypes = _dtypes(dense_transform, features or (), has)
        require_free(self.path)
        self.folder = self.path.parent / f".{self.path.name}.partial"
        try:
            self.folder.mkdir(parents=True)
        except FileExistsError:
            raise AlreadyExists(
                f"{self.folder} exists already: a preparation of this store is at work, or was "
                f"killed; if none is at work: rm -r {as_argument(self.folder)}"
            ) from None
        self._files = {name: (self.folder / f"{name}.bin").open("wb") for name in self._dtypes}
        self._num_bag_values = 0
        self.num_samples = 0

    def append(
        self,
        labels: NDArray[np.int8],
        dense: NDArray[np.int32] | NDArray[np.float32],
        sparse: NDArray[np.int32],
        *,
        bag_values: NDArray[np.int32] | None = None,
        bag_lengths: NDArray[Any] | None = None,
        weights: NDArray[np.float32] | None = None,
        groups: NDArray[np.int32] | None = None,
        times: NDArray[np.int64] | None = None,
    ) -> None:
        """Add samples at the end.

        The optional arrays are those that the store was declared to have, no more and no fewer.

        Args:
            labels: 0 or 1.
            dense: Dense features.
            sparse: Rows of the features of kind "one", in the order of the features.
            bag_values: Rows of all other features: sample by sample, in a sample feature by
                feature.
            bag_lengths: How many of these rows each bag has.
            weights: Factor of each sample's loss; finite and not negative.
            groups: The number of each sample's group, from 0 up.
            times: Seconds since 1970.

        Shape:
            labels (n,), or (n, K) with `label_names`; weights, groups, times (n,); dense (n, I);
            sparse (n, F1); bag_values (v,); bag_lengths (n, F2), with sum v.
        """
        arrays: dict[str, NDArray[Any]] = {"labels": labels, "dense": dense, "sparse": sparse}
        optional = {"weights": weights, "groups": groups, "times": times}
        optional |= {"bag_values": bag_values, "bag_ends": bag_lengths}
        arrays |= {name: array for name, array in optional.items() if array is not None}
        assert arrays.keys() == self._dtypes.keys(), "these are not the arrays that were declared"
        if bag_values is not None and bag_lengths is not None:
            arrays["bag_ends"] = np.cumsum(bag_lengths, dtype=np.int64) + self._num_bag_values
            self._num_bag_values += len(bag_values)
        for name, array in arrays.items():
            self._files[name].write(np.ascontiguousarray(array, self._dtypes[name]).data)
        self.num_samples += len(labels)

    def finish(
        self,
        *,
        dense_names: Sequence[str],
        splits: Mapping[str, range],
        about: Mapping[str, Any],
        ids: Mapping[str, NDArray[np.uint32]] | None = None,
        table_sizes: Mapping[str, int] | None = None,
        catalog: NDArray[np.int32] | None = None,
        findings: Callable[[Path], list[str]] = lambda folder: [],
    ) -> Path:
        """Write `meta.json`, flush everything to the disk and rename the folder to `path`.

        Args:
            dense_names: The dense features, in column order.
            splits: Sample numbers of "train", "test" and "validation".
            about: Further entries of meta.json: convention, sources, and where there are any,
                schema and ranking.
            ids: The raw id of every row, by table; for a store without `features`.
            table_sizes: Rows of each table; needed if `ids` is None.
            catalog: For each row of the table of ranking's item, the rows that ranking's
                item_features look up, (E, C).
            findings: Given the folder of the complete store, returns what meta.json says of it.
        """
        if ids is not None:
            table_sizes = {name: len(rows) for name, rows in ids.items()}
            self._files["ids"] = (self.folder / "ids.bin").open("wb")
            for rows in ids.values():
                self._files["ids"].write(np.ascontiguousarray(rows, "<u4").data)
        if catalog is not None:
            self._files["catalog"] = (self.folder / "catalog.bin").open("wb")
            self._files["catalog"].write(np.ascontiguousarray(catalog, "<i4").data)
        assert table_sizes is not None, "finish needs ids or table_sizes"
        meta = {
            "format": "recsys-store",
            "version": 1,
            "dense_transform": self._dense_transform,
            "dtypes": _dtypes(self._dense_transform, self._features or (), self._files),
            **about,
            "num_samples": self.num_samples,
            "splits": {name: [part.start, part.stop] for name, part in splits.items()},
            "dense_names": list(dense_names),
            "num_embeddings": dict(table_sizes),
        }
        if self._label_names:
            meta["labels"] = self._label_names
        if self._features is not None:
            meta["features"] = [feature._asdict() for feature in self._features]
        for file in self._files.values():
            file.close()
        file_of_meta = self.folder / "meta.json"
        file_of_meta.write_text(json.dumps(meta, indent=2) + "\n")
        if found := findings(self.folder):
            file_of_meta.write_text(json.dumps(meta | {"findings": found}, indent=2) + "\n")
        for path in (*self.folder.rglob("*"), self.folder):
            flush_to_disk(path)
        self.folder.rename(self.path)
        flush_to_disk(self.path.parent)
        return self.path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            with suppress(OSError):  # closing flushes, which fails again on a full disk
                file.close()
        shutil.rmtree(self.folder, ignore_errors=True)  # does not exist after `finish`
