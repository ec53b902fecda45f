"""Convert stores to and from facebookresearch/dlrm's `kaggleAdDisplayChallenge_processed.npz`.

    X_cat   (N, 26)  rows, numbered by first appearance
    X_int   (N, 13)  integers; missing and negative ones are 0; the loader takes the logarithm
    y       (N,)     labels
    counts  (26,)    num_embeddings

All samples are in file order. The classic script splits them when it loads them, as
`classic_splits` does. The file has no raw ids, so neither has a store made from it. The classic
script writes X_cat as 64-bit floats in Fortran order; these are read too. Files written here have
int32, as the classic loader converts them.

References:
    facebookresearch/dlrm, data_utils.py: `concatCriteoAdData`.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZipFile, ZipInfo

import numpy as np

from recsys._support.files import appearing_whole, require_files, require_new
from recsys._support.npy_files import NpzFile
from recsys.datasets.interchange.npy_blocks import (
    NpyReader,
    in_blocks,
    require,
    whole_numbers,
    write_header,
)
from recsys.datasets.interchange.npy_store import append_samples, finish_numbered
from recsys.datasets.splits import classic_splits
from recsys.datasets.store import StoreWriter
from recsys.errors import DatasetFormatError, StoreError

if TYPE_CHECKING:
    from recsys.datasets.store import Store

__all__ = ["read_classic_npz", "write_classic_npz"]

_ARRAYS = ("X_cat", "X_int", "y", "counts")
_INT32_END = 2**31


def write_classic_npz(store: Store, file: str | Path) -> Path:
    """Write a store as the classic script's processed file; streaming, not compressed.

    Args:
        store: A store of convention `classic`.
        file: The file to write, which must not exist. The classic script looks for
            `kaggleAdDisplayChallenge_processed.npz` beside its raw file.

    Returns:
        `file`.

    Raises:
        StoreError: the store has another convention, or other splits than the classic script's.
        AlreadyExists: `file` exists.
    """
    if store.meta["convention"] != "classic":
        raise StoreError(
            f"store {store.path}: the classic npz needs convention 'classic', got "
            f"{store.meta['convention']!r}; {_way_out(store)}"
        )
    for name, expected in classic_splits(store.num_samples).items():
        found = store.splits[name]
        if found != expected:
            raise StoreError(
                f"store {store.path}: the classic npz keeps no splits, so the {name} samples must "
                f"be {expected.start} to {expected.stop}, as the classic script splits them, got "
                f"{found.start} to {found.stop}; write each part as torchrec-npy, or prepare the "
                "raw files as criteo-kaggle"
            )
    file = Path(file)
    require_new(file)
    counts = np.array(list(store.table_sizes.values()), np.int32)
    arrays = (store.sparse, store.dense, store.labels, counts)
    with appearing_whole(file) as partial, ZipFile(partial, "w", allowZip64=True) as archive:
        for name, array in zip(_ARRAYS, arrays, strict=True):
            # ZipInfo has a fixed date: equal stores give equal bytes.
            with archive.open(ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                write_header(member, array.shape, "<i4")
                for block in in_blocks(range(len(array))):
                    part = array[block.start : block.stop]
                    member.write(np.ascontiguousarray(part, "<i4").data)
    return file


def _way_out(store: Store) -> str:
    if store.meta["convention"] == "torchrec":
        return "prepare the raw files of Criteo with --convention classic"
    return "write it as torchrec-npy, which takes features with one value each, part by part"


def read_classic_npz(file: str | Path, store: str | Path) -> Path:
    """Make a store from the classic script's processed file; streaming.

    Args:
        file: The npz, compressed or not.
        store: The store's folder, which must not exist.

    Returns:
        `store`.

    Raises:
        DatasetFormatError: arrays are missing or damaged, or have a wrong shape or an invalid value
            (the message names array, sample and column).
        FileNotFoundError: there is no such file.
        AlreadyExists: `store` exists.
    """
    file = Path(file)
    require_files("npz", [file])
    with ExitStack() as stack:
        try:
            archive = stack.enter_context(NpzFile(file))
        except ValueError as error:
            raise DatasetFormatError(
                f"{file}: is not an npz file ({error}); fetch it again"
            ) from error
        missing = [f"{name}.npy" for name in sorted(set(_ARRAYS) - set(archive.names))]
        require(
            str(file),
            not missing,
            f"must have the arrays {', '.join(_ARRAYS)}",
            f"none called {', '.join(missing)}",
        )
        writer = stack.enter_context(StoreWriter(store))
        rows, integers, labels, counts = (
            NpyReader(f"{file}: {name}", partial(archive.open_array, name), writer.path.parent)
            for name in _ARRAYS
        )
        _require_shapes(rows, integers, labels, counts)
        sizes = np.concatenate(
            [
                whole_numbers(counts.name, block, 0, _INT32_END, "is the file damaged?")
                for block in counts.blocks()
            ]
        )
        append_samples(
            writer,
            labels,
            integers,
            rows,
            check_dense=partial(
                whole_numbers, limits=_INT32_END, suggestion="run the classic script again"
            ),
            check_rows=partial(
                whole_numbers,
                limits=sizes,
                suggestion="counts has the number of rows; run the classic script again",
            ),
            label_rule="labels must be 0 or 1",
        )
        return finish_numbered(
            writer,
            num_dense=integers.shape[1],
            table_sizes=sizes,
            splits=classic_splits(labels.shape[0]),
            convention="classic",
            sources=[file],
        )


def _require_shapes(
    rows: NpyReader, integers: NpyReader, labels: NpyReader, counts: NpyReader
) -> None:
    require(counts.name, len(counts.shape) == 1, "must be (F,)", counts.shape)
    require(counts.name, counts.shape != (0,), "must have at least one table", counts.shape)
    require(labels.name, len(labels.shape) == 1, "must be (N,)", labels.shape)
    (num_samples,), (num_tables,) = labels.shape, counts.shape
    require(labels.name, num_samples > 0, "must have at least one sample", labels.shape)
    is_right = rows.shape == (num_samples, num_tables)
    require(rows.name, is_right, f"must be ({num_samples}, {num_tables})", rows.shape)
    is_right = len(integers.shape) == 2 and integers.shape[0] == num_samples
    require(integers.name, is_right, f"must be ({num_samples}, I)", integers.shape)
