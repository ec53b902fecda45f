"""Raw text to a store, compared with pandas in chunks.

    raw Criteo text    a sample repeated until it is large enough
    --table            a synthetic table of 20 columns, as CSV and as Parquet: a label, six dense
                       columns (a tenth of the values missing), eleven columns of texts and two of
                       integers, whose values have popularity 1 / rank

Ids that occur once in the Criteo sample get new values in every repetition. So new ids keep
appearing, as in a long file, and popular ids stay popular. Both providers number all values and
write the same arrays. The text is in the page cache, so the speed of the disk is not measured. Each
run has its own process, and all providers take a turn in each round. Throughput is in bytes of
text, for Parquet too.
"""

from __future__ import annotations

import gzip
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from turns import (
    Row,
    bench_arguments,
    in_own_process,
    process_memory,
    ratio,
    rows_by_provider,
    show_rows,
    take_turns,
)

from recsys.datasets import Schema, prepare_criteo_kaggle, prepare_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

_CHUNK_ROWS = 200_000
_HEX_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)
_CRITEO_INTEGERS = [f"int_{number}" for number in range(13)]
_CRITEO_CATEGORIES = [f"cat_{number}" for number in range(26)]
_DENSE = [f"dense_{column}" for column in range(6)]
_TEXT_VALUES = (10, 50, 100, 500, 1_000, 5_000, 10_000, 100_000, 200_000, 1_000_000, 3_000_000)
_TEXTS = {f"text_{column}": size for column, size in enumerate(_TEXT_VALUES)}
_INTEGERS = {"integer_0": 1_000, "integer_1": 100_000}


class _Provider(NamedTuple):
    """What is measured.

    Attributes:
        prepare: Writes a file to a folder and returns the number of distinct values.
        short: A short file, with which it compiles its kernels.
        long: The file to measure.
    """

    prepare: Callable[[Path, Path], int]
    short: Path
    long: Path


class _Run(NamedTuple):
    """One run of a provider."""

    seconds: float
    peak_bytes: float
    num_values: int


def bench_criteo(raw: Path, num_lines: int, num_runs: int) -> list[Row]:
    """Measure throughput and peak memory on Criteo text, and compare their speed.

    Args:
        raw: The sample, plain or gzip, with ids of eight digits.
        num_lines: The least number of lines; the whole sample is repeated.
        num_runs: Runs of each provider.
    """
    with tempfile.TemporaryDirectory(prefix="recsys-bench-") as name:
        folder = Path(name)
        long, short = folder / "train.txt", folder / "short.txt"
        num_lines = _write_long_text(raw, long, num_lines)
        with long.open("rb") as file:
            short.write_bytes(file.readline())
        providers = {
            "recsys": _Provider(_criteo_by_recsys, short, long),
            "pandas": _Provider(_criteo_by_pandas, short, long),
        }
        num_bytes = long.stat().st_size
        case = f"bytes={num_bytes},lines={num_lines},ids="
        return _measure_runs("prepare", case, num_bytes, providers, num_runs)


def bench_table(num_rows: int, num_runs: int) -> list[Row]:
    """Measure the same on a synthetic table, of about 160 bytes a row."""
    with tempfile.TemporaryDirectory(prefix="recsys-bench-") as name:
        folder = Path(name)
        in_own_process(_write_table_files, folder, "short", 10)
        in_own_process(_write_table_files, folder, "long", num_rows)
        num_bytes = (folder / "long.csv").stat().st_size
        providers = {
            name: _Provider(prepare, folder / f"short{suffix}", folder / f"long{suffix}")
            for name, prepare, suffix in (
                ("recsys", _table_by_recsys, ".csv"),
                ("recsys-parquet", _table_by_recsys, ".parquet"),
                ("pandas", _table_by_pandas, ".csv"),
            )
        }
        case = f"bytes={num_bytes},rows={num_rows},columns=20,values="
        return _measure_runs("prepare-table", case, num_bytes, providers, num_runs)


def _measure_runs(
    bench: str, case: str, num_bytes: int, providers: Mapping[str, _Provider], num_runs: int
) -> list[Row]:
    """Let providers take turns, each run in its own process; compare them with "pandas"."""
    done = take_turns(
        {name: partial(in_own_process, _run, *each) for name, each in providers.items()},
        num_runs,
        num_warm_up_rounds=0,  # each process warms up itself
    )
    found = {run.num_values for runs in done.values() for run in runs}
    assert len(found) == 1, f"the providers disagree on the number of values: {found}"
    case += str(found.pop())
    seconds = {name: [run.seconds for run in runs] for name, runs in done.items()}
    rates = {name: [num_bytes / 1e6 / s for s in spent] for name, spent in seconds.items()}
    peaks = {name: [run.peak_bytes for run in runs] for name, runs in done.items()}
    baseline = seconds.pop("pandas")
    return [
        *rows_by_provider(bench, case, "throughput", "MB/s", rates),
        *rows_by_provider(bench, case, "peak_memory", "bytes", peaks),
        *(
            ratio(bench, case, name, "speed_over_pandas", values=spent, baseline=baseline)
            for name, spent in seconds.items()
        ),
    ]


