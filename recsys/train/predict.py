"""Predictions of a saved model for the samples of a store, or for the rows of files.

    FILE.parquet    row      int64, the number of the sample in the store, or of the row in the
                             files, from 0 up
                    score    float32, the probability of a positive
                    label    int8, 0 or 1, null where it is missing; only where labels are known

Memory is bounded: data is read, predicted and written block by block. On the CPU, tables are mapped
from the saved model, which may be larger than memory.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from recsys._support.files import appearing_whole, require_new, require_place
from recsys.datasets.loader import num_read_ahead, one_ahead, read_ahead
from recsys.datasets.store import Store
from recsys.datasets.store_writer import is_store
from recsys.datasets.tabular.encode import Encoder
from recsys.datasets.tabular.schema import NO_LABEL
from recsys.embeddings.tables_module import check_input
from recsys.errors import ConfigError, DatasetFormatError
from recsys.train.build import autocast
from recsys.train.evaluate import nonzero_counts, open_saved_model, scores_of
from recsys.train.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from recsys.batch import Batch
    from recsys.train.evaluate import SavedModel

__all__ = ["PredictReport", "predict_run"]

_PREFETCH = 4
_WRITTEN_ROWS = 1 << 17  # of a row group, at least


@dataclass(frozen=True)
class PredictReport:
    """What `predict_run` did.

    Attributes:
        path: The file with the predictions.
        num_samples: Predictions.
        has_labels: Whether the file has labels.
        unknown: How many values of each column share row 0 of their table, because training has
            them too rarely or not at all; columns without such values are left out.
        seconds: Time for reading, predicting and writing, without opening the model.
    """

    path: Path
    num_samples: int
    has_labels: bool
    unknown: dict[str, int]
    seconds: float


def predict_run(
    run_dir: str | Path,
    data: Sequence[str | Path],
    out: str | Path,
    *,
    batch_size: int = 8192,
    store: str | Path | None = None,
) -> PredictReport:
    """Predict samples with the model of a run, and write a Parquet file.

    Args:
        run_dir: A run that saved its model.
        data: One store; or files with the columns of the run's store that are features, in order,
            with or without the label. Other columns are not read. Files are encoded by the
            vocabularies of the run's store.
        out: A new file, with a name that ends in .parquet.
        batch_size: Samples per forward pass.
        store: For files: where the run's store is now; default: where it was in training.

    Raises:
        AlreadyExists: `out` exists.
        ConfigError: there is no saved model, it does not fit the data, the run's store has changed
            or has histories, which files alone do not give, `store` is given for samples of a
            store, or `batch_size` is less than 1.
        DatasetFormatError: a file cannot be read, a row breaks the schema, or the model gives a row
            no finite score.
        FileNotFoundError: a file does not exist.
        IdOutOfRange: a row is not one of its table.
        StoreError: the store is damaged, or files are given and the run's store was not made from a
            table.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
    out = Path(out)
    if out.suffix != ".parquet":
        raise ConfigError(f"predictions are a Parquet file; give a name in .parquet, got {out}")
    require_place(out)
    require_new(out)
    from_store = len(data) == 1 and is_store(Path(data[0]))
    if from_store and store is not None:
        raise ConfigError(f"--store is for files, and {data[0]} is a store; leave --store out")
    source = data[0] if from_store else store
    saved = open_saved_model(run_dir, None if source is None else str(source))
    begun = time.perf_counter()
    with ExitStack() as stack:
        if from_store:
            assert isinstance(saved.source, Store)
            samples = _of_store(saved.source, batch_size)
        else:
            samples = _of_files(Encoder(_store_of_run(run_dir, saved), data), batch_size)
        file = stack.enter_context(appearing_whole(out))
        num_samples = _write(saved, samples, file)
    return PredictReport(
        path=out,
        num_samples=num_samples,
        has_labels=samples.has_labels,
        unknown=nonzero_counts(samples.unknown()),
        seconds=time.perf_counter() - begun,
    )


