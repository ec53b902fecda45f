"""Predictions of a saved model: for the rows of frames, of files, or for the samples of a store.

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
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from recsys._support.files import appearing_whole, require_new, require_place
from recsys.datasets.loader import num_read_ahead, one_ahead, read_ahead
from recsys.datasets.store import Store
from recsys.datasets.store_writer import is_store
from recsys.datasets.tabular.encode import Encoder
from recsys.datasets.tabular.read import Frames
from recsys.datasets.tabular.schema import NO_LABEL
from recsys.embeddings.tables_module import check_input
from recsys.errors import ConfigError, DatasetFormatError
from recsys.train.build import autocast
from recsys.train.evaluate import nonzero_counts, open_saved_model, scores_of
from recsys.train.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pandas as pd
    import pyarrow as pa
    from numpy.typing import NDArray

    from recsys.batch import Batch

__all__ = ["PredictReport", "Predictor", "predict_run"]

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


class Predictor:
    """The model of a run, ready to predict.

    Args:
        run_dir: A run that saved its model.
        store: Where the store of the run is now; default: where it was in training.
        batch_size: Samples per forward pass.

    Raises:
        ConfigError: there is no saved model, it does not fit the data, or `batch_size` is less than
            1.
        StoreError: the store does not exist, or is damaged.
    """

    def __init__(
        self, run_dir: str | Path, *, store: str | Path | None = None, batch_size: int = 8192
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
        self._run_dir, self._batch_size = run_dir, batch_size
        self._config, self.source, self._model = open_saved_model(
            run_dir, None if store is None else str(store)
        )

    def predict(self, frame: pd.DataFrame | pa.Table) -> NDArray[np.float32]:
        """The probability of a positive for each row of a frame.

        Args:
            frame: Has the columns of the run's store that are features; other columns, such as the
                label, are not read. Values get the rows of their tables by the vocabularies of the
                store, and those that training did not have share row 0.

        Shape:
            result (N,), for N rows in their order.

        Raises:
            ConfigError: the run's store is not the one of training, or has histories, which rows
                alone do not give.
            DatasetFormatError: the frame lacks a column, a row breaks the schema, or the model
                gives it no finite score.
            StoreError: the run's store was not made from a table.
            TypeError: it is no frame.
        """
        labels = self.encoder.schema.label_columns
        blocks = Frames(frame, self.encoder.schema, without=labels).batches()
        scored = self.scored(self.encoded(blocks), lambda row: f"row {row} (from 0)")
        found = [scores for scores, _ in scored]
        return np.concatenate(found) if found else np.empty(0, np.float32)

    @cached_property
    def encoder(self) -> Encoder:
        """Encodes rows by the vocabularies of the run's store.

        Raises:
            ConfigError: it is no store, another one than in training, or it has histories.
            StoreError: it was not made from a table.
        """
        store = self.source
        if not isinstance(store, Store):
            raise ConfigError(
                f"{self._run_dir} was trained on {self._config.data}, which has no vocabularies to "
                "encode rows by; predict the samples of a store"
            )
        record = RunFolder.open(self._run_dir).read_record()
        if record["data"].get("fingerprint") != store.fingerprint:
            raise ConfigError(
                f"store {store.path} is not the one that {self._run_dir} was trained on: it was "
                "prepared again; train again, or restore the store"
            )
        return Encoder(store)

    def samples(self) -> Iterator[Batch]:
        """The samples of the store, in their order; some mini-batches are read ahead."""
        parts = self._parts(self.source.num_samples)
        ahead = num_read_ahead(_PREFETCH, self._batch_size)
        with closing(read_ahead(self.source, parts, ahead)) as found:
            yield from found

    def encoded(self, blocks: Iterator[pa.RecordBatch]) -> Iterator[Batch]:
        """Rows as mini-batches; a thread reads and encodes the next block meanwhile.

        Args:
            blocks: Batches of the store's schema.
        """

        def encode() -> Iterator[list[Batch]]:
            for block in blocks:
                rows = self.encoder.encode(block)
                yield [rows.take(part).as_batch() for part in self._parts(block.num_rows)]

        with closing(one_ahead(encode(), "recsys-load")) as found:
            for batches in found:
                yield from batches

    def scored(
        self, batches: Iterator[Batch], place: Callable[[int], str]
    ) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int8]]]:
        """The probabilities and labels of each mini-batch.

        Args:
            batches: The mini-batches.
            place: Words for a sample, by its number.

        Raises:
            DatasetFormatError: the model gives a sample no finite score.
            IdOutOfRange: a row is not one of its table.
        """
        num_samples = 0
        for batch in batches:
            with torch.no_grad(), autocast(self._config):
                logits, labels = scores_of(self._model, batch)
            is_bad = ~np.isfinite(logits)
            if is_bad.any():
                raise DatasetFormatError(
                    f"{place(num_samples + int(np.argmax(is_bad)))}: a score must be finite, and "
                    "the model gives none for this row; correct its dense features, or leave it out"
                )
            yield torch.sigmoid(torch.from_numpy(logits)).numpy(), labels.astype(np.int8)
            num_samples += len(logits)
        check_input(self._model)

    def _parts(self, num_samples: int) -> Iterator[NDArray[np.int64]]:
        """Numbers of samples, by mini-batch."""
        for begin in range(0, num_samples, self._batch_size):
            yield np.arange(begin, min(begin + self._batch_size, num_samples))


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
    out = Path(out)
    if out.suffix != ".parquet":
        raise ConfigError(f"predictions are a Parquet file; give a name in .parquet, got {out}")
    require_place(out)
    require_new(out)
    from_store = len(data) == 1 and is_store(Path(data[0]))
    if from_store and store is not None:
        raise ConfigError(f"--store is for files, and {data[0]} is a store; leave --store out")
    source = data[0] if from_store else store
    predictor = Predictor(run_dir, store=source, batch_size=batch_size)
    begun = time.perf_counter()
    unknown: Counter[str] = Counter()
    if from_store:
        has_labels = True
        scored = predictor.scored(predictor.samples(), lambda row: f"store {source}, sample {row}")
        assert isinstance(predictor.source, Store)
        for counts in predictor.source.meta.get("unknown", {}).values():
            unknown.update(counts)
    else:
        encoder = predictor.encoder
        files = encoder.files(data)
        has_labels = encoder.schema.label in files.columns
        scored = predictor.scored(predictor.encoded(files.batches()), files.place)
    with appearing_whole(out) as file:
        num_samples = _write(scored, file, has_labels, -(-_WRITTEN_ROWS // batch_size))
    return PredictReport(
        path=out,
        num_samples=num_samples,
        has_labels=has_labels,
        unknown=nonzero_counts(unknown if from_store else encoder.unknown),
        seconds=time.perf_counter() - begun,
    )


def _write(
    scored: Iterator[tuple[NDArray[np.float32], NDArray[np.int8]]],
    file: Path,
    has_labels: bool,
    num_batches: int,
) -> int:
    """Write all predictions, so many mini-batches as a row group; returns how many they are."""
    import pyarrow as pa
    from pyarrow import parquet

    fields = [pa.field("row", pa.int64(), False), pa.field("score", pa.float32(), False)]
    if has_labels:
        fields.append(pa.field("label", pa.int8()))
    num_samples = 0
    with parquet.ParquetWriter(file, pa.schema(fields), use_dictionary=False) as writer:
        while group := list(islice(scored, num_batches)):
            scores, labels = (np.concatenate(arrays) for arrays in zip(*group, strict=True))
            rows = np.arange(num_samples, num_samples + len(scores))
            arrays = [pa.array(rows), pa.array(scores), pa.array(labels, mask=labels == NO_LABEL)]
            table = pa.Table.from_arrays(arrays[: len(fields)], schema=pa.schema(fields))
            writer.write_table(table)
            num_samples += len(scores)
    return num_samples