def _run(prepare: Callable[[Path, Path], int], short: Path, long: Path) -> _Run:
    """Measure one run, in the folder of the text, after kernels are compiled."""
    with tempfile.TemporaryDirectory(dir=long.parent) as folder:
        prepare(short, Path(folder) / "short")
        begin = time.perf_counter()
        num_values = prepare(long, Path(folder) / "out")
        seconds = time.perf_counter() - begin
    return _Run(seconds, process_memory()["VmHWM"], num_values)


def _write_long_text(raw: Path, out: Path, num_lines: int) -> int:
    """Repeat a sample to a number of lines; returns the number written."""
    content = raw.read_bytes()
    content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    text = np.frombuffer(content.replace(b"\r\n", b"\n").removesuffix(b"\n") + b"\n", np.uint8)
    lines = bytes(text).splitlines()
    fields = np.array([line.split(b"\t")[14:] for line in lines])
    # Where the eight-digit ids are that occur once in their column.
    separators = np.flatnonzero((text == ord("\t")) | (text == ord("\n")))
    ends = separators.reshape(len(lines), -1)[:, 14:]
    places = []
    for column in range(fields.shape[1]):
        _, inverse, counts = np.unique(fields[:, column], return_inverse=True, return_counts=True)
        is_once = (counts[inverse] == 1) & (np.char.str_len(fields[:, column]) == 8)
        places.append(ends[is_once, column] - 8)
    digit_places = np.concatenate(places)[:, None] + np.arange(8)
    ids = np.array([int(bytes(digits), 16) for digits in text[digit_places]], np.uint64)
    num_repetitions = -(-num_lines // len(lines))
    changed = text.copy()
    with out.open("wb") as file:
        for repetition in range(num_repetitions):
            if repetition:
                changed[digit_places] = _hex_digits(_other_ids(ids, repetition))
            file.write(changed.data)
    return num_repetitions * len(lines)


def _other_ids(ids: NDArray[np.uint64], repetition: int) -> NDArray[np.uint64]:
    """Other 32-bit ids; they stay distinct, because multiplying by an odd number is invertible."""
    mixed = ids * np.uint64(0x9E3779B1) + np.uint64(repetition) * np.uint64(0x85EBCA6B)
    return mixed & np.uint64(0xFFFFFFFF)


def _hex_digits(ids: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """The letters of 32-bit ids in hexadecimal, (N, 8)."""
    digits = ids[:, None] >> np.arange(28, -1, -4, dtype=np.uint64)
    letters: NDArray[np.uint8] = _HEX_DIGITS[digits & np.uint64(15)]
    return letters


def _write_table_files(folder: Path, name: str, num_rows: int) -> None:
    """Write a synthetic table as `name.csv` and `name.parquet`; equal sizes give equal files."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    rng = np.random.default_rng(0)
    schema = _table_of(rng, 0).schema
    options = csv.WriteOptions(quoting_style="needed")
    with (
        pa.OSFile(str(folder / f"{name}.csv"), "wb") as text,
        csv.CSVWriter(text, schema, write_options=options) as text_writer,
        parquet.ParquetWriter(folder / f"{name}.parquet", schema) as parquet_writer,
    ):
        for start in range(0, num_rows, _CHUNK_ROWS):
            chunk = _table_of(rng, min(_CHUNK_ROWS, num_rows - start))
            text_writer.write(chunk)
            parquet_writer.write(chunk)


def _table_of(rng: np.random.Generator, num_rows: int) -> Any:
    import pyarrow as pa

    def popular(num_values: int) -> Any:
        return (num_values ** rng.random(num_rows)).astype(np.int64)

    columns: dict[str, Any] = {"click": rng.integers(0, 2, num_rows)}
    for name in _DENSE:
        values = np.round(rng.lognormal(2, 2, num_rows), 2)
        columns[name] = pa.array(values, mask=rng.random(num_rows) < 0.1)
    for name, num_values in _TEXTS.items():
        ids = popular(num_values).astype(np.uint64) * np.uint64(0x9E3779B1)  # odd: distinct
        buffers = [None, pa.py_buffer(np.ascontiguousarray(_hex_digits(ids)))]
        texts = pa.FixedSizeBinaryArray.from_buffers(pa.binary(8), num_rows, buffers)
        columns[name] = texts.cast(pa.binary()).cast(pa.string())
    for name, num_values in _INTEGERS.items():
        columns[name] = popular(num_values)
    return pa.table(columns)


def _criteo_by_pandas(text: Path, out: Path) -> int:
    names = ["label", *_CRITEO_INTEGERS, *_CRITEO_CATEGORIES]
    dtypes: dict[str, Any] = {"label": np.int8}
    dtypes |= dict.fromkeys(_CRITEO_INTEGERS, np.float64) | dict.fromkeys(_CRITEO_CATEGORIES, str)
    options = {"sep": "\t", "header": None, "names": names, "keep_default_na": False}

    def dense_of(chunk: pd.DataFrame) -> NDArray[Any]:
        return np.asarray(chunk[_CRITEO_INTEGERS].fillna(0).clip(lower=0), np.int32)

    chunks = pd.read_csv(text, dtype=dtypes, chunksize=_CHUNK_ROWS, na_values=[""], **options)
    return _write_by_pandas(chunks, out, "label", _CRITEO_CATEGORIES, dense_of, 0)


def _table_by_pandas(text: Path, out: Path) -> int:
    dtypes: dict[str, Any] = {"click": np.int8}
    dtypes |= dict.fromkeys(_DENSE, np.float64) | dict.fromkeys(_TEXTS, str)
    dtypes |= dict.fromkeys(_INTEGERS, np.int64)

    def dense_of(chunk: pd.DataFrame) -> NDArray[Any]:
        return np.log1p(np.asarray(chunk[_DENSE].fillna(0).clip(lower=0), np.float32))

    chunks = pd.read_csv(text, dtype=dtypes, chunksize=_CHUNK_ROWS)
    return _write_by_pandas(chunks, out, "click", [*_TEXTS, *_INTEGERS], dense_of, 1)


def _write_by_pandas(
    chunks: Any,
    out: Path,
    label: str,
    categories: Sequence[str],
    dense_of: Callable[[pd.DataFrame], NDArray[Any]],
    first_row: int,
) -> int:
    """Write the arrays of a store chunk by chunk; returns the number of distinct values.

    `pandas.factorize` numbers the values of a chunk, a dictionary maps them to numbers over all.
    """
    out.mkdir()
    numbers: dict[str, dict[Any, int]] = {name: {} for name in categories}
    with (
        (out / "labels.bin").open("wb") as labels,
        (out / "dense.bin").open("wb") as dense,
        (out / "sparse.bin").open("wb") as sparse,
    ):
        for chunk in chunks:
            labels.write(chunk[label].to_numpy().data)
            dense.write(np.ascontiguousarray(dense_of(chunk)).data)
            rows = np.empty((len(chunk), len(categories)), np.int32)
            for column, name in enumerate(categories):
                known = numbers[name]
                values = chunk[name]
                codes, ids = pd.factorize(values.fillna("00000000") if first_row == 0 else values)
                rows[:, column] = np.array(
                    [known.setdefault(value, len(known) + first_row) for value in ids], np.int32
                )[codes]
            sparse.write(rows.data)
    return sum(map(len, numbers.values()))


def _criteo_by_recsys(text: Path, out: Path) -> int:
    return prepare_criteo_kaggle([text], out, show_progress=False).num_rows


def _table_by_recsys(table: Path, out: Path) -> int:
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
    return report.num_embeddings - len(_TEXTS) - len(_INTEGERS)  # without row 0 of each table


def main() -> None:
    """Run it from the command line."""
    parser = bench_arguments(__doc__)
    parser.add_argument("--table", action="store_true", help="a synthetic table, not Criteo text")
    parser.add_argument(
        "--raw", type=Path, help="Criteo text; default: criteo_kaggle_137k under RECSYS_DATA"
    )
    options = parser.parse_args()
    num_runs = 1 if options.quick else 6
    if options.table:
        rows = bench_table(20_000 if options.quick else 6_400_000, num_runs)
    else:
        folder = Path(os.environ.get("RECSYS_DATA", "."))
        raw = options.raw or folder / "criteo_kaggle_137k" / "train.txt.gz"
        rows = bench_criteo(raw, 1 if options.quick else 4_114_000, num_runs)
    show_rows(rows, options)


if __name__ == "__main__":
    main()
