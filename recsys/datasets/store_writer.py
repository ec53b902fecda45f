"""Writes a prepared store: the folder that `recsys.datasets.store` describes.

A writer fills a folder beside the final name and renames it after everything is written and
flushed, so a store that can be opened is complete.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from recsys._support.files import as_argument, describe_taken, flush_to_disk, is_taken
from recsys.datasets.store_meta import BAG_ARRAYS, UNDERSTOOD, dtypes_of, require_features
from recsys.errors import AlreadyExists

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from recsys.datasets.store_meta import Feature

__all__ = ["StoreWriter"]


class StoreWriter:
    """Writes a new store; use it as a context manager.

    Nothing appears under `path` before `finish`. If the context ends without `finish`, the written
    files are removed. A killed process leaves them, and the next writer of the same store warns.

    Args:
        path: The store's folder, which must not exist.
        dense_transform: Applied when a batch is read: "log(x+1)" to integers, "none" to floats.
        features: The features, in the order in which batches hold them. By default every table
            has one feature of kind "one", with the name of the table.
        has_weights: Whether each sample has a weight.
        has_groups: Whether each sample belongs to a group, such as a user.
        has_times: Whether each sample has a time.

    Attributes:
        folder: Holds the store until `finish`; the caller may add files and folders.
        num_samples: Samples appended so far.

    Raises:
        AlreadyExists: `path` exists.
        ConfigError: a name of a feature occurs twice, or its table, kind or weights are not valid.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        dense_transform: str = "log(x+1)",
        features: Sequence[Feature] | None = None,
        has_weights: bool = False,
        has_groups: bool = False,
        has_times: bool = False,
    ) -> None:
        require_features(features or ())
        self.path = Path(path)
        self._dense_transform = dense_transform
        self._features = features
        self._num_bags = sum(feature.is_bag for feature in features or ())
        flags = {"weights": has_weights, "groups": has_groups, "times": has_times}
        optional = [name for name, is_there in flags.items() if is_there]
        if self._num_bags:
            optional += BAG_ARRAYS
        if any(feature.is_weighted for feature in features or ()):
            optional.append("bag_weights")
        self._dtypes = dtypes_of(dense_transform, optional)
        if is_taken(self.path):
            raise AlreadyExists(f"{describe_taken(self.path)}; choose another folder for the store")
        self.folder = self.path.parent / f".{self.path.name}.{secrets.token_hex(4)}"
        _warn_of_left_folders(self.path)
        self.folder.mkdir(parents=True)
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
        bag_weights: NDArray[np.float32] | None = None,
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
            bag_weights: A weight for each of these rows, finite; 1 for features without weights.
            weights: Factor of each sample's loss; finite and not negative.
            groups: The number of each sample's group, from 0 up.
            times: Seconds since 1970.

        Shape:
            labels, weights, groups, times (n,); dense (n, I); sparse (n, F1); bag_values and
            bag_weights (v,); bag_lengths (n, F2), with sum v.

        Raises:
            ValueError: an optional array is missing or was not declared, or the lengths or the
                weights do not fit the values.
        """
        arrays: dict[str, NDArray[Any]] = {"labels": labels, "dense": dense, "sparse": sparse}
        optional = {"weights": weights, "groups": groups, "times": times}
        optional |= {"bag_values": bag_values, "bag_ends": bag_lengths, "bag_weights": bag_weights}
        arrays |= {name: array for name, array in optional.items() if array is not None}
        if arrays.keys() != self._dtypes.keys():
            raise ValueError(
                f"StoreWriter.append: a store declared with {list(self._dtypes)} needs these "
                f"arrays, got {list(arrays)} (bag_ends stands for bag_lengths); declare what is "
                "appended"
            )
        if bag_values is not None and bag_lengths is not None:
            arrays["bag_ends"] = self._ends(len(labels), bag_values, bag_lengths)
            if bag_weights is not None and bag_weights.shape != bag_values.shape:
                raise ValueError(
                    f"StoreWriter.append: bag_weights must be {bag_values.shape}, as bag_values "
                    f"is, got {bag_weights.shape}"
                )
            self._num_bag_values += len(bag_values)
        for name, array in arrays.items():
            self._files[name].write(np.ascontiguousarray(array, self._dtypes[name]).data)
        self.num_samples += len(labels)

    def _ends(
        self, num_samples: int, bag_values: NDArray[np.int32], bag_lengths: NDArray[Any]
    ) -> NDArray[np.int64]:
        """Where bags end among the values of the whole store."""
        ends: NDArray[np.int64] = np.cumsum(bag_lengths, dtype=np.int64)
        is_shaped = bag_lengths.shape == (num_samples, self._num_bags)
        if not is_shaped or bag_lengths.min(initial=0) < 0 or bag_lengths.sum() != len(bag_values):
            raise ValueError(
                f"StoreWriter.append: bag_lengths must be {(num_samples, self._num_bags)}, not "
                f"negative, with sum {len(bag_values)} as bag_values has, got "
                f"{bag_lengths.shape} with sum {bag_lengths.sum()}"
            )
        return ends + self._num_bag_values

    def finish(
        self,
        *,
        dense_names: Sequence[str],
        splits: Mapping[str, range],
        about: Mapping[str, Any],
        ids: Mapping[str, NDArray[np.uint32]] | None = None,
        table_sizes: Mapping[str, int] | None = None,
        catalog: NDArray[np.int32] | None = None,
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

        Raises:
            AlreadyExists: `path` was created by another program meanwhile.
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
            **{key: values[0] for key, values in UNDERSTOOD.items()},
            "dense_transform": self._dense_transform,
            "dtypes": dtypes_of(self._dense_transform, self._files),
            **about,
            "num_samples": self.num_samples,
            "splits": {name: [part.start, part.stop] for name, part in splits.items()},
            "dense_names": list(dense_names),
            "num_embeddings": dict(table_sizes),
        }
        if self._features is not None:
            meta["features"] = [feature.as_dict() for feature in self._features]
        (self.folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        for file in self._files.values():
            file.close()
        for path in (*self.folder.rglob("*"), self.folder):
            flush_to_disk(path)
        try:
            self.folder.rename(self.path)
        except OSError as error:
            if self.path.exists():
                raise AlreadyExists(
                    f"store {self.path} was created by another program meanwhile; choose another "
                    "folder"
                ) from error
            raise
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


def _warn_of_left_folders(path: Path) -> None:
    """Warn of the folders that other writers of a store have made and not removed.

    They stay: not every file system tells whether the writer is still at work.
    """
    name = re.compile(re.escape(f".{path.name}.") + "[0-9a-f]{8}")
    with suppress(FileNotFoundError, PermissionError):  # a parent that may not be read
        left = sorted(each for each in path.parent.iterdir() if name.fullmatch(each.name))
        if left:
            folders = " ".join(map(as_argument, left))
            warnings.warn(
                f"{path}: a preparation of this store was killed, or is still at work, and left "
                f"{folders}; if none is at work: rm -r {folders}",
                stacklevel=4,
            )