def _store_of_run(run_dir: str | Path, saved: SavedModel) -> Store:
    """The store of a run, as it was when the model was trained.

    Raises:
        ConfigError: it is no store, or another one than then.
    """
    store = saved.source
    if not isinstance(store, Store):
        raise ConfigError(
            f"{run_dir} was trained on {saved.config.data}, which has no vocabularies to encode "
            "files by; predict the samples of a store"
        )
    record = RunFolder.open(run_dir).read_record()
    if record["data"].get("fingerprint") != store.fingerprint:
        raise ConfigError(
            f"store {store.path} is not the one that {run_dir} was trained on: it was prepared "
            "again; train again, or restore the store"
        )
    return store


class _Samples(NamedTuple):
    """What is predicted.

    Attributes:
        batches: The mini-batches.
        has_labels: Whether labels are known.
        location: Words for a sample, by its number.
        unknown: Values with row 0 so far, by column.
    """

    batches: Iterator[Batch]
    has_labels: bool
    location: Callable[[int], str]
    unknown: Callable[[], Mapping[str, int]]


def _of_store(store: Store, batch_size: int) -> _Samples:
    """The samples of a store, in their order; some mini-batches are read ahead."""

    def batches() -> Iterator[Batch]:
        parts = _parts(store.num_samples, batch_size)
        ahead = num_read_ahead(_PREFETCH, batch_size)
        with closing(read_ahead(store, parts, ahead)) as found:
            yield from found

    def unknown() -> Mapping[str, int]:
        found: Counter[str] = Counter()
        for columns in store.meta.get("unknown", {}).values():
            found.update(columns)
        return found

    return _Samples(batches(), True, lambda sample: f"store {store.path}, sample {sample}", unknown)


def _of_files(encoder: Encoder, batch_size: int) -> _Samples:
    """The rows of files; a thread reads and encodes the next block meanwhile."""

    def blocks() -> Iterator[list[Batch]]:
        for block in encoder.files.batches():
            rows = encoder.encode(block)
            yield [rows.take(part).as_batch() for part in _parts(block.num_rows, batch_size)]

    def batches() -> Iterator[Batch]:
        with closing(one_ahead(blocks(), "recsys-load")) as found:
            for block in found:
                yield from block

    has_labels = encoder.schema.label in encoder.files.columns
    return _Samples(batches(), has_labels, encoder.files.place, lambda: encoder.unknown)


def _parts(num_samples: int, batch_size: int) -> Iterator[NDArray[np.int64]]:
    """Numbers of samples, by mini-batch."""
    for begin in range(0, num_samples, batch_size):
        yield np.arange(begin, min(begin + batch_size, num_samples))


def _write(saved: SavedModel, samples: _Samples, file: Path) -> int:
    """Predict all samples and write them; returns how many."""
    import pyarrow as pa
    from pyarrow import parquet

    fields = [pa.field("row", pa.int64(), False), pa.field("score", pa.float32(), False)]
    if samples.has_labels:
        fields.append(pa.field("label", pa.int8()))
    num_samples = num_written = 0
    kept: list[tuple[NDArray[np.float32], NDArray[np.int8]]] = []
    with parquet.ParquetWriter(file, pa.schema(fields), use_dictionary=False) as writer:

        def write() -> None:
            scores, labels = (np.concatenate(each) for each in zip(*kept, strict=True))
            arrays = [
                pa.array(np.arange(num_written, num_samples)),
                pa.array(scores),
                pa.array(labels, mask=labels == NO_LABEL),
            ]
            table = pa.Table.from_arrays(arrays[: len(fields)], schema=pa.schema(fields))
            writer.write_table(table)
            kept.clear()

        with torch.no_grad(), autocast(saved.config):
            for batch in samples.batches:
                logits, labels = scores_of(saved.model, batch)
                is_bad = ~np.isfinite(logits)
                if is_bad.any():
                    raise DatasetFormatError(
                        f"{samples.location(num_samples + int(np.argmax(is_bad)))}: a score must "
                        "be finite, and the model gives none for this row; correct its dense "
                        "features, or leave it out"
                    )
                probabilities = torch.sigmoid(torch.from_numpy(logits)).numpy()
                kept.append((probabilities, labels.astype(np.int8)))
                num_samples += len(logits)
                if num_samples - num_written >= _WRITTEN_ROWS:
                    write()
                    num_written = num_samples
        if kept:
            write()
    check_input(saved.model)
    return num_samples
