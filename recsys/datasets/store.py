"""The prepared store: one folder that holds a data set ready for training.

    STORE/meta.json     dtypes, sources, splits
          labels.bin    (N,)     int8
          dense.bin     (N, 13)  int32, before the transform named in meta.json; float32 if the
                                 transform is "none"
          sparse.bin    (N, 26)  int32, rows
          ids.bin       (E,)     uint32, the raw id of every row, table after table (modulo
                                 max_ind_range if meta.json has it); missing if the store was
                                 made from rows that were numbered already

The arrays are flat, little-endian and memory-mapped. A writer fills a folder beside the final name
and renames it after everything is written and flushed, so a store that can be opened is complete.
Dense features are kept as integers (the logarithm is taken when a batch is read), so other tools'
formats can be written from a store without loss.
"""

from __future__ import annotations

import json
import secrets
import shutil
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from recsys._support.files import flush_to_disk
from recsys._support.jit import kernel
from recsys.batch import Batch, JaggedIds
from recsys.datasets.source import SPLITS
from recsys.datasets.store_meta import UNDERSTOOD, dtypes_of, read_meta
from recsys.errors import AlreadyExists, IdOutOfRange, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

__all__ = ["Store", "StoreWriter"]

_IDS_END = 2**32
_REWRITTEN_SAMPLES = 65_536  # per block: some megabytes
_LOWEST, _HIGHEST = float(np.finfo(np.float32).min), float(np.finfo(np.float32).max)


