"""Convert stores to and from TorchRec's npy files of Criteo data, three for each day or part.

    <prefix>_dense.npy   (N, 13)  float32, already transformed
    <prefix>_sparse.npy  (N, 26)  rows, or ids to be taken modulo the tables' sizes
    <prefix>_labels.npy  (N, 1)   int32

The files contain neither table sizes nor raw ids nor the transform of the dense features. A store
made from them has float32 dense features and no raw ids. `day_splits` splits it; each prefix is a
day.

References:
    torchrec.datasets.criteo: `BinaryCriteoUtils`, `InMemoryBinaryCriteoIterDataPipe`.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys._support.arguments import is_whole
from recsys._support.files import appearing_whole, require_files, require_new
from recsys._support.npy_files import open_array
from recsys.batch import feature_tables
from recsys.datasets.interchange.npy_blocks import (
    NpyReader,
    in_blocks,
    require,
    whole_numbers,
    write_header,
)
from recsys.datasets.interchange.npy_store import append_samples, finish_numbered
from recsys.datasets.splits import SPLITS, day_splits
from recsys.datasets.store import StoreWriter
from recsys.errors import ConfigError, DatasetFormatError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from recsys.batch import Batch, SampleSource

__all__ = ["read_torchrec_npy", "write_torchrec_npy"]

_ARRAYS = ("dense", "sparse", "labels")
# A store has int32 rows, and the size of a table, largest row + 1, must fit int32 too.
_ROWS_END = 2**31 - 1
_IDS_END = 2**63
_RAW_IDS = (
    "if these are raw ids, pass table_sizes to take them modulo, or number them first with "
    "TorchRec's sparse_to_contiguous"
)
_LABELS = "labels must be 0 or 1 (TorchRec writes -1 for a file without labels)"


def write_torchrec_npy(
    source: SampleSource, folder: str | Path, prefix: str, *, split: str | None = None
) -> list[Path]:
    """Write samples as TorchRec's three files; streaming.

    TorchRec's data pipe reads the same batches from these files as this library reads from the
    source: transformed dense features, int32 rows, labels.

    Args:
        source: A store, or synthetic data.
        folder: Receives the files; created if it does not exist.
        prefix: The files are `<prefix>_dense.npy`, `<prefix>_sparse.npy`, `<prefix>_labels.npy`.
        split: Write only "train", "test" or "validation"; by default, all samples.

    Returns:
        The files: dense, sparse, labels.

    Raises:
        ConfigError: `split` is unknown, or has no sample; or samples have what the files cannot
            hold: bags of rows, shared tables, weights, labels that are no integers, or rows from
            2**31 on.
        AlreadyExists: a file exists.
    """
    if split is not None and split not in SPLITS:
        raise ConfigError(f"split must be one of {SPLITS}, got {split!r}")
    samples = range(source.num_samples) if split is None else source.splits[split]
    if not samples:
        raise ConfigError(
            f"split {split!r} must have at least one sample, got none; choose another"
        )
    files = _files(Path(folder), prefix)
    require_new(*files)
    with ExitStack() as stack:
        dense, sparse, labels = (
            stack.enter_context(stack.enter_context(appearing_whole(file)).open("wb"))
            for file in files
        )
        write_header(dense, (len(samples), source.num_dense), "<f4")
        write_header(sparse, (len(samples), len(source.table_sizes)), "<i4")
        write_header(labels, (len(samples), 1), "<i4")
        for block in in_blocks(samples):
            batch = source.read(np.arange(block.start, block.stop))
            _require_columns(source, batch)
            rows = batch.sparse_features.values().reshape(-1, len(block)).numpy().T
            dense.write(np.ascontiguousarray(batch.dense_features.numpy(), "<f4").data)
            sparse.write(np.ascontiguousarray(rows, "<i4").data)
            labels.write(np.ascontiguousarray(batch.labels.numpy(), "<i4").data)
        for written in (dense, sparse, labels):
            written.flush()  # a full disk raises here, before one of them has its name
    return files


def read_torchrec_npy(
    folder: str | Path,
    prefixes: Sequence[str],
    store: str | Path,
    *,
    table_sizes: Sequence[int] | None = None,
) -> Path:
    """Make a store from TorchRec's files, in the order given, as one data set; streaming.

    Args:
        folder: Has the files.
        prefixes: For example "day_0", ..., "day_23"; see the module docstring for splits.
        store: The store's folder, which must not exist.
        table_sizes: Take ids modulo these sizes, one per column, as TorchRec's data pipe does with
            `hashes`: negative ids, too, as which 32-bit files have ids from 2**31 on. By default
            the ids are rows, and a table's size is its largest row + 1.

    Returns:
        `store`.

    Raises:
        DatasetFormatError: a file is damaged, or has a wrong shape or an invalid value (the message
            names file, sample and column).
        ConfigError: no prefix is given, or one twice, or `table_sizes` is not one positive size per
            column.
        FileNotFoundError: a file does not exist.
        AlreadyExists: `store` exists.
    """
    if isinstance(prefixes, str) or not prefixes:
        raise ConfigError(f"prefixes must be a list of at least one day, got {prefixes!r}")
    triplets = [_files(Path(folder), prefix) for prefix in prefixes]
    sources = [file for files in triplets for file in files]
    require_files("npy", sources)
    columns: tuple[int, int] | None = None
    day_sizes: list[int] = []
    with StoreWriter(store, dense_transform="none") as writer:
        for files in triplets:
            with ExitStack() as stack:
                readers = [
                    NpyReader(
                        str(file),
                        partial(
                            open_array, stack.enter_context(file.open("rb")), file.stat().st_size
                        ),
                        writer.path.parent,
                    )
                    for file in files
                ]
                columns = _check_shapes(readers, columns)
                if not day_sizes:
                    last_rows = np.zeros(columns[1], np.int64)
                    sizes = _check_sizes(table_sizes, columns[1])
                day_sizes.append(readers[0].shape[0])
                dense, sparse, labels = readers
                append_samples(
                    writer,
                    labels,
                    dense,
                    sparse,
                    check_dense=_finite,
                    check_rows=partial(_rows, sizes=sizes, last_rows=last_rows),
                    label_rule=_LABELS,
                )
        if sizes is None:
            sizes = last_rows + 1
        assert columns is not None
        return finish_numbered(
            writer,
            num_dense=columns[0],
            table_sizes=sizes,
            splits=day_splits(day_sizes),
            convention="torchrec",
            sources=sources,
        )


def _files(folder: Path, prefix: str) -> list[Path]:
    return [folder / f"{prefix}_{name}.npy" for name in _ARRAYS]


def _check_shapes(readers: Sequence[NpyReader], columns: tuple[int, int] | None) -> tuple[int, int]:
    """The numbers of dense and sparse columns, which must be equal for all days."""
    dense, sparse, labels = readers
    for reader in (dense, sparse):
        require(reader.name, len(reader.shape) == 2, "must be (N, columns)", reader.shape)
    num_samples = dense.shape[0]
    require(dense.name, num_samples > 0, "must have at least one sample", dense.shape)
    require(sparse.name, sparse.shape[1] > 0, "must have at least one column", sparse.shape)
    for reader in (sparse, labels):
        is_right = reader.shape[:1] == (num_samples,)
        require(reader.name, is_right, f"must have {num_samples} samples as dense", reader.shape)
    is_right = labels.shape in ((num_samples, 1), (num_samples,))
    require(labels.name, is_right, f"must be ({num_samples}, 1)", labels.shape)
    found = dense.shape[1], sparse.shape[1]
    for reader, expected in zip((dense, sparse), columns or found, strict=True):
        is_right = reader.shape[1] == expected
        require(reader.name, is_right, f"must have {expected} columns as before", reader.shape)
    return found


def _require_columns(source: SampleSource, batch: Batch) -> None:
    """Check that the arrays hold everything that samples have.

    Raises:
        ConfigError: it does not.
    """
    faults = {
        "features that share tables": len(feature_tables(source)) > len(source.table_sizes),
        "features with any number of rows per sample": not batch.sparse_features.is_known_one_hot(),
        "samples with weights": batch.weights is not None,
        "labels that are no integers": bool((batch.labels != batch.labels.trunc()).any()),
        "tables of more than 2**31 rows": any(
            size > _ROWS_END + 1 for size in source.table_sizes.values()
        ),
    }
    for fault, is_there in faults.items():
        if is_there:
            raise ConfigError(
                "torchrec-npy holds one row per sample and table and integers, and no weights, but "
                f"this data has {fault}; prepare it without them, or train on the store itself"
            )


def _check_sizes(table_sizes: Sequence[int] | None, num_columns: int) -> NDArray[np.int64] | None:
    if table_sizes is None:
        return None
    are_sizes = all(is_whole(size, 1) and size <= _ROWS_END for size in table_sizes)
    if len(table_sizes) != num_columns or not are_sizes:
        raise ConfigError(
            f"table_sizes must be {num_columns} integers in [1, {_ROWS_END}], one per sparse "
            f"column, got {list(table_sizes)}"
        )
    return np.array(table_sizes, np.int64)


def _rows(
    name: str,
    block: NDArray[Any],
    first_sample: int,
    *,
    sizes: NDArray[np.int64] | None,
    last_rows: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Ids modulo `sizes`. Without sizes, the rows unchanged, and `last_rows` is updated."""
    if sizes is not None:
        ids = whole_numbers(
            name, block, first_sample, _IDS_END, "write the ids anew", lowest=-_IDS_END
        )
        return ids % sizes  # not negative, like the sizes
    rows = whole_numbers(name, block, first_sample, _ROWS_END, _RAW_IDS)
    np.maximum(last_rows, rows.max(axis=0), out=last_rows)
    return rows


def _finite(name: str, block: NDArray[Any], first_sample: int) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # a number beyond float32 becomes infinite: refused below
        features = block.astype(np.float32)
    is_good = np.isfinite(features)
    if not is_good.all():
        sample, column = (int(place[0]) for place in np.nonzero(~is_good))
        raise DatasetFormatError(
            f"{name}, sample {first_sample + sample}, column {column}: must be a finite number, "
            f"got {block[sample, column]}; transform the raw data again"
        )
    return features
