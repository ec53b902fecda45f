"""`recsys bench prepare`: raw Criteo text to numbered arrays, beside a chunked pandas reader.

The text is a sample repeated until it is large enough. Ids that occur once in the sample are given
new values in every repetition, so that new ids keep coming as they do in a long file, while popular
ones stay popular. It is read from the page cache: what is measured is the work, not the disk the
raw file lies on. Each run has a process of its own.
"""

from __future__ import annotations

import gzip
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from recsys.bench.harness import Row, in_own_process, summarize
from recsys.datasets.criteo import CATEGORY_NAMES, INTEGER_NAMES, prepare_criteo_kaggle
from recsys.datasets.criteo_parse import NUM_FIELDS, NUM_INTEGERS, parse_lines
from recsys.errors import ConfigError
from recsys.machine import peak_memory_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["bench_prepare", "prepare_with_pandas"]

_FULL_BYTES = 1_000_000_000
_QUICK_BYTES = 100_000_000
_FULL_RUNS = 3
_PANDAS_CHUNK_LINES = 200_000
_HEX_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)


def bench_prepare(raw: Path | None, *, quick: bool) -> list[Row]:
    """Measure throughput and peak memory of both providers.

    Args:
        raw: The sample, plain or gzip; `criteo_kaggle_137k` under the folder RECSYS_DATA names by
            default.
        quick: A tenth of the text, one run.

    Raises:
        ConfigError: there is no sample.
    """
    raw = raw or Path(os.environ.get("RECSYS_DATA", ".")) / "criteo_kaggle_137k" / "train.txt.gz"
    if not raw.is_file():
        raise ConfigError(
            f"bench prepare needs raw Criteo text, but {raw} is no file; name one with --raw, or "
            "the folder of samples with RECSYS_DATA"
        )
    providers = {"recsys": _prepare_with_recsys, "pandas": prepare_with_pandas}
    seconds: dict[str, list[float]] = {provider: [] for provider in providers}
    peaks: dict[str, list[float]] = {provider: [] for provider in providers}
    with tempfile.TemporaryDirectory(prefix="recsys-bench-") as folder:
        text = Path(folder) / "train.txt"
        num_bytes, num_lines = write_long_text(raw, text, _QUICK_BYTES if quick else _FULL_BYTES)
        num_ids = 0
        for run in range(1 if quick else _FULL_RUNS):
            for provider, prepare in providers.items():
                out = Path(folder) / f"{provider}-{run}"
                spent, peak, num_ids = in_own_process(_measure, prepare, text, out)
                seconds[provider].append(spent)
                peaks[provider].append(peak)
    case = f"bytes={num_bytes},lines={num_lines},ids={num_ids}"
    rows = []
    for provider in providers:
        rates = [num_bytes / 1e6 / spent for spent in seconds[provider]]
        for metric, unit, values in (
            ("throughput", "MB/s", rates),
            ("peak_memory", "bytes", peaks[provider]),
        ):
            rows.append(
                summarize(
                    bench="prepare",
                    case=case,
                    provider=provider,
                    metric=metric,
                    unit=unit,
                    values=values,
                )
            )
    return rows


def write_long_text(raw: Path, out: Path, num_bytes: int) -> tuple[int, int]:
    """Repeat a sample until there are `num_bytes`; returns the bytes and lines written."""
    content = raw.read_bytes()
    text = np.frombuffer(
        gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content, np.uint8
    )
    parsed = parse_lines(text, 0, len(text), stop_at_bad_line=True)
    separators = np.flatnonzero((text == ord("\t")) | (text == ord("\n")))
    field_ends = separators.reshape(-1, NUM_FIELDS)[:, 1 + NUM_INTEGERS :]
    # Fields of eight digits whose id is seen once: where they begin, and the id.
    begins, ids = [], []
    for column, values in enumerate(parsed.categories):
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ends = field_ends[:, column]
        is_once = (counts[inverse] == 1) & (text[ends - 9] == ord("\t"))
        begins.append(ends[is_once] - 8)
        ids.append(values[is_once].astype(np.uint64))
    digit_places = np.concatenate(begins)[:, None] + np.arange(8)
    once_ids = np.concatenate(ids)
    num_repetitions = -(-num_bytes // len(text))
    changed = text.copy()
    with out.open("wb") as file:
        for repetition in range(num_repetitions):
            if repetition:
                new_ids = _other_ids(once_ids, repetition)
                nibbles = (new_ids[:, None] >> np.arange(28, -1, -4, dtype=np.uint64)) & np.uint64(
                    15
                )
                changed[digit_places] = _HEX_DIGITS[nibbles]
            file.write(changed.data)
    return num_repetitions * len(text), num_repetitions * parsed.num_lines


def prepare_with_pandas(text: Path, out: Path) -> int:
    """The same arrays by `pandas.read_csv` in chunks; returns the number of distinct ids.

    Ids are made distinct by `pandas.factorize` within a chunk and by a dictionary over chunks.
    """
    out.mkdir()
    rows_of_ids: list[dict[str, int]] = [{} for _ in CATEGORY_NAMES]
    names = ["label", *INTEGER_NAMES, *CATEGORY_NAMES]
    dtypes: dict[str, Any] = {"label": np.int8}
    dtypes |= dict.fromkeys(INTEGER_NAMES, np.float64) | dict.fromkeys(CATEGORY_NAMES, str)
    with (
        (out / "labels.bin").open("wb") as labels,
        (out / "dense.bin").open("wb") as dense,
        (out / "sparse.bin").open("wb") as sparse,
    ):
        chunks: Iterator[pd.DataFrame] = pd.read_csv(
            text,
            sep="\t",
            header=None,
            names=names,
            dtype=dtypes,
            chunksize=_PANDAS_CHUNK_LINES,
            na_values=[""],
            keep_default_na=False,
        )
        for chunk in chunks:
            labels.write(chunk["label"].to_numpy().data)
            integers = chunk[list(INTEGER_NAMES)].fillna(0).clip(lower=0)
            dense.write(np.ascontiguousarray(integers.to_numpy(np.int32)).data)
            rows = np.empty((len(chunk), len(CATEGORY_NAMES)), np.int32)
            for column, name in enumerate(CATEGORY_NAMES):
                numbers = rows_of_ids[column]
                codes, ids = pd.factorize(chunk[name].fillna("00000000"))
                rows[:, column] = np.array(
                    [numbers.setdefault(raw_id, len(numbers)) for raw_id in ids], np.int32
                )[codes]
            sparse.write(rows.data)
    return sum(map(len, rows_of_ids))


def _prepare_with_recsys(text: Path, out: Path) -> int:
    return prepare_criteo_kaggle([text], out, show_progress=False).num_rows


def _measure(prepare: Any, text: Path, out: Path) -> tuple[float, int, int]:
    """Seconds, peak memory and distinct ids of one run; kernels are compiled beforehand."""
    with tempfile.TemporaryDirectory() as folder:
        short = Path(folder) / "short.txt"
        with text.open("rb") as file:
            short.write_bytes(file.readline())
        prepare(short, Path(folder) / "out")
    begin = time.perf_counter()
    num_ids = prepare(text, out)
    return time.perf_counter() - begin, peak_memory_bytes(), num_ids


def _other_ids(ids: NDArray[np.uint64], repetition: int) -> NDArray[np.uint64]:
    """Other 32-bit ids; they stay distinct, since multiplying by an odd number loses nothing."""
    mixed = ids * np.uint64(0x9E3779B1) + np.uint64(repetition) * np.uint64(0x85EBCA6B)
    return mixed & np.uint64(0xFFFFFFFF)