class StoreWriter:
    """Writes a new store; use it as a context manager.

    Nothing appears under `path` before `finish`. If the context ends without `finish`, the written
    files are removed, unless the caller passed `folder`.

    Args:
        path: The store's folder, which must not exist.
        dense_transform: Applied when a batch is read: "log(x+1)" to integers, "none" to floats.
        folder: Holds the store until `finish`, on the same disk as `path`. Files in it are
            appended to, and stay if there is no `finish`. By default a new folder beside `path`.
        num_samples: How many samples `folder` has already.

    Attributes:
        folder: Holds the store until `finish`; the caller may add files.
        num_samples: Samples appended so far.

    Raises:
        AlreadyExists: `path` exists.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        dense_transform: str = "log(x+1)",
        folder: Path | None = None,
        num_samples: int = 0,
    ) -> None:
        self.path = Path(path)
        self._dense_transform = dense_transform
        self._dtypes = dtypes_of(dense_transform, has_ids=False)
        if self.path.exists():
            raise AlreadyExists(
                f"store {self.path} exists already; remove it or choose another folder"
            )
        self._is_own_folder = folder is None
        self.folder = folder or self.path.parent / f".{self.path.name}.{secrets.token_hex(4)}"
        self.folder.mkdir(parents=True, exist_ok=not self._is_own_folder)
        self._files = {name: (self.folder / f"{name}.bin").open("ab") for name in self._dtypes}
        self.num_samples = num_samples

    @property
    def dense_dtype(self) -> np.dtype[Any]:
        """The dtype of the dense features that `append` expects."""
        return np.dtype(self._dtypes["dense"])

    def append(
        self,
        labels: NDArray[np.int8],
        dense: NDArray[np.int32] | NDArray[np.float32],
        sparse: NDArray[np.int32],
    ) -> None:
        """Add samples at the end.

        Shape:
            labels (n,); dense (n, I); sparse (n, F).
        """
        for name, array in (("labels", labels), ("dense", dense), ("sparse", sparse)):
            self._files[name].write(np.ascontiguousarray(array, self._dtypes[name]).data)
        self.num_samples += len(labels)

    def flush(self) -> None:
        """Write all appended samples to the files."""
        for file in self._files.values():
            file.flush()

    def rewrite_dense(
        self, first_sample: int, change: Callable[[NDArray[np.float32]], NDArray[np.float32]]
    ) -> None:
        """Change dense features that were appended before, in place, block by block.

        Args:
            first_sample: The first sample to change; all after it are changed too.
            change: Maps the appended features of a block, (n, I), to the new ones.
        """
        file = self._files["dense"]
        file.flush()
        num_samples = self.num_samples - first_sample
        if not num_samples:
            return
        num_dense = file.tell() // (4 * self.num_samples)
        features = np.memmap(
            self.folder / "dense.bin",
            self._dtypes["dense"],
            mode="r+",
            offset=4 * num_dense * first_sample,
            shape=(num_samples, num_dense),
        )
        for start in range(0, num_samples, _REWRITTEN_SAMPLES):
            block = features[start : start + _REWRITTEN_SAMPLES]
            block[:] = change(np.array(block))
        features.flush()

    def finish(
        self,
        *,
        dense_names: Sequence[str],
        splits: Mapping[str, range],
        about: Mapping[str, Any],
        ids: Mapping[str, NDArray[np.uint32]] | None = None,
        table_sizes: Mapping[str, int] | None = None,
    ) -> Path:
        """Write `meta.json`, flush everything to the disk and rename the folder to `path`.

        Args:
            dense_names: The dense features, in column order.
            splits: Sample numbers of "train", "test" and "validation".
            about: Further entries of meta.json, such as convention and sources.
            ids: The raw id of every row, by categorical feature, in column order.
            table_sizes: Rows of each categorical feature; needed if `ids` is None.

        Raises:
            AlreadyExists: `path` was created by another program meanwhile.
        """
        if ids is not None:
            table_sizes = {name: len(rows) for name, rows in ids.items()}
            self._files["ids"] = (self.folder / "ids.bin").open("wb")
            for rows in ids.values():
                self._files["ids"].write(np.ascontiguousarray(rows, "<u4").data)
        assert table_sizes is not None, "finish needs ids or table_sizes"
        meta = {
            **{key: values[0] for key, values in UNDERSTOOD.items()},
            "dense_transform": self._dense_transform,
            "dtypes": dtypes_of(self._dense_transform, has_ids=ids is not None),
            **about,
            "num_samples": self.num_samples,
            "splits": {name: [part.start, part.stop] for name, part in splits.items()},
            "dense_names": list(dense_names),
            "num_embeddings": dict(table_sizes),
        }
        (self.folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        for file in self._files.values():
            file.close()
        for path in (*self.folder.iterdir(), self.folder):
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
        if self._is_own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)  # does not exist after `finish`


class Store:
    """A prepared store, opened for reading: a `SampleSource`.

    Args:
        path: A folder that `recsys prepare` made.

    Attributes:
        labels, dense, sparse: The arrays, as on disk: (N,), (N, I) and (N, F).
        ids: The raw id of every row, table after table; None if the store has no raw ids.

    Raises:
        StoreError: `path` is not a complete store of a version that this library reads.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.meta = read_meta(self.path)
        self.num_samples: int = self.meta["num_samples"]
        self.table_sizes: dict[str, int] = self.meta["num_embeddings"]
        self.splits = {name: range(*self.meta["splits"][name]) for name in SPLITS}
        self.num_dense = len(self.meta["dense_names"])
        self._last_rows = np.array(list(self.table_sizes.values()), np.int64) - 1
        num_rows = sum(self.table_sizes.values())
        self.labels = self._map("labels", (self.num_samples,))
        self.dense = self._map("dense", (self.num_samples, self.num_dense))
        self.sparse = self._map("sparse", (self.num_samples, len(self.table_sizes)))
        has_ids = "ids" in self.meta["dtypes"]
        self.ids = self._map("ids", (num_rows,)) if has_ids else None

    def read(self, samples: NDArray[np.int64]) -> Batch:
        """The given samples, in the given order; see `SampleSource.read`.

        Raises:
            IndexError: a sample number is out of range.
            StoreError: a label is neither 0 nor 1, or a dense feature is not a number or, where its
                logarithm is taken, negative.
            IdOutOfRange: a row is not one of its table.
        """
        if len(samples) and not 0 <= samples.min() <= samples.max() < self.num_samples:
            raise IndexError(
                f"store {self.path}: sample numbers must lie in [0, {self.num_samples}), "
                f"got {samples.min()} to {samples.max()}"
            )
        labels_B = np.empty(len(samples), np.float32)
        dense_BI = np.empty((len(samples), self.num_dense), np.float32)
        rows_FB = np.empty((len(self.table_sizes), len(samples)), np.int64)
        has_logarithms = self.meta["dense_transform"] == "log(x+1)"
        are_good = _gather_kernel(
            self.labels,
            self.dense,
            self.sparse,
            samples,
            labels_B,
            dense_BI,
            rows_FB,
            self._last_rows,
        )
        lowest = 0 if has_logarithms else _LOWEST
        if dense_BI.size:
            are_good &= bool(lowest <= dense_BI.min() and dense_BI.max() <= _HIGHEST)
        if not are_good:
            raise self._error(samples, lowest)
        if has_logarithms:
            dense_BI += 1
            np.log(dense_BI, out=dense_BI)
        return Batch(
            torch.from_numpy(dense_BI),
            JaggedIds.from_one_hot(list(self.table_sizes), torch.from_numpy(rows_FB)),
            torch.from_numpy(labels_B),
        )

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
        return " ".join([*head, *hashes])

    def describe(self) -> dict[str, Any]:
        """The entry for this data in a run record."""
        keys = ("convention", "max_ind_range", "sources", "num_samples", "splits")
        kept = {key: self.meta[key] for key in keys if key in self.meta}
        return {"name": str(self.path), **kept, "table_sizes": self.table_sizes}

    def _error(self, samples: NDArray[np.int64], lowest: float) -> StoreError | IdOutOfRange:
        """The error for the first of these samples that has a value out of range."""
        for sample in samples.tolist():
            if self.labels[sample] not in (0, 1):
                return self._damaged(sample, "label must be 0 or 1", self.labels[sample])
            for name, value in zip(self.meta["dense_names"], self.dense[sample], strict=True):
                if not lowest <= value <= _HIGHEST:
                    rule = "at least 0" if lowest == 0 else "a finite number"
                    return self._damaged(sample, f"feature {name!r} must be {rule}", value)
            for (name, size), row in zip(
                self.table_sizes.items(), self.sparse[sample].tolist(), strict=True
            ):
                if not 0 <= row < size:
                    return IdOutOfRange(
                        f"store {self.path}, sample {sample}, feature {name!r}: row {row} is not "
                        f"in [0, {size}): the store is damaged; prepare it again"
                    )
        raise AssertionError("`read` found a value out of range in one of these samples")

    def _damaged(self, sample: int, rule: str, value: object) -> StoreError:
        return StoreError(
            f"store {self.path}, sample {sample}: {rule}, got {value}: the store is damaged; "
            "prepare it again"
        )

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
    labels_B: NDArray[np.float32],
    dense_BI: NDArray[np.float32],
    rows_FB: NDArray[np.int64],
    last_rows: NDArray[np.int64],
) -> bool:
    """Gather samples; returns whether all labels and rows are in range.

    Runs on one thread: the other cores are busy with training. `x | (last - x)` is negative if x is
    negative or above `last`. Checked in a loop of their own, rows take 2 % more time; in the loop
    that copies them, 60 %.
    """
    signs = np.int64(0)
    for position, sample in enumerate(samples):
        label = np.int64(labels[sample])
        signs |= label | (np.int64(1) - label)
        labels_B[position] = label
        for column in range(dense.shape[1]):
            dense_BI[position, column] = dense[sample, column]
        for column in range(sparse.shape[1]):
            rows_FB[column, position] = sparse[sample, column]
    for column in range(rows_FB.shape[0]):
        last = last_rows[column]
        for position in range(rows_FB.shape[1]):
            row = rows_FB[column, position]
            signs |= row | (last - row)
    return bool(signs >= 0)
