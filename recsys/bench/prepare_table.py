"""`recsys bench prepare --table`: a table of 20 columns to a store, compared with pandas in chunks.

The table is synthetic: a label, six dense columns (a tenth of the values missing), eleven columns
of texts and two of integers, whose values have popularity 1 / rank. Both providers number all
values and write the same arrays; recsys reads the table as CSV and as Parquet. The files are in the
page cache, so the speed of the disk is not measured. Each run has its own process, and all
providers take a turn in each round. Throughput is in bytes of CSV, for Parquet too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from recsys.bench.parts.scratch import scratch_folder
from recsys.bench.parts.worker import in_own_process
from recsys.bench.prepare import hex_digits, measure_runs
from recsys.datasets.tabular.prepare import prepare_table
from recsys.datasets.tabular.reading.optional_pyarrow import import_pyarrow
from recsys.datasets.tabular.schemas.schema import Schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pyarrow as pa

    from recsys.bench.parts.harness import Row

__all__ = ["TABLE_SIZES", "TableSize", "bench_prepare_table", "write_table_files"]

_DENSE = [f"dense_{column}" for column in range(6)]
_TEXT_VALUES = (10, 50, 100, 500, 1_000, 5_000, 10_000, 100_000, 200_000, 1_000_000, 3_000_000)
_TEXTS = {f"text_{column}": size for column, size in enumerate(_TEXT_VALUES)}
_INTEGERS = {"integer_0": 1_000, "integer_1": 100_000}
_CATEGORIES = [*_TEXTS, *_INTEGERS]
_CHUNK_ROWS = 200_000


@dataclass(frozen=True)
class TableSize:
    """How many rows are read, and how often.

    Attributes:
        num_rows: Rows of the table, of about 160 bytes.
        num_runs: Runs of each provider.
    """

    num_rows: int
    num_runs: int


TABLE_SIZES = {
    "quick": TableSize(num_rows=200_000, num_runs=1),
    "gigabyte": TableSize(num_rows=6_400_000, num_runs=6),
}


def bench_prepare_table(size: TableSize) -> list[Row]:
    """Measure throughput and peak memory of all providers, and compare their speed.

    Args:
        size: The amount of data; see `TABLE_SIZES`.

    Raises:
        MissingDependency: pyarrow is not installed.
    """
    with scratch_folder() as folder:
        in_own_process(write_table_files, folder, "short", 10)
        in_own_process(write_table_files, folder, "long", size.num_rows)
        num_bytes = (folder / "long.csv").stat().st_size
        case = f"bytes={num_bytes},rows={size.num_rows},columns=20,values="
        providers = {
            name: (prepare, folder / f"short{suffix}", folder / f"long{suffix}")
            for name, (prepare, suffix) in _PROVIDERS.items()
        }
        return measure_runs("prepare-table", case, num_bytes, providers, size.num_runs)


def write_table_files(folder: Path, name: str, num_rows: int) -> None:
    """Write a synthetic table as `name.csv` and `name.parquet`; equal sizes give equal files."""
    arrow = import_pyarrow()
    from pyarrow import csv, parquet

    rng = np.random.default_rng(0)
    first = _chunk(rng, 0)
    options = csv.WriteOptions(quoting_style="needed")
    with (
        arrow.OSFile(str(folder / f"{name}.csv"), "wb") as text,
        csv.CSVWriter(text, first.schema, write_options=options) as text_writer,
        parquet.ParquetWriter(folder / f"{name}.parquet", first.schema) as parquet_writer,
    ):
        for start in range(0, num_rows, _CHUNK_ROWS):
            chunk = _chunk(rng, min(_CHUNK_ROWS, num_rows - start))
            text_writer.write(chunk)
            parquet_writer.write(chunk)


def _chunk(rng: np.random.Generator, num_rows: int) -> pa.Table:
    arrow = import_pyarrow()

    def popular(num_values: int) -> Any:
        return (num_values ** rng.random(num_rows)).astype(np.int64)

    columns: dict[str, Any] = {"click": rng.integers(0, 2, num_rows)}
    for name in _DENSE:
        values = np.round(rng.lognormal(2, 2, num_rows), 2)
        columns[name] = arrow.array(values, mask=rng.random(num_rows) < 0.1)
    for name, num_values in _TEXTS.items():
        ids = popular(num_values).astype(np.uint64) * np.uint64(0x9E3779B1)  # odd: distinct
        buffers = [None, arrow.py_buffer(np.ascontiguousarray(hex_digits(ids)))]
        texts = arrow.FixedSizeBinaryArray.from_buffers(arrow.binary(8), num_rows, buffers)
        columns[name] = texts.cast(arrow.binary()).cast(arrow.string())
    for name, num_values in _INTEGERS.items():
        columns[name] = popular(num_values)
    return arrow.table(columns)


def prepare_table_with_pandas(text: Path, out: Path) -> int:
    """Write the same arrays with `pandas.read_csv` in chunks; returns the distinct values.

    `pandas.factorize` numbers the values of a chunk, a dictionary maps them to numbers over all.
    """
    out.mkdir()
    numbers: dict[str, dict[Any, int]] = {name: {} for name in _CATEGORIES}
    dtypes: dict[str, Any] = {"click": np.int8}
    dtypes |= dict.fromkeys(_DENSE, np.float64) | dict.fromkeys(_TEXTS, str)
    dtypes |= dict.fromkeys(_INTEGERS, np.int64)
    with (
        (out / "labels.bin").open("wb") as labels,
        (out / "dense.bin").open("wb") as dense,
        (out / "sparse.bin").open("wb") as sparse,
    ):
        chunks: Iterator[pd.DataFrame] = pd.read_csv(text, dtype=dtypes, chunksize=_CHUNK_ROWS)
        for chunk in chunks:
            labels.write(chunk["click"].to_numpy().data)
            features = np.log1p(chunk[_DENSE].fillna(0).clip(lower=0).to_numpy())
            dense.write(np.ascontiguousarray(features, np.float32).data)
            rows = np.empty((len(chunk), len(_CATEGORIES)), np.int32)
            for column, name in enumerate(_CATEGORIES):
                known = numbers[name]
                codes, values = pd.factorize(chunk[name])
                rows[:, column] = np.array(
                    [known.setdefault(value, len(known) + 1) for value in values], np.int32
                )[codes]
            sparse.write(rows.data)
    return sum(map(len, numbers.values()))


def _prepare_with_recsys(table: Path, out: Path) -> int:
    schema = Schema.from_dict(
        {
            "label": "click",
            "dense": {name: {"transform": "log"} for name in _DENSE},
            "categorical": {
                **{name: {} for name in _TEXTS},
                **{name: {"values": "integer"} for name in _INTEGERS},
            },
            "split": {"by": "fraction", "test": 0, "validation": 0},
        }
    )
    report = prepare_table([table], out, schema)
    return report.num_embeddings - len(_CATEGORIES)  # without row 0 of each table


_PROVIDERS: dict[str, tuple[Callable[[Path, Path], int], str]] = {
    "recsys": (_prepare_with_recsys, ".csv"),
    "recsys-parquet": (_prepare_with_recsys, ".parquet"),
    "pandas": (prepare_table_with_pandas, ".csv"),
}
