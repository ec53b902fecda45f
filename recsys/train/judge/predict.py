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
from typing import TYPE_CHECKING

import numpy as np
import torch

from recsys._support.files import appearing_whole, require_new, require_place
from recsys.datasets.loader import ReadAhead, num_read_ahead, one_ahead
from recsys.datasets.store import Store
from recsys.datasets.store_writer import is_store
from recsys.datasets.tabular.encode import NO_LABEL
from recsys.datasets.tabular.encoder import Encoder
from recsys.datasets.tabular.read import import_pyarrow
from recsys.embeddings.tables_module import check_input
from recsys.errors import ConfigError, DatasetFormatError
from recsys.train.judge.evaluation import nonzero_counts, open_saved_model, scores_of
from recsys.train.parts.build import autocast
from recsys.train.run_files.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from recsys.batch import Batch
    from recsys.train.judge.evaluation import SavedModel

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
        MissingDependency: pyarrow is not installed.
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
    import_pyarrow()
    from_store = len(data) == 1 and is_store(Path(data[0]))
    if from_store and store is not None:
        raise ConfigError(f"--store is for files, and {data[0]} is a store; leave --store out")
    source = data[0] if from_store else store
    saved = open_saved_model(run_dir, None if source is None else str(source))
    begun = time.perf_counter()
    with ExitStack() as stack:
        samples: _StoreSamples | _FileSamples
        if from_store:
            assert isinstance(saved.source, Store)
            samples = _StoreSamples(saved.source, batch_size)
        else:
            encoder = Encoder(_store_of_run(run_dir, saved), data)
            samples = _FileSamples(stack.enter_context(encoder), batch_size)
        file = stack.enter_context(appearing_whole(out))
        num_samples = _write(saved, samples, file)
    return PredictReport(
        path=out,
        num_samples=num_samples,
        has_labels=samples.has_labels,
        unknown=samples.unknown(),
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


class _StoreSamples:
    """The samples of a store, in their order.

    Args:
        store: The store.
        batch_size: B.

    Attributes:
        has_labels: True.
        dense_names: The dense features.
    """

    has_labels = True

    def __init__(self, store: Store, batch_size: int) -> None:
        self._store, self._batch_size = store, batch_size
        self.dense_names: list[str] = store.meta["dense_names"]

    def batches(self) -> Iterator[Batch]:
        """Mini-batches; some are read ahead."""
        num_samples, size = self._store.num_samples, self._batch_size
        reader = ReadAhead(self._store, num_read_ahead(_PREFETCH, size))
        parts = (
            np.arange(begin, min(begin + size, num_samples))
            for begin in range(0, num_samples, size)
        )
        with closing(reader.read(parts)) as batches:
            yield from batches

    def place(self, sample: int) -> str:
        """Words for a sample, by its number."""
        return f"store {self._store.path}, sample {sample}"

    def unknown(self) -> dict[str, int]:
        """Values with row 0, by column, over all splits."""
        found: Counter[str] = Counter()
        for columns in self._store.meta.get("unknown", {}).values():
            found.update(columns)
        return nonzero_counts(found)


class _FileSamples:
    """The rows of files, encoded as a store encoded its own.

    Args:
        encoder: Reads the files and encodes their rows.
        batch_size: B.

    Attributes:
        has_labels: Whether the files have the column of the label.
        dense_names: The dense features.
    """

    def __init__(self, encoder: Encoder, batch_size: int) -> None:
        self._encoder, self._batch_size, self._files = encoder, batch_size, encoder.files
        self.has_labels = encoder.schema.label in self._files.columns
        self.dense_names = list(encoder.schema.dense)

    def batches(self) -> Iterator[Batch]:
        """Mini-batches; a thread reads and encodes the next block meanwhile."""
        with closing(one_ahead(self._blocks(), "recsys-load")) as blocks:
            for block in blocks:
                yield from block

    def place(self, row: int) -> str:
        """Words for a row, by its number among the rows of all files."""
        return self._files.place(row)

    def unknown(self) -> dict[str, int]:
        """Values with row 0, by column, of the rows so far."""
        return nonzero_counts(self._encoder.unknown)

    def _blocks(self) -> Iterator[list[Batch]]:
        for block in self._files.batches():
            rows = self._encoder.encode(block)
            numbers = np.arange(block.num_rows)
            parts = (
                numbers[begin : begin + self._batch_size]
                for begin in range(0, len(numbers), self._batch_size)
            )
            yield [rows.take(part).as_batch() for part in parts]


def _write(saved: SavedModel, samples: _StoreSamples | _FileSamples, file: Path) -> int:
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
            for batch in samples.batches():
                logits, labels = scores_of(saved.model, batch)
                is_bad = ~np.isfinite(logits)
                if is_bad.any():
                    raise _unscored(samples, batch, num_samples, int(np.argmax(is_bad)))
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


def _unscored(
    samples: _StoreSamples | _FileSamples, batch: Batch, num_before: int, number: int
) -> DatasetFormatError:
    """The error for a sample of a mini-batch whose logit is not finite.

    Args:
        samples: All samples.
        batch: The mini-batch.
        num_before: Samples before the mini-batch.
        number: The place of the sample in the mini-batch.
    """
    dense, found = batch.dense_features[number], ""
    if len(dense):
        column = int(dense.abs().argmax())
        found = f", whose largest dense feature is {samples.dense_names[column]!r} with "
        found += f"{float(dense[column]):g} after its transform"
    return DatasetFormatError(
        f"{samples.place(num_before + number)}: a score must be finite, the model gives none for "
        f"this row{found}; correct the row, or leave it out"
    )
